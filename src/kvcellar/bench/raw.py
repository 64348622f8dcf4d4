"""What the usual client of a storage engine reaches without KVCellar, for figures to stand beside.

Values from memory and into memory, some threads, no integrity check, as the manual says to use it: redis-py,
obstore for S3, Mooncake's own client. For Redis also bare sockets, which are faster than any client.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvcellar.bench.child import must
from kvcellar.tiers.engine import Buffer
from kvcellar.tiers.registry import parse_spec
from kvcellar.tiers.remote import Address, addresses


class _Client(NamedTuple):
    write: Callable[[str, memoryview], object]
    read: Callable[[str, memoryview], object]
    clean: Callable[[Sequence[str]], object]


def raw_clients(url: str, buffers: Sequence[Buffer], count: int) -> dict[str, Generator[float, None, None]]:
    """GB/s of writing and of reading so many objects, in turn, as many at once as there are buffers. By what
    does it: "raw" is the usual client, if the engine has one.
    """
    scheme = urlsplit(url).scheme
    clients = {}
    if scheme.startswith("redis"):
        clients = {"raw": _redis(url), "socket": _sockets(url)}
    elif scheme == "s3":
        clients = {"raw": _s3(url)}
    elif scheme == "mooncake":
        clients = {"raw": _mooncake(url, buffers)}
    return {name: _measure(client, buffers, count) for name, client in clients.items()}


def _measure(client: _Client, buffers: Sequence[Buffer], count: int) -> Generator[float, None, None]:
    with ThreadPoolExecutor(len(buffers)) as threads:
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


def _sockets(url: str) -> _Client:
    """Values are not divided."""
    nodes = addresses(urlsplit(url).netloc, 6379)
    cluster = _connect(url) if urlsplit(url).scheme.endswith("+cluster") else None
    mine = threading.local()  # a connection to each node for each thread

    def ask(name: str, head: bytes, value: memoryview | None = None) -> socket.socket:
        node = cluster.get_node_from_key(name) if cluster is not None else None
        place = Address(node.host, node.port) if node is not None else nodes[0]
        known = mine.__dict__.setdefault("sockets", {})
        if place not in known:
            known[place] = socket.create_connection(place)
            known[place].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection: socket.socket = known[place]
        connection.sendall(head)
        if value is not None:
            connection.sendall(value)
            connection.sendall(b"\r\n")
        return connection

    def write(name: str, source: memoryview) -> None:
        key = name.encode()
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, len(source))
        _must_be(5, len(ask(name, head, source).recv(5, socket.MSG_WAITALL)))

    def read(name: str, target: memoryview) -> None:
        key = name.encode()
        reply = ask(name, b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key))
        line = len(b"$%d\r\n" % len(target))
        reply.recv(line, socket.MSG_WAITALL)
        done = 0
        while done < len(target):
            done += reply.recv_into(target[done:])
        reply.recv(2, socket.MSG_WAITALL)

    def clean(names: Sequence[str]) -> None:
        for name in names:
            key = name.encode()
            ask(name, b"*2\r\n$3\r\nDEL\r\n$%d\r\n%s\r\n" % (len(key), key)).recv(4, socket.MSG_WAITALL)

    return _Client(write, read, clean)


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
