"""What the usual client of a storage engine reaches without KVCellar, for figures to stand beside.

As its manual says to use it: values from memory and into memory, some threads, no integrity check. The
clients are redis-py, obstore and Mooncake's own.
"""

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvcellar.tiers.engine import Buffer
from kvcellar.tiers.registry import parse_spec
from kvcellar.tiers.remote import addresses


class _Client(NamedTuple):
    write: Callable[[str, memoryview], object]
    read: Callable[[str, memoryview], object]
    clean: Callable[[Sequence[str]], object]


def raw_client(url: str, buffers: Sequence[Buffer], count: int) -> Generator[float, None, None] | None:
    """GB/s of writing and of reading so many objects, in turn, as many at once as there are buffers. None:
    this engine has no client of its own.
    """
    scheme = urlsplit(url).scheme
    if scheme.startswith("redis"):
        return _measure(_redis(url), buffers, count)
    if scheme == "s3":
        return _measure(_s3(url), buffers, count)
    return _measure(_mooncake(url, buffers), buffers, count) if scheme == "mooncake" else None


def _measure(client: _Client, buffers: Sequence[Buffer], count: int) -> Generator[float, None, None]:
    # A name is never used twice: Mooncake keeps what is there.
    rounds = 0
    lanes = range(len(buffers))
    with ThreadPoolExecutor(len(buffers)) as threads:
        while True:
            names = [f"kvcellar-raw/{rounds}-{number}" for number in range(count)]
            for call in (client.write, client.read):

                def lane(number: int, call: Any = call, names: list[str] = names) -> None:
                    for name in names[number :: len(buffers)]:
                        call(name, buffers[number].payload)

                start = time.perf_counter()
                list(threads.map(lane, lanes))
                yield buffers[0].size * count / (time.perf_counter() - start) / 1e9
            client.clean(names)
            rounds += 1


def _redis(url: str) -> _Client:
    import redis  # noqa: PLC0415 - only if it is measured
    from redis.cluster import ClusterNode  # noqa: PLC0415 - likewise

    parts = urlsplit(url)
    nodes = addresses(parts.netloc, 6379)
    client: Any
    if parts.scheme.endswith("+cluster"):
        client = redis.RedisCluster(startup_nodes=[ClusterNode(*node) for node in nodes])  # type: ignore[no-untyped-call]
    else:
        client = redis.Redis(*nodes[0], int(parts.path.strip("/") or 0))

    def read(name: str, target: memoryview) -> None:
        target[:] = client.get(name)

    return _Client(client.set, read, lambda names: [client.delete(name) for name in names])


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
    if code != wanted:
        raise RuntimeError(f"the raw client failed: {code}")
