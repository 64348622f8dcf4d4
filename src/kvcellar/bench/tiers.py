"""What tiers cost and bring: bytes per second, lookups with tiers attached, a million objects on disk.

Speed is that of a whole tier, threads and integrity check included, beside the bare system calls: rounds take
turns, medians are compared. Lookups are full hits in memory on a real server without tiers, with one, and
with three of which one never answers. The index is that of a disk engine whose crates say that they are full.
"""

import asyncio
import contextlib
import itertools
import mmap
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from kvcellar.bench.child import must, running_server
from kvcellar.bench.engine import CHUNK_TOKENS, Engine, fresh_keys
from kvcellar.bench.machine import machine, summary
from kvcellar.bench.namespace import BLOCK_TOKENS, bench_namespace
from kvcellar.bench.raw import raw_clients
from kvcellar.errors import StartupError
from kvcellar.identity import ChunkKey
from kvcellar.slab import PAGE
from kvcellar.tiers.crate import Crate, CrateShape
from kvcellar.tiers.disk import DiskEngine
from kvcellar.tiers.engine import Buffer, object_name
from kvcellar.tiers.registry import parse_spec
from kvcellar.tiers.seal import Seal
from kvcellar.tiers.tier import Tier
from kvcellar.transfer import Stamp, digest_maker

MIB = 1 << 20
SIZES = (4 * MIB, 32 * MIB)
_AT_ONCE = 4
_TOTAL = 512 * MIB


def run_tiers(*, folder: Path, tiers: tuple[str, ...], quick: bool) -> dict[str, Any]:
    total, rounds, objects = (128 * MIB, 2, 50_000) if quick else (_TOTAL, 5, 1_000_000)
    try:
        scratch = tempfile.TemporaryDirectory(prefix=f"kvcellar-bench-{os.getpid()}-", dir=folder)
    except OSError as error:
        raise StartupError(f"cannot use {folder}: {error.strerror}; choose another with --folder") from None
    with scratch as made:
        place = Path(made)
        urls = [f"disk://{place / 'disk'}?size={4 * total}", *tiers]
        speed = {
            url.partition("?")[0].replace(made, "..."): {
                f"{size // MIB}_mib": asyncio.run(_speed(url, size, total, rounds, place)) for size in SIZES
            }
            for url in urls
        }
        index = _measure_index(place / "index", objects)
    return {"machine": machine(), "speed": speed, "lookup": _measure_lookups(quick), "index": index}


# -- speed ---------------------------------------------------------------------------------------------------


class _Set:
    """Objects of one size, with headers that tell the truth, in memory like a slab's."""

    def __init__(self, size: int, count: int) -> None:
        self.namespace = bench_namespace(1, size * BLOCK_TOKENS // CHUNK_TOKENS, CHUNK_TOKENS)
        self.size = size
        self.keys = [ChunkKey(os.urandom(16)) for _ in range(count)]
        self.names = [object_name(self.namespace.id, key, 0, 0) for key in self.keys]
        self.buffers = [
            Buffer(memory[:64], memory[PAGE:], size, memory)
            for memory in (memoryview(mmap.mmap(-1, PAGE + size)) for _ in range(_AT_ONCE))
        ]
        self.seal = Seal(self.namespace, 0, 0)
        random = np.random.default_rng(1).integers(0, 256, size, np.uint8)
        for buffer in self.buffers:
            buffer.payload[:] = random.data
        digest = digest_maker(self.namespace.checksum)()
        digest.update(random)
        self._sum = digest.intdigest()

    def label(self, lane: int, key: ChunkKey) -> None:
        Stamp(self.namespace, 0, 0).write(self.buffers[lane].header, key, self._sum)


async def _speed(url: str, size: int, total: int, rounds: int, folder: Path) -> dict[str, Any]:
    spec = parse_spec(url)
    tier = Tier(spec.label, spec.open)
    await tier.start(30.0)
    must(tier.can_write, f"{spec.label}: {tier.state[1]}")
    count = max(_AT_ONCE, total // size)
    goods = _Set(size, count)
    others = {"raw": _raw_disk(folder, goods, count)} if url.startswith("disk:") else {}
    others |= raw_clients(url, goods.buffers, count)
    figures = defaultdict[str, list[float]](list)
    with contextlib.ExitStack() as cleaning:  # also after Ctrl-C, and before the folder goes
        for one in others.values():
            cleaning.callback(one.close)
        for _ in range(rounds):
            await tier.delete(goods.names)
            figures["write"].append(await _all(goods, lambda lane, n: _write(tier, goods, lane, n)))
            figures["read"].append(await _all(goods, lambda lane, n: _read(tier, goods, lane, n)))
            for other, kind in itertools.product(others, ("write", "read")):
                figures[f"{other}_{kind}"].append(next(others[other]))
    await tier.delete(goods.names)
    tier.close()
    result = {kind: round(statistics.median(rates), 2) for kind, rates in figures.items()}
    for other, kind in itertools.product(others, ("write", "read")):
        result[f"{kind}_of_{other}"] = round(result[kind] / result[f"{other}_{kind}"], 2)
    return result


async def _write(tier: Tier, goods: _Set, lane: int, number: int) -> None:
    goods.label(lane, goods.keys[number])
    must(await tier.write(goods.names[number], goods.buffers[lane]), f"{tier.label}: {tier.state[1]}")


async def _read(tier: Tier, goods: _Set, lane: int, number: int) -> None:
    check = goods.seal.checker(goods.keys[number])
    found = await tier.read(goods.names[number], goods.buffers[lane], check)
    must(found, f"{tier.label}: an object is gone {tier.state[1]} {dict(tier.stats.counts)}")


async def _all(goods: _Set, work: Callable[[int, int], Any]) -> float:
    """GB/s of doing it with every object, a few at once."""
    numbers = iter(range(len(goods.keys)))

    async def lane(number: int) -> None:
        for one in numbers:
            await work(number, one)

    start = time.perf_counter()
    await asyncio.gather(*(lane(number) for number in range(_AT_ONCE)))
    return goods.size * len(goods.keys) / (time.perf_counter() - start) / 1e9


def _raw_disk(folder: Path, goods: _Set, count: int) -> Generator[float, None, None]:
    """GB/s of bare pwrite and preadv, in turn: direct, in place, with as many threads."""
    path = folder / "raw"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, goods.size * count)
    calls: list[Callable[[int], int]] = [
        lambda n: os.pwrite(fd, goods.buffers[n % _AT_ONCE].slot, n * goods.size),
        lambda n: os.preadv(fd, [goods.buffers[n % _AT_ONCE].slot], n * goods.size),
    ]
    try:
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(calls[0], range(count)))
            while True:
                for call in calls:
                    start = time.perf_counter()
                    list(threads.map(call, range(count)))
                    yield goods.size * count / (time.perf_counter() - start) / 1e9
    finally:
        os.close(fd)
        path.unlink()


