"""What a fuzzer says: frames of every kind of wrongness, and some that are right, from a seeded random
source.

An act is one connection: its first byte, its frames, and what comes of it as far as can be known beforehand.
Knows no sockets.
"""

import random
import struct
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from kvcellar.identity import BlockHash, ChunkKey, Group, Layer, Namespace, ParallelStrategy
from kvcellar.wire import CONTROL, DESCRIPTOR, MAX_FRAME, encode
from kvcellar.wire import messages as m

LEASE_BITS = 40
HEALTHY = "healthy"  # the session of the client that behaves


class Frame(NamedTuple):
    kind: str
    data: bytes


class Act(NamedTuple):
    """`answered` frames get a Reply each, the first of them by Welcome if it is Hello; `last` ends the
    connection.
    """

    opening: bytes
    answered: list[Frame]
    last: Frame | None
    is_open_ended: bool  # the server may be waiting for more after `last`: end the stream and see


def namespace(number: int = 0, **changes: Any) -> Namespace:
    fields: dict[str, Any] = {
        "engine": "fuzz/1",
        "model": f"fuzz-{number}",
        "weights": "",
        "kv_dtype": "bfloat16",
        "kv_layout": "NHD",
        "groups": (Group(16, (Layer("layers.0", 256),)),) * (1 + number % 3),
        "parallel": ParallelStrategy(tp=1 + number % 2),
        "chunk_tokens": 256,
        "block_hash": BlockHash("sha256", 16, "00"),
        "checksum": "xxh3-64",
    }
    return Namespace(**fields | changes)


NAMESPACES = [namespace(number) for number in range(4)]
_RANKS = 3
# Many of these in one request would be a large frame, or a large answer, and not another kind of wrong.
_ALONE = ("large", "not allowed in this role", "absurd register")
Role = Literal["scheduler", "worker", "admin"]
_ROLES: tuple[Role, ...] = ("scheduler", "scheduler", "worker", "worker", "admin")


