"""What a fuzzer says: frames of every kind of wrongness, and some that are right.

An act is one connection: its first byte, its frames, and what comes of it as far as can be known beforehand.
Knows no sockets.
"""

import struct
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from kvcellar.identity import Group, Layer, ParallelStrategy
from kvcellar.wire import CONTROL, DESCRIPTOR, MAX_FRAME, encode
from kvcellar.wire import messages as m
from tests.fuzz.values import NAMESPACES, Values, namespace

HEALTHY = "healthy"  # the session of the client that behaves
PROPER = ("hello", "register")  # kinds that only open the door: they are not counted


class Frame(NamedTuple):
    kind: str
    data: bytes


class Act(NamedTuple):
    """`answered` frames get a Reply each, or Welcome for a Hello; `last` ends the connection."""

    opening: bytes
    answered: list[Frame]
    last: Frame | None
    is_open_ended: bool  # the server may be waiting for more after `last`: end the stream and see


# Many of these in one request would be a large frame, or a large answer, and not another kind of wrong.
_ALONE = ("large", "not allowed in this role", "absurd register")
_RANKS = 3
Role = Literal["scheduler", "worker", "admin"]
_ROLES: tuple[Role, ...] = ("scheduler", "scheduler", "worker", "worker", "admin")


class Words(Values):
    """`session` says which engine the fuzzer plays; acts of one session must not overlap."""

    def __init__(self, seed: str, foreign: list[bytes]) -> None:
        super().__init__(seed, foreign)
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
        answered = [self._hello()]
        if self.random.random() < 0.5:
            space = self.random.choice(NAMESPACES)
            self.favourite = space.id
            answered.append(Frame("register", self._frame((m.Register(space),))))
        answered += [self._request() for _ in range(self.random.choice((0, 3, 8, 20)))]
        return Act(CONTROL, answered, *self._ending(attached=True))

    # -- frames that are answered ------------------------------------------------------------------------

    def _hello(self) -> Frame:
        role = self.random.choice(_ROLES)
        leases = tuple(self.lease() for _ in range(self.random.choice((0, 0, 1, 50))))
        rank = self.random.randrange(_RANKS)
        label = self.text(self.random.choice((0, 10, 1000)))
        hello = m.Hello(m.PROTOCOL_VERSION, role, self._session, rank, label, leases)
        return Frame("hello", encode(hello))

    def _request(self) -> Frame:
        kind = self.random.choice(tuple(self._OPERATIONS))
        if self.random.random() < 0.001:
            kind = "large"
        make = self._OPERATIONS.get(kind, Words._large)
        several = kind not in _ALONE and self.random.random() < 0.02
        many = self.random.choice((2, 16, m.MAX_OPS)) if several else 1
        return Frame(kind, self._frame(tuple(make(self) for _ in range(many))))

    def _frame(self, ops: tuple[m.Operation, ...]) -> bytes:
        self._ids += 1
        return encode(m.Request(self._ids, self.random.choice((1, 50, 600_000)), ops))

    def _unknown_lease(self) -> m.Operation:
        kind = self.random.choice((m.Release, m.Commit, m.Abort))
        return kind(self.lease(), *self.span())

    def _condemn(self) -> m.Operation:
        return m.Condemn(self.lease(), self.random.choice((0, 1, 63)), self.random.choice((0, 7, m.MAX_KEYS)))

    def _out_of_order(self) -> m.Operation:
        space = self.space_id()
        return self.random.choice(
            (
                m.Unmapped(space, self.random.randrange(64), self.random.randrange(1 << 14)),
                m.Register(self.random.choice(NAMESPACES)),
                m.Lookup(space, self.keys(3)),
                m.Lookup(space, self.keys(3), self.random.choice((1, 50, m.MAX_WAIT_MS))),
                m.Expect(space, self.keys(3), self.random.choice((1, 50, m.MAX_WAIT_MS))),
                m.Abandon(self.random.randrange(5)),
                m.Reserve(space, self.keys(3)),
            )
        )

    def _after_leave(self) -> m.Operation:
        words = (m.Lookup(self.space_id(), self.keys(2)), m.Reserve(self.space_id(), self.keys(2)))
        return m.Leave() if self.random.random() < 0.1 else self.random.choice(words)

    def _wrong_role(self) -> m.Operation:
        # Never what an admin may do to somebody else: the healthy client shall find all it stored.
        ours = self.random.choice(NAMESPACES).id
        forbidden = (m.Status(), m.Clear(ours), m.Pin(ours, False), m.Pin(self.random.randbytes(16), True))
        return self.random.choice(forbidden)

    def _odd_keys(self) -> m.Operation:
        return m.Lookup(self.space_id(), self.random.randbytes(16 + self.random.randint(1, 15)))

    def _strange_reserve(self) -> m.Operation:
        keys = self.keys(self.random.choice((1, 2, 40)))
        parent = self.random.choice((None, keys[:16], keys[-16:], self.random.randbytes(16)))
        groups = self.random.choice((None, (63,), (0, 0), (0, 1, 2), tuple(range(64))))
        return m.Reserve(self.space_id(), keys, parent, groups)

    def _absurd_register(self) -> m.Operation:
        layer = Layer("large", 1 << 30)
        return m.Register(
            self.random.choice(
                (
                    namespace(groups=(Group(1, (layer,)),)),
                    namespace(groups=(Group(1, (layer,) * 64),) * 64),
                    namespace(parallel=ParallelStrategy(tp=1024)),
                    namespace(parallel=ParallelStrategy(tp=1, pp=1)),
                    namespace(tenant=self.text(2000)),
                    namespace(checksum="none"),
                )
            )
        )

    def _large(self) -> m.Operation:
        keys = self.keys(self.random.choice((m.MAX_KEYS, m.MAX_KEYS // 8)))
        if self.random.random() < 0.5:
            return m.Lookup(self.space_id(), keys)
        return m.Reserve(self.space_id(), keys)

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
        return _framed(msgspec.msgpack.encode(self.value(3)))

    def _nearly_right(self, _attached: bool) -> bytes:
        """The name of a message, and fields that it does not have."""
        name = self.random.choice(("Hello", "Request", "Welcome", "Ping", "Lookup", "Nobody"))
        fields = [self.value(2) for _ in range(self.random.randrange(8))]
        return _framed(msgspec.msgpack.encode([name, *fields]))

    def _wrong_operations(self, _attached: bool) -> bytes:
        name = self.random.choice(("Ping", "Lookup", "Reserve", "Commit", "Register", "Reply"))
        op = [name, *(self.value(2) for _ in range(self.random.randrange(1, 6)))]
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
        version = self.random.choice((0, -1, m.PROTOCOL_VERSION + 1, 1 << 63))
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
        fetch = m.FetchSlab(version, self._session, rank, self.space_id(), self.random.choice((0, 63)), rack)
        data = bytearray(encode(self.random.choice((fetch, fetch, m.FetchSketch(version)))))
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

    # -- words that are right ------------------------------------------------------------------------------

    def _valid(self) -> Frame:
        ops = self.random.choice(
            (
                (m.Ping(),),
                (m.Register(self.random.choice(NAMESPACES)),),
                (m.Lookup(self.space_id(), self.keys(4)), m.Ping()),
                (m.Commit(self.lease(), 0, 3), m.Condemn(self.lease(), 0, 1)),
            )
        )
        return Frame("valid", self._frame(ops))


def _framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body
