"""Objects in Valkey or Redis, one server or a cluster.

    prefix + name            envelope (16 bytes), object header (64), payload; or, if that is over 4 MiB,
                             envelope, object header, and the payload is in parts:
    prefix + name + "#" + n  a part of the payload

Parts are written first and the envelope last, so what can be found is whole; a part that was evicted since
makes it a miss. Large values make the server fault in fresh memory at 1 GB/s; parts do not, and lie on
several nodes. Room is the server's business: `maxmemory`, `maxmemory-policy allkeys-lru`. Knows nothing of
topology or framing.
"""

import re
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from kvcellar.tiers.engine import Buffer, EngineError, PartlyAway
from kvcellar.tiers.redis_nodes import Login, Node, NodeAway, Nodes, explain
from kvcellar.tiers.redis_wire import Redirect, Wire
from kvcellar.tiers.remote import TIMEOUT_S, Address, Options, addresses

_WHOLE_BYTES = 4 << 20
# Just below a power of two, to which allocators round up. Parts of 1, 2 and 4 MiB were equally fast.
_PART_BYTES = (2 << 20) - 4096
_IN_FLIGHT = 3  # parts on their way at once; more did not help
_SMALL_IN_FLIGHT = 1000  # the same for commands without a value
_MAX_REDIRECTS = 5
_CERTIFICATES = ("ca_file", "cert_file", "key_file")

_ENVELOPE = struct.Struct("<4sIQ")  # magic, bytes of a part (0: there are none), bytes of the payload
_MAGIC = b"KVC1"


class _Command(NamedTuple):
    key: bytes
    send: Callable[[Wire], None]
    receive: Callable[[Wire], Any]


class RedisEngine:
    def __init__(self, nodes: Nodes, prefix: str, ttl_s: int, timeout_s: float) -> None:
        self._nodes = nodes
        self._prefix = prefix.encode()
        self._expire = [b"EX", b"%d" % ttl_s] if ttl_s else []
        self._timeout_s = timeout_s

    def write(self, name: str, source: Buffer) -> None:
        key, size = self._key(name), source.size
        whole = size <= _WHOLE_BYTES
        head = _ENVELOPE.pack(_MAGIC, 0 if whole else _PART_BYTES, size) + source.header
        with _Call(self._nodes, self._timeout_s) as call:
            if not whole:
                call.run(self._set(key + b"#%d" % number, [part]) for number, part in _parts(source.payload))
            call.run([self._set(key, [head, source.payload] if whole else [head])])

    def read(self, name: str, target: Buffer) -> bool:
        key, size = self._key(name), target.size
        whole = size <= _WHOLE_BYTES
        envelope = bytearray(_ENVELOPE.size)
        head = [memoryview(envelope), target.header]
        with _Call(self._nodes, self._timeout_s) as call:
            (found,) = call.run([_get(key, [*head, target.payload] if whole else head)])
            if not found or envelope != _ENVELOPE.pack(_MAGIC, 0 if whole else _PART_BYTES, size):
                return False
            if whole:
                return True
            parts = _parts(target.payload)
            found = all(call.run(_get(key + b"#%d" % number, [part]) for number, part in parts))
            if not found:  # lost for good; nobody shall ask for it again
                call.run([_Command(key, _sender(b"UNLINK", key), Wire.integer)])
            return found

    def exist(self, names: Sequence[str]) -> list[bool]:
        """What a node has that is away is not there."""
        keys = [self._key(name) for name in names]
        with _Call(self._nodes, self._timeout_s) as call:
            asked = [_Command(key, _sender(b"EXISTS", key), Wire.integer) for key in keys]
            return [bool(count) for count in call.run_apart(asked)]

    def delete(self, names: Sequence[str]) -> None:
        """The envelope goes first: then nobody finds it any more."""
        keys = [self._key(name) for name in names]
        with _Call(self._nodes, self._timeout_s) as call:
            envelopes = call.run([_peek(key) for key in keys], _SMALL_IN_FLIGHT)
            doomed = list(keys)
            for key, envelope in zip(keys, envelopes, strict=True):
                doomed += [key + b"#%d" % number for number in range(_count_parts(envelope))]
            call.run(
                [_Command(key, _sender(b"UNLINK", key), Wire.integer) for key in doomed], _SMALL_IN_FLIGHT
            )

    def check(self) -> None:
        """Raises EngineError unless every node answers and every slot has one."""
        nodes = self._nodes.masters(self._deadline())
        if self._nodes.uncovered:
            raise EngineError(self._nodes.uncovered)
        for node in nodes:
            with _Call(self._nodes, self._timeout_s) as call:
                call.ask(node, Wire.status, b"PING")

    def close(self) -> None:
        self._nodes.close()

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _set(self, key: bytes, value: Sequence[bytes | memoryview]) -> _Command:
        return _Command(key, lambda wire: wire.send_value([b"SET", key], value, self._expire), Wire.status)


