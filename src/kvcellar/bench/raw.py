"""What the usual client of a storage engine reaches without KVCellar, for figures to stand beside.

Values from memory and into memory, some threads, no integrity check, as the manual says to use it: redis-py,
obstore for S3, Mooncake's own client. For Redis also bare sockets, which are faster than any client.
"""

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvcellar.bench.child import must
from kvcellar.tiers.engine import Buffer
from kvcellar.tiers.registry import parse_spec
from kvcellar.tiers.remote import Address, addresses

_PATIENCE_S = 30  # no single answer may take longer


class _Client(NamedTuple):
    write: Callable[[str, memoryview], object]
    read: Callable[[str, memoryview], object]
    clean: Callable[[Sequence[str]], object]
    close: Callable[[], object] = lambda: None


def raw_clients(url: str, buffers: Sequence[Buffer], count: int) -> dict[str, Generator[float, None, None]]:
    """GB/s of writing and of reading so many objects, in turn, as many at once as there are buffers. By what
    does it: "raw" is the usual client, if the engine has one.
    """
    scheme = urlsplit(url).scheme
    clients = {}
    if scheme.startswith("redis"):
        bare = _Sockets(url)
        clients = {"raw": _redis(url), "socket": _Client(bare.write, bare.read, bare.clean, bare.close)}
    elif scheme == "s3":
        clients = {"raw": _s3(url)}
    elif scheme == "mooncake":
        clients = {"raw": _mooncake(url, buffers)}
    return {name: _measure(client, buffers, count) for name, client in clients.items()}


def _measure(client: _Client, buffers: Sequence[Buffer], count: int) -> Generator[float, None, None]:
    with closing(client), ThreadPoolExecutor(len(buffers)) as threads:
        while True:
            names = [f"kvcellar-raw/{secrets.token_hex(16)}" for _ in range(count)]
            try:
                yield _rate(client.write, names, buffers, threads)
                yield _rate(client.read, names, buffers, threads)
            finally:
                client.clean(names)


def _rate(
    call: Callable[[str, memoryview], object],
    names: Sequence[str],
    buffers: Sequence[Buffer],
    threads: ThreadPoolExecutor,
) -> float:
    def lane(number: int) -> None:
        for name in names[number :: len(buffers)]:
            call(name, buffers[number].payload)

    start = time.perf_counter()
    list(threads.map(lane, range(len(buffers))))
    return buffers[0].size * len(names) / (time.perf_counter() - start) / 1e9


def _connect(url: str) -> Any:
    import redis  # noqa: PLC0415 - only if it is measured
    from redis.cluster import ClusterNode  # noqa: PLC0415 - likewise

    parts = urlsplit(url)
    nodes = addresses(parts.netloc, 6379)
    if parts.scheme.endswith("+cluster"):
        return redis.RedisCluster(startup_nodes=[ClusterNode(*node) for node in nodes])  # type: ignore[no-untyped-call]
    return redis.Redis(*nodes[0])


def _redis(url: str) -> _Client:
    client = _connect(url)

    def read(name: str, target: memoryview) -> None:
        target[:] = client.get(name)

    return _Client(client.set, read, lambda names: [client.delete(name) for name in names])


class _Sockets:
    """A connection to each node for each thread. Values are not divided."""

    def __init__(self, url: str) -> None:
        self._nodes = addresses(urlsplit(url).netloc, 6379)
        self._cluster = _connect(url) if urlsplit(url).scheme.endswith("+cluster") else None
        self._mine = threading.local()
        self._open: list[socket.socket] = []

    def write(self, name: str, source: memoryview) -> None:
        key = name.encode()
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, len(source))
        connection = self._ask(name, head)
        connection.sendall(source)
        connection.sendall(b"\r\n")
        _must_be(len(b"+OK\r\n"), len(connection.recv(5, socket.MSG_WAITALL)))

    def read(self, name: str, target: memoryview) -> None:
        key = name.encode()
        connection = self._ask(name, b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key))
        line = b"$%d\r\n" % len(target)
        must(connection.recv(len(line), socket.MSG_WAITALL) == line, "the raw client did not get its value")
        done = 0
        while done < len(target):
            count = connection.recv_into(target[done:])
            must(count > 0, "the server hung up on the raw client")
            done += count
        connection.recv(2, socket.MSG_WAITALL)

    def clean(self, names: Sequence[str]) -> None:
        for name in names:
            key = name.encode()
            connection = self._ask(name, b"*2\r\n$3\r\nDEL\r\n$%d\r\n%s\r\n" % (len(key), key))
            connection.recv(4, socket.MSG_WAITALL)

    def close(self) -> None:
        for connection in self._open:
            connection.close()

    def _ask(self, name: str, head: bytes) -> socket.socket:
        node = self._cluster.get_node_from_key(name) if self._cluster is not None else None
        place = Address(node.host, node.port) if node is not None else self._nodes[0]
        known: dict[Address, socket.socket] = self._mine.__dict__.setdefault("sockets", {})
        if place not in known:
            known[place] = _connected(place)
            self._open.append(known[place])
        known[place].sendall(head)
        return known[place]


def _connected(place: Address) -> socket.socket:
    """With the kernel's time-outs: Python's own would cost a system call each time."""
    connection = socket.create_connection(place, _PATIENCE_S)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, side, struct.pack("ll", _PATIENCE_S, 0))
    return connection


def _s3(url: str) -> _Client:
    import obstore  # noqa: PLC0415 - only if it is measured

    store: Any = parse_spec(url).open().store  # type: ignore[attr-defined]

    def read(name: str, target: memoryview) -> None:
        target[:] = memoryview(obstore.get(store, name).bytes())

    def write(name: str, source: memoryview) -> None:
        obstore.put(store, name, source, use_multipart=False)

    return _Client(write, read, lambda names: obstore.delete(store, list(names)))


def _mooncake(url: str, buffers: Sequence[Buffer]) -> _Client:
    import numpy as np  # noqa: PLC0415 - only if it is measured

    engine: Any = parse_spec(url).open()

    def address(view: memoryview) -> int:
        return int(np.frombuffer(view, np.uint8).ctypes.data)

    for buffer in buffers:
        _must_be(0, engine.store.register_buffer(address(buffer.slot), len(buffer.slot)))
    return _Client(
        lambda name, source: _must_be(0, engine.store.put_from(name, address(source), len(source))),
        lambda name, target: _must_be(len(target), engine.store.get_into(name, address(target), len(target))),
        lambda names: engine.store.batch_remove(list(names), True),
    )


def _must_be(wanted: int, code: int) -> None:
    must(code == wanted, f"the raw client answered {code}, not {wanted}")