class Words:
    """`session` says which engine the fuzzer plays; acts of one session must not overlap."""

    def __init__(self, seed: str, foreign: list[bytes]) -> None:
        self.random = random.Random(seed)
        self.epoch = 0  # of the server, and ...
        self.newest = 0  # ... a lease it granted: learnt on the way
        self._foreign = foreign  # namespace ids of others
        self._ids = 0
        self._session = ""

    def act(self, session: str) -> Act:
        self._session = (
            session if self.random.random() < 0.98 else f"{session}-{self.random.getrandbits(40):x}"
        )
        draw = self.random.random()
        if draw < 0.04:
            return Act(b"", [], self._wrong_start(), is_open_ended=True)
        if draw < 0.10:
            return Act(DESCRIPTOR, [], self._question(), is_open_ended=True)
        if draw < 0.25:
            return Act(CONTROL, [], *self._ending(attached=False))
        hello = self._hello()
        count = self.random.choice((0, 2, 5, 12))
        answered = [hello] + [self._request() for _ in range(count)]
        return Act(CONTROL, answered, *self._ending(attached=True))

    # -- frames that are answered ------------------------------------------------------------------------

    def _hello(self) -> Frame:
        role = self.random.choice(_ROLES)
        leases = tuple(self._lease() for _ in range(self.random.choice((0, 0, 1, 50))))
        rank = self.random.randrange(_RANKS)
        label = self._text(self.random.choice((0, 10, 1000)))
        hello = m.Hello(m.PROTOCOL_VERSION, role, self._session, rank, label, leases)
        return Frame("hello", encode(hello))

    def _request(self) -> Frame:
        kind = self.random.choice(tuple(self._OPERATIONS))
        if self.random.random() < 0.001:
            kind = "large"
        make = self._OPERATIONS.get(kind, Words._large)
        several = kind not in _ALONE and self.random.random() < 0.05
        many = self.random.choice((2, 16, m.MAX_OPS)) if several else 1
        return Frame(kind, self._frame(tuple(make(self) for _ in range(many))))

    def _frame(self, ops: tuple[m.Operation, ...]) -> bytes:
        self._ids += 1
        return encode(m.Request(self._ids, self.random.choice((1, 50, 600_000)), ops))

    def _unknown_lease(self) -> m.Operation:
        kind = self.random.choice((m.Release, m.Commit, m.Abort))
        return kind(self._lease(), *self._span())

    def _condemn(self) -> m.Operation:
        return m.Condemn(
            self._lease(), self.random.choice((0, 1, 63)), self.random.choice((0, 7, m.MAX_KEYS))
        )

    def _out_of_order(self) -> m.Operation:
        space = self._space_id()
        return self.random.choice(
            (
                m.Unmapped(space, self.random.randrange(64), self.random.randrange(1 << 14)),
                m.Register(self.random.choice(NAMESPACES)),
                m.Lookup(space, self._keys(3)),
                m.Reserve(space, self._keys(3)),
            )
        )

    def _after_leave(self) -> m.Operation:
        return self.random.choice((m.Leave(), m.Lookup(self._space_id(), self._keys(2)), m.Ping()))

    def _wrong_role(self) -> m.Operation:
        # Never what an admin may do to somebody else: the healthy client shall find all it stored.
        ours = self.random.choice(NAMESPACES).id
        forbidden = (m.Status(), m.Clear(ours), m.Pin(ours, False), m.Pin(self.random.randbytes(16), True))
        return self.random.choice(forbidden)

    def _odd_keys(self) -> m.Operation:
        return m.Lookup(self._space_id(), self.random.randbytes(16 + self.random.randint(1, 15)))

    def _strange_reserve(self) -> m.Operation:
        keys = self._keys(self.random.choice((1, 2, 40)))
        parent = self.random.choice((None, keys[:16], keys[-16:], self.random.randbytes(16)))
        groups = self.random.choice((None, (63,), (0, 0), (0, 1, 2), tuple(range(64))))
        return m.Reserve(self._space_id(), keys, parent, groups)

    def _absurd_register(self) -> m.Operation:
        layer = Layer("large", 1 << 30)
        return m.Register(
            self.random.choice(
                (
                    namespace(groups=(Group(1, (layer,)),)),
                    namespace(groups=(Group(1, (layer,) * 64),) * 64),
                    namespace(parallel=ParallelStrategy(tp=1024)),
                    namespace(parallel=ParallelStrategy(tp=1, pp=1)),
                    namespace(tenant=self._text(2000)),
                    namespace(checksum="none"),
                )
            )
        )

    def _large(self) -> m.Operation:
        keys = self._keys(self.random.choice((m.MAX_KEYS, m.MAX_KEYS // 8)))
        if self.random.random() < 0.5:
            return m.Lookup(self._space_id(), keys)
        return m.Reserve(self._space_id(), keys)

    _OPERATIONS: ClassVar[dict[str, Callable[["Words"], m.Operation]]] = {
        "lease of nobody, or of somebody else": _unknown_lease,
        "condemn": _condemn,
        "out of order": _out_of_order,
        "after leave": _after_leave,
        "not allowed in this role": _wrong_role,
        "half a key": _odd_keys,
        "strange reserve": _strange_reserve,
        "absurd register": _absurd_register,
    }

    # -- frames that end a connection --------------------------------------------------------------------

    def _ending(self, *, attached: bool) -> tuple[Frame | None, bool]:
        if attached and self.random.random() < 0.25:
            return None, False  # just goes away
        kind = self.random.choice(tuple(self._ENDINGS))
        make, is_open_ended = self._ENDINGS[kind]
        return Frame(kind, make(self, attached)), is_open_ended

    def _noise(self, _attached: bool) -> bytes:
        return self.random.randbytes(self.random.choice((1, 3, 4, 5, 64, 4096)))

    def _noise_in_frame(self, _attached: bool) -> bytes:
        return _framed(self.random.randbytes(self.random.choice((0, 1, 2, 30, 3000))))

    def _oversized(self, _attached: bool) -> bytes:
        length = self.random.choice((MAX_FRAME + 1, 1 << 31, (1 << 32) - 1))
        return struct.pack("<I", length) + self.random.randbytes(self.random.choice((0, 100)))

    def _wrong_shape(self, _attached: bool) -> bytes:
        return _framed(msgspec.msgpack.encode(self._value(3)))

    def _nearly_right(self, _attached: bool) -> bytes:
        """The name of a message, and fields that it does not have."""
        name = self.random.choice(("Hello", "Request", "Welcome", "Ping", "Lookup", "Nobody"))
        fields = [self._value(2) for _ in range(self.random.randrange(8))]
        return _framed(msgspec.msgpack.encode([name, *fields]))

    def _wrong_operations(self, _attached: bool) -> bytes:
        name = self.random.choice(("Ping", "Lookup", "Reserve", "Commit", "Register", "Reply"))
        op = [name, *(self._value(2) for _ in range(self.random.randrange(1, 6)))]
        ops: list[Any] = [op] * self.random.choice((1, 2, m.MAX_OPS + 1))
        return _framed(msgspec.msgpack.encode(["Request", self.random.choice((1, -1, 1 << 62)), 50, ops]))

    def _mutated(self, attached: bool) -> bytes:
        data = bytearray((self._valid if attached else self._hello)().data)
        for _ in range(self.random.choice((1, 1, 2, 5))):
            at = self.random.randrange(len(data))
            data[at] = self.random.choice(
                (data[at] ^ 1 << self.random.randrange(8), self.random.randrange(256))
            )
        return bytes(data)

    def _truncated(self, attached: bool) -> bytes:
        data = (self._valid if attached else self._hello)().data
        return data[: self.random.randrange(1, len(data))]

    def _trailing(self, _attached: bool) -> bytes:
        return _framed(self._valid().data[4:] + self.random.randbytes(self.random.randint(1, 20)))

    def _deep(self, _attached: bool) -> bytes:
        depth = self.random.choice((100, 3000, 100_000))
        return _framed(
            b"\x91" * depth + b"\xc0" if self.random.random() < 0.5 else b"\x92\xa7Request" * depth
        )

    def _giant_claim(self, _attached: bool) -> bytes:
        """Arrays, maps, strings and ext values that say they are enormous."""
        claim = self.random.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")) + b"\xff\xff\xff\xff"
        before = self.random.choice((b"", b"\x94\xa7Request\x01\x32", b"\x95\xa5Hello\x01\xa9scheduler"))
        return _framed(before + claim + self.random.randbytes(10))

    def _invalid_utf8(self, _attached: bool) -> bytes:
        return _framed(
            encode(m.Hello(m.PROTOCOL_VERSION, "worker", "x" * 40))[4:].replace(b"xx", b"\xff\xfe")
        )

    def _wrong_turn(self, attached: bool) -> bytes:
        """A second Hello; or a request before the first."""
        return self._hello().data if attached else self._valid().data

    def _taken(self, attached: bool) -> bytes:
        """The rank of a live process."""
        if attached:
            return self._noise_in_frame(attached)
        return encode(m.Hello(m.PROTOCOL_VERSION, self.random.choice(_ROLES[:3]), HEALTHY))

    def _wrong_version(self, attached: bool) -> bytes:
        if attached:
            return self._noise_in_frame(attached)
        version = self.random.choice((0, -1, 2, 1 << 63))
        return encode(m.Hello(version, "scheduler", self._session))

    _ENDINGS: ClassVar[dict[str, tuple[Callable[["Words", bool], bytes], bool]]] = {
        "random bytes": (_noise, True),
        "random bytes in a frame": (_noise_in_frame, False),
        "oversized": (_oversized, False),
        "wrong shape": (_wrong_shape, False),
        "nearly a message": (_nearly_right, True),
        "wrong operations": (_wrong_operations, True),
        "mutated": (_mutated, True),
        "truncated": (_truncated, True),
        "trailing bytes": (_trailing, False),
        "deeply nested": (_deep, False),
        "giant claim": (_giant_claim, False),
        "invalid utf-8": (_invalid_utf8, False),
        "hello twice, or not at all": (_wrong_turn, False),
        "wrong version": (_wrong_version, False),
        "somebody else's rank": (_taken, False),
    }

    # -- other beginnings --------------------------------------------------------------------------------

    def _wrong_start(self) -> Frame:
        first = self.random.choice(
            [byte for byte in range(256) if bytes([byte]) not in (CONTROL, DESCRIPTOR)]
        )
        return Frame("wrong first byte", bytes([first]) + self.random.randbytes(self.random.choice((0, 100))))

    def _question(self) -> Frame:
        """What goes over a descriptor connection."""
        version = self.random.choice((m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, 7))
        rank, rack = self.random.randrange(_RANKS), self.random.choice((0, 1, (1 << 14) - 1))
        fetch = m.FetchSlab(version, self._session, rank, self._space_id(), self.random.choice((0, 63)), rack)
        data = bytearray(encode(fetch))
        draw = self.random.random()
        if draw < 0.2:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        elif draw < 0.3:
            data = bytearray(_framed(self.random.randbytes(self.random.choice((0, 10, 5000)))))
        elif draw < 0.4:
            data = data[: self.random.randrange(len(data))]
        elif draw < 0.5:
            data = bytearray(
                _framed(bytes(data[4:]).replace(self._session.encode(), b"\xff" * len(self._session)))
            )
        return Frame("descriptor question", bytes(data))

    # -- values ------------------------------------------------------------------------------------------

    def _valid(self) -> Frame:
        ops = self.random.choice(
            (
                (m.Ping(),),
                (m.Register(self.random.choice(NAMESPACES)),),
                (m.Lookup(self._space_id(), self._keys(4)), m.Ping()),
                (m.Commit(self._lease(), 0, 3), m.Condemn(self._lease(), 0, 1)),
            )
        )
        return Frame("valid", self._frame(ops))

    def _lease(self) -> int:
        near = self.newest + self.random.randint(-40, 40)
        guesses = (
            0,
            1,
            near,
            near,
            near,
            self.epoch << LEASE_BITS,
            (1 << 62) - 1,
            self.random.getrandbits(62),
        )
        return max(0, self.random.choice(guesses))

    def _span(self) -> tuple[int, int]:
        return self.random.choice(((0, 1), (0, 3), (0, m.MAX_KEYS), (5, 2), (m.MAX_KEYS, 0), (1, 40)))

    def _space_id(self) -> bytes:
        known = [space.id for space in NAMESPACES]
        return self.random.choice((*known, *known, *self._foreign, self.random.randbytes(16)))

    def _keys(self, count: int) -> bytes:
        """Few enough that sessions meet in them."""
        if count > 100:
            return self.random.randbytes(16 * count)
        return b"".join(ChunkKey(self.random.randrange(400).to_bytes(16, "little")) for _ in range(count))

    def _text(self, length: int) -> str:
        return "".join(self.random.choices("abc \n\x00\x1b\u20ac", k=length))

    def _value(self, depth: int) -> Any:
        kind = self.random.randrange(9 if depth else 7)
        if kind == 7:
            return [self._value(depth - 1) for _ in range(self.random.randrange(5))]
        if kind == 8:
            return {self._text(3): self._value(depth - 1) for _ in range(self.random.randrange(3))}
        simple = (None, True, self.random.getrandbits(64), -self.random.getrandbits(63), self.random.random())
        return (*simple, self._text(5), self.random.randbytes(self.random.choice((0, 16, 40))))[kind]


def _framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body