class _Call:
    """One operation: a connection to each node it meets, and a deadline for all of it."""

    def __init__(self, nodes: Nodes, timeout_s: float) -> None:
        self._nodes = nodes
        self._deadline = time.monotonic() + timeout_s
        self._wires: dict[Node, Wire] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Each node's connection sees the exception: its own becomes an EngineError, unclean ones are closed.
        if kind is not None:
            self._nodes.fetch_soon()
        self._stack.__exit__(kind, error, trace)
        if isinstance(error, NodeAway) and self._nodes.some_answer:
            raise PartlyAway(str(error)) from None

    def run(self, commands: Iterable[_Command], in_flight: int = _IN_FLIGHT) -> list[Any]:
        """Send them ahead of their replies, which come in the same order."""
        results: list[Any] = []
        waiting: deque[tuple[_Command, Node]] = deque()
        redirected: list[tuple[int, _Command, Redirect]] = []

        def receive() -> None:
            command, node = waiting.popleft()
            try:
                results.append(self._receive(command, node))
            except Redirect as redirect:
                redirected.append((len(results), command, redirect))
                results.append(None)

        for command in commands:
            node = self._nodes.of_key(command.key, self._deadline)
            self._send(command, node)
            waiting.append((command, node))
            if len(waiting) >= in_flight:
                self._flush()
                receive()
        self._flush()
        while waiting:
            receive()
        for index, command, redirect in redirected:
            results[index] = self._follow(command, redirect)
        return results

    def run_apart(self, commands: Sequence[_Command]) -> list[Any]:
        """The same for small commands, but a node that fails costs its own alone: they have the result None.
        Raises if every node failed that was asked.
        """
        results: list[Any] = [None] * len(commands)
        failures: list[EngineError] = []
        for first in range(0, len(commands), _SMALL_IN_FLIGHT):
            numbers = range(first, min(first + _SMALL_IN_FLIGHT, len(commands)))
            self._run_apart(commands, numbers, results, failures)
        if failures:
            self._nodes.fetch_soon()
            if all(result is None for result in results):
                raise failures[0]
        return results

    def _run_apart(
        self, commands: Sequence[_Command], numbers: range, results: list[Any], failures: list[EngineError]
    ) -> None:
        by_node: dict[Node, list[int]] = {}
        redirected: list[tuple[int, Redirect]] = []
        for number in numbers:
            with self._noted(failures):
                node = self._nodes.of_key(commands[number].key, self._deadline)
                by_node.setdefault(node, []).append(number)
        asked = []
        for node, its in by_node.items():
            with self._noted(failures, node):
                for number in its:
                    self._send(commands[number], node)
                self._flush(node)
                asked.append(node)
        for place, node in enumerate(asked):
            wire, now = self._wires[node], time.monotonic()
            # The first to be silent must not use up the time in which the others are heard.
            wire.deadline = now + (self._deadline - now) / (len(asked) - place)
            with self._noted(failures, node):
                for number in by_node[node]:
                    try:
                        results[number] = self._receive(commands[number], node)
                    except Redirect as elsewhere:
                        redirected.append((number, elsewhere))
            wire.deadline = self._deadline
        for number, redirect in redirected:
            with self._noted(failures):
                results[number] = self._follow(commands[number], redirect)

    @contextmanager
    def _noted(self, failures: list[EngineError], node: Node | None = None) -> Iterator[None]:
        """What fails is no more than a note."""
        try:
            yield
        except EngineError as error:
            failures.append(error)
            if node is not None:
                self._wires.pop(node, None)  # late replies would be taken for those to what is asked next

    def ask(self, node: Node, receive: Callable[[Wire], Any], *words: bytes) -> Any:
        """Something that is not about a key."""
        command = _Command(b"", _sender(*words), receive)
        self._send(command, node)
        return self._receive(command, node)

    def _send(self, command: _Command, node: Node) -> None:
        if node not in self._wires:
            self._wires[node] = self._stack.enter_context(node.connection(self._deadline))
        with node.guard():
            command.send(self._wires[node])

    def _receive(self, command: _Command, node: Node) -> Any:
        with node.guard():
            found = command.receive(self._wires[node])
        node.heard_at = time.monotonic()
        return found

    def _flush(self, *nodes: Node) -> None:
        for node in nodes or self._wires:
            with node.guard():
                self._wires[node].flush()

    def _follow(self, command: _Command, redirect: Redirect) -> Any:
        if not self._nodes.is_cluster:
            raise EngineError(explain(str(redirect)))
        for _ in range(_MAX_REDIRECTS):
            self._nodes.fetch_soon()
            host, port = redirect.address
            asked = self._nodes.of_key(command.key, self._deadline)
            node = self._nodes.at(Address(host or asked.address.host, port))
            if redirect.code == "ASK":
                self.ask(node, Wire.status, b"ASKING")
            self._send(command, node)
            try:
                return self._receive(command, node)
            except Redirect as next_one:
                redirect = next_one
        raise EngineError("the cluster sends us in circles; is it being resharded?")


