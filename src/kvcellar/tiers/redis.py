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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from kvcellar.tiers.engine import Buffer, EngineError
from kvcellar.tiers.redis_call import SMALL_IN_FLIGHT, Call, Command, sender
from kvcellar.tiers.redis_nodes import Login, Node, Nodes
from kvcellar.tiers.redis_wire import Wire
from kvcellar.tiers.remote import TIMEOUT_S, Options, addresses

_WHOLE_BYTES = 4 << 20
# Just below a power of two, to which allocators round up. Parts of 1, 2 and 4 MiB were equally fast.
_PART_BYTES = (2 << 20) - 4096
_CERTIFICATES = ("ca_file", "cert_file", "key_file")

_ENVELOPE = struct.Struct("<4sIQ")  # magic, bytes of a part (0: there are none), bytes of the payload
_MAGIC = b"KVC1"


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
        with Call(self._nodes, self._timeout_s) as call:
            if not whole:
                call.run(self._set(key + b"#%d" % number, [part]) for number, part in _parts(source.payload))
            call.run([self._set(key, [head, source.payload] if whole else [head])])

    def read(self, name: str, target: Buffer) -> bool:
        key, size = self._key(name), target.size
        whole = size <= _WHOLE_BYTES
        envelope = bytearray(_ENVELOPE.size)
        head = [memoryview(envelope), target.header]
        with Call(self._nodes, self._timeout_s) as call:
            (found,) = call.run([_get(key, [*head, target.payload] if whole else head)])
            if not found or envelope != _ENVELOPE.pack(_MAGIC, 0 if whole else _PART_BYTES, size):
                return False
            if whole:
                return True
            parts = _parts(target.payload)
            found = all(call.run(_get(key + b"#%d" % number, [part]) for number, part in parts))
            if not found:  # lost for good; nobody shall ask for it again
                call.run([Command(key, sender(b"UNLINK", key), Wire.integer)])
            return found

    def exist(self, names: Sequence[str]) -> list[bool]:
        """What a node has that is away is not there."""
        keys = [self._key(name) for name in names]
        with Call(self._nodes, self._timeout_s) as call:
            asked = [Command(key, sender(b"EXISTS", key), Wire.integer) for key in keys]
            return [bool(count) for count in call.run_apart(asked)]

    def delete(self, names: Sequence[str]) -> None:
        """The envelope goes first: then nobody finds it any more."""
        keys = [self._key(name) for name in names]
        with Call(self._nodes, self._timeout_s) as call:
            envelopes = call.run([_peek(key) for key in keys], SMALL_IN_FLIGHT)
            doomed = list(keys)
            for key, envelope in zip(keys, envelopes, strict=True):
                doomed += [key + b"#%d" % number for number in range(_count_parts(envelope))]
            call.run([Command(key, sender(b"UNLINK", key), Wire.integer) for key in doomed], SMALL_IN_FLIGHT)

    def check(self) -> None:
        """Raises EngineError unless every node answers and every slot has one."""
        nodes = self._nodes.masters(self._deadline())
        if self._nodes.uncovered:
            raise EngineError(self._nodes.uncovered)
        for node in nodes:
            with Call(self._nodes, self._timeout_s) as call:
                call.ask(node, Wire.status, b"PING")

    def close(self) -> None:
        self._nodes.close()

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _set(self, key: bytes, value: Sequence[bytes | memoryview]) -> Command:
        return Command(key, lambda wire: wire.send_value([b"SET", key], value, self._expire), Wire.status)


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
    try:
        engine.check()
    except EngineError:  # as with S3: it will be opened again and again
        engine.close()
        raise
    return engine


def _get(key: bytes, targets: Sequence[memoryview]) -> Command:
    return Command(key, sender(b"GET", key), lambda wire: wire.bulk_into(targets))


def _peek(key: bytes) -> Command:
    return Command(key, sender(b"GETRANGE", key, b"0", b"%d" % (_ENVELOPE.size - 1)), Wire.bulk)


def _parts(payload: memoryview) -> Iterator[tuple[int, memoryview]]:
    for number, start in enumerate(range(0, len(payload), _PART_BYTES)):
        yield number, payload[start : start + _PART_BYTES]


def _count_parts(envelope: bytes | None) -> int:
    if not envelope or len(envelope) != _ENVELOPE.size or not envelope.startswith(_MAGIC):
        return 0
    _, part_bytes, size = _ENVELOPE.unpack(envelope)
    return -(-size // part_bytes) if part_bytes else 0
