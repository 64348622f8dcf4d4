"""How fast HostTransfer moves KV through a slab, beside what memcpy reaches at the same time.

An object is some layers of 8 blocks. A block of a layer is one fragment: 64 KiB, as 16 tokens of Llama-8B
have (K and V, bf16), and once more 4 KiB, as a sixteenth of its heads would. The working set is larger than
the caches, checksums are on, and a load goes to other blocks than the store came from. Rounds of ours and of
memcpy take turns and medians are compared, so that noise hits both. Each byte counts once; a GB is 10**9.
"""

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvcellar.bench.machine import machine
from kvcellar.bench.namespace import BLOCK_TOKENS, bench_namespace
from kvcellar.errors import BadRequest, Corrupt, Unavailable
from kvcellar.identity import ChunkKey, CopyPlan, LayoutDesc, Namespace, layout_of
from kvcellar.slab import Bytes, Place, Slab, SlabShape, Slot
from kvcellar.transfer import HostTransfer

KIB, MIB = 1 << 10, 1 << 20

BLOCKS_PER_CHUNK = 8
FRAGMENTS = (64 * KIB, 4 * KIB)
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
QUICK_SIZES = (MIB, 16 * MIB)
WORKING_SET = 256 * MIB
ROUNDS, QUICK_ROUNDS = 5, 3
_GEOMETRY = {
    "blocks_per_chunk": BLOCKS_PER_CHUNK,
    "block_tokens": BLOCK_TOKENS,
    "working_set_bytes": WORKING_SET,
}


class _Setup(NamedTuple):
    """A slab full of objects of one size, and as much engine memory, cut into their blocks."""

    namespace: Namespace
    layout: LayoutDesc
    engine: Bytes
    slab: Slab
    slots: Bytes  # all slots of the slab in one piece
    stores: CopyPlan
    loads: CopyPlan
    keys: list[ChunkKey]

    def slot(self, _group: int, place: Place) -> Slot:
        return self.slab.at(place)


class _Round(NamedTuple):
    """GB/s."""

    store: float
    load: float
    memcpy: float


def run_copy(sizes: Sequence[int] | None = None, *, quick: bool = False) -> dict[str, Any]:
    """Measure every fragment and object size: 20 s; quick, with fewer: 2 s."""
    sizes = sizes or (QUICK_SIZES if quick else SIZES)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    where = machine() | {"numpy": version("numpy"), "xxhash": version("xxhash")}
    engine = _engine_memory()
    rows = []
    for fragment in FRAGMENTS[:1] if quick else FRAGMENTS:
        for size in sizes:
            with _set_up(size, fragment, engine) as setup:
                rows.append(_measure(setup, rounds))
    return {"machine": where, "geometry": _GEOMETRY, "rows": rows}


def copy_table(result: dict[str, Any]) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        title="Host copies with checksum, GB/s: {cpu}, {cores} cores".format(**result["machine"]),
        caption="one thread; objects of {blocks_per_chunk} blocks".format(**result["geometry"]),
    )
    for name in ("object", "fragment", "store", "load", "memcpy", "of memcpy", "of memcpy"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        table.add_row(
            _size_text(row["object_bytes"]),
            _size_text(row["fragment_bytes"]),
            *(f"{row[name]:.1f}" for name in ("store_gbps", "load_gbps", "memcpy_gbps")),
            *(f"{row[name]:.2f}" for name in ("store_ratio", "load_ratio")),
        )
    return table


@contextmanager
def _set_up(object_bytes: int, fragment_bytes: int, engine: Bytes) -> Iterator[_Setup]:
    fragment_bytes = min(fragment_bytes, object_bytes // BLOCKS_PER_CHUNK)
    layers, rest = divmod(object_bytes, fragment_bytes * BLOCKS_PER_CHUNK)
    if rest or object_bytes % mmap.PAGESIZE or WORKING_SET % object_bytes:
        raise BadRequest(f"object size {object_bytes}, expected whole pages and a divisor of {WORKING_SET}")
    namespace = bench_namespace(layers, fragment_bytes, BLOCK_TOKENS * BLOCKS_PER_CHUNK)
    layout = layout_of(namespace, 0, 0)
    shape = SlabShape(WORKING_SET // object_bytes, object_bytes)
    keys = [ChunkKey(number.to_bytes(16, "little")) for number in range(shape.slots)]
    stores, loads = (_plan(shape.slots, seed) for seed in (1, 2))
    with tempfile.TemporaryFile(dir="/dev/shm") as file:  # it has no name, so it cannot stay behind
        try:
            os.posix_fallocate(file.fileno(), 0, shape.file_bytes)
        except OSError as error:
            raise Unavailable(f"no {shape.file_bytes >> 20} MiB in /dev/shm: {error.strerror}") from error
        slots = np.frombuffer(mmap.mmap(file.fileno(), shape.file_bytes), np.uint8)[shape.header_bytes :]
        yield _Setup(namespace, layout, engine, Slab(file.fileno(), shape), slots, stores, loads, keys)


def _plan(slots: int, seed: int) -> CopyPlan:
    """Every slot once and every block once. A chunk's blocks are side by side, upwards or downwards, the way
    vLLM's free list hands them out, and no chunk is near the next.
    """
    random = np.random.default_rng(seed)
    blocks = np.arange(slots * BLOCKS_PER_CHUNK).reshape(slots, -1)
    random.shuffle(blocks)
    downwards = random.random(slots) < 0.5
    blocks[downwards] = blocks[downwards, ::-1]
    return CopyPlan(0, np.arange(slots, dtype=np.uint32), blocks)


def _measure(setup: _Setup, rounds: int) -> dict[str, Any]:
    fragment_bytes = setup.layout.layers[0].block_bytes
    layers = list(setup.engine.reshape(len(setup.layout.layers), -1, fragment_bytes))
    transfer = HostTransfer(setup.namespace, 0, 0, layers)
    _round(setup, transfer)  # maps every page
    measured = [_round(setup, transfer) for _ in range(rounds)]
    store, load, memcpy = (statistics.median(rates) for rates in zip(*measured, strict=True))
    return {
        "object_bytes": setup.layout.object_bytes,
        "fragment_bytes": fragment_bytes,
        "store_gbps": round(store, 2),
        "load_gbps": round(load, 2),
        "memcpy_gbps": round(memcpy, 2),
        "store_ratio": round(store / memcpy, 3),
        "load_ratio": round(load / memcpy, 3),
    }


def _round(setup: _Setup, transfer: HostTransfer) -> _Round:
    failed: list[int] = []
    there = _rate(lambda: np.copyto(setup.slots, setup.engine))
    store = _rate(lambda: transfer.store(setup.stores, setup.keys, setup.slot))
    load = _rate(lambda: failed.extend(transfer.load(setup.loads, setup.keys, setup.slot)))
    back = _rate(lambda: np.copyto(setup.engine, setup.slots))
    if failed:
        raise Corrupt(f"{len(failed)} of {len(setup.keys)} objects came back wrong")
    return _Round(store, load, statistics.harmonic_mean([there, back]))


def _rate(copy: Callable[[], None]) -> float:
    """GB/s of something that moves the working set once."""
    start = time.perf_counter()
    copy()
    return WORKING_SET / (time.perf_counter() - start) / 1e9


def _engine_memory() -> Bytes:
    # Ordinary pages, as CPU engines have them: numpy's own allocations ask for huge ones.
    memory = mmap.mmap(-1, WORKING_SET, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    words = np.frombuffer(memory, np.uint64)
    words[:] = np.arange(len(words))
    return words.view(np.uint8)


def _size_text(size: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"