def open_redis(url: str, options: Mapping[str, str]) -> RedisEngine:
    """redis://HOST:PORT/DB, rediss:// (TLS), redis+cluster://HOST:PORT,HOST:PORT, rediss+cluster://"""
    given = Options(url, options)
    parts = urlsplit(given.url)
    timeout_s = given.seconds("timeout", TIMEOUT_S)
    ttl_s = given.whole("ttl", 0, 10 * 366 * 86400)
    prefix = given.text("prefix", "kvcellar:", r"[A-Za-z0-9_:./-]{1,64}")
    username, password = given.text("username"), given.secret("password")
    is_cluster, is_tls = parts.scheme.endswith("+cluster"), parts.scheme.startswith("rediss")
    if not is_tls and options.keys() & _CERTIFICATES:
        raise given.error("certificates need TLS: rediss:// or rediss+cluster://")
    files = given.certificates(*_CERTIFICATES)
    given.finish()
    seeds = addresses(parts.netloc, 6379)
    if len(seeds) > 1 and not is_cluster:
        raise given.error(f"{parts.scheme}:// is one server; for a cluster use {parts.scheme}+cluster://")
    database = parts.path.strip("/") or "0"
    if not re.fullmatch(r"\d{1,9}", database) or (is_cluster and database != "0"):
        raise given.error("after the port comes the number of a database, and a cluster has none but 0")
    tls = {
        "ssl_ca_certs": files["ca_file"],
        "ssl_certfile": files["cert_file"],
        "ssl_keyfile": files["key_file"],
    }
    # To connect and to log in; after that, redis_wire sees to the time-outs.
    settings: dict[str, Any] = {"socket_timeout": timeout_s / 4, "socket_connect_timeout": timeout_s / 4}
    settings |= {"db": int(database), "max_connections": 64}
    if username or password:
        settings["credential_provider"] = Login(username, password)
    nodes = Nodes(
        seeds,
        is_cluster=is_cluster,
        make_node=lambda address: Node(address, tls if is_tls else None, settings),
    )
    engine = RedisEngine(nodes, prefix, ttl_s, timeout_s)
    engine.check()
    return engine


def _get(key: bytes, targets: Sequence[memoryview]) -> _Command:
    return _Command(key, _sender(b"GET", key), lambda wire: wire.bulk_into(targets))


def _peek(key: bytes) -> _Command:
    return _Command(key, _sender(b"GETRANGE", key, b"0", b"%d" % (_ENVELOPE.size - 1)), Wire.bulk)


def _sender(*words: bytes) -> Callable[[Wire], None]:
    return lambda wire: wire.send(*words)


def _parts(payload: memoryview) -> Iterator[tuple[int, memoryview]]:
    for number, start in enumerate(range(0, len(payload), _PART_BYTES)):
        yield number, payload[start : start + _PART_BYTES]


def _count_parts(envelope: bytes | None) -> int:
    if not envelope or len(envelope) != _ENVELOPE.size or not envelope.startswith(_MAGIC):
        return 0
    _, part_bytes, size = _ENVELOPE.unpack(envelope)
    return -(-size // part_bytes) if part_bytes else 0