# -- lookups -------------------------------------------------------------------------------------------------


def _measure_lookups(quick: bool) -> dict[str, Any]:
    """Full hits of 128k tokens while other lookups wait for tiers in vain."""
    hang = "memory://?delay=3600"
    sets = {
        "no tier": [],
        "one tier": ["memory://"],
        "three tiers, one hangs": ["memory://", hang, "memory://"],
    }
    return {name: summary(_lookups(urls, 100 if quick else 1000)) for name, urls in sets.items()}


def _lookups(urls: list[str], count: int) -> list[float]:
    flags = [text for url in urls for text in ("--tier", url)]
    keys = fresh_keys(128 * 1024 // CHUNK_TOKENS)
    with running_server(64 * MIB, flags) as server, Engine(server.socket, 1) as engine:
        engine.fill(keys)
        times = []
        for number in range(count):
            if number % 100 == 0:
                engine.ask_tiers(fresh_keys(64))
            times.append(engine.settled_lookup(keys))
        return times


# -- the index -----------------------------------------------------------------------------------------------


def _measure_index(folder: Path, objects: int) -> dict[str, Any]:
    capacity = _fill_crates(folder, objects)
    before = _resident()
    start = time.perf_counter()
    engine = DiskEngine(folder, capacity)
    opened = time.perf_counter() - start
    while engine.usage().scanning:
        time.sleep(0.01)
    scanned = time.perf_counter() - start
    must(engine.usage().objects == objects, f"{engine.usage().objects} objects of {objects} found")
    names = [f"{number:032x}/{number:032x}-0-0" for number in range(0, objects, max(1, objects // 10_000))]
    start = time.perf_counter()
    must(all(engine.exist(names)), "an object is gone")
    asked = time.perf_counter() - start
    grown = _resident() - before
    engine.close()
    return {
        "objects": objects,
        "open_ms": round(opened * 1e3, 1),
        "scan_s": round(scanned, 2),
        "bytes_per_object": round(grown / objects),
        "exist_us": round(asked / len(names) * 1e6, 2),
    }


def _fill_crates(folder: Path, objects: int) -> int:
    """Crates that say they hold so many objects of a page each."""
    DiskEngine(folder, 4 * MIB).close()
    buffer = Buffer(memoryview(bytearray(64)), memoryview(bytearray(PAGE)), PAGE)
    capacity, left, number = 4 * MIB, objects, 0
    while left:
        shape = CrateShape(PAGE, min(left, 1 << 16))
        crate = Crate.create(folder, number, shape)
        for slot in range(shape.slots):
            at = objects - left + slot
            crate.mark(slot, f"{at:032x}/{at:032x}-0-0", buffer)
        crate.close()
        capacity += shape.file_bytes
        left, number = left - shape.slots, number + 1
    return capacity


def _resident() -> int:
    """Memory of our own; what is only cached from files does not count."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) << 10


def tiers_table(result: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title="tiers", title_justify="left")
    for name in ("what", "figure"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for url, sizes in result["speed"].items():
        for size, figures in sizes.items():
            for kind in ("write", "read"):
                raw = figures.get(f"raw_{kind}")
                beside = f" of {raw} GB/s raw ({figures[f'{kind}_of_raw']:.0%})" if raw else ""
                what = f"{escape(url)} {kind} {size.replace('_mib', ' MiB')}"
                table.add_row(what, f"{figures[kind]} GB/s{beside}")
    for name, times in result["lookup"].items():
        table.add_row(f"lookup of 128k tokens, {name}", f"{times['p50_ms']} ms, p99 {times['p99_ms']}")
    index = result["index"]
    for name in ("open_ms", "scan_s", "bytes_per_object", "exist_us"):
        table.add_row(f"disk index, {index['objects']:,} objects: {name}", f"{index[name]}")
    return table
