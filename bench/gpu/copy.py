"""How fast KV moves between paged GPU memory and slabs, beside what the bus reaches, in turns.

    python -m bench.gpu.copy [--json FILE] [--model MODEL ...]

Every byte that is loaded is compared with what was stored, once. GB = 10**9 bytes.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cuda.bindings import runtime as cudart

from bench.gpu.shapes import KV_SHAPES
from kvcellar.bench.machine import machine
from kvcellar.identity import (
    BlockHash,
    ChunkKey,
    CopyPlan,
    Group,
    Layer,
    Namespace,
    ParallelStrategy,
    layout_of,
)
from kvcellar.slab import Slab, SlabShape, Slot
from kvcellar.transfer import Rows
from kvcellar.transfer.cuda import CudaMover

TOKENS = 64_000
BLOCK_TOKENS = 16
ROUNDS = 7
DEVICE = torch.device("cuda", 0)
H2D = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
D2H = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost


class Bed(NamedTuple):
    """Paged memory on the GPU, slabs on the host, and a plan for all of it."""

    mover: CudaMover
    caches: list[list[torch.Tensor]]
    slabs: list[Slab]
    stores: list[Rows]
    loads: list[Rows]
    bytes: int

    def slot(self, group: int, place: int) -> Slot:
        return self.slabs[group].at(place)

    def store(self) -> None:
        self.mover.store(self.stores, self.slot, None)

    def load(self) -> None:
        failed = self.mover.load(self.loads, self.slot, None)
        assert not any(failed), f"rows that failed: {failed}"


def namespace_of(model: str, chunk_tokens: int) -> Namespace:
    groups = tuple(
        Group(
            BLOCK_TOKENS,
            tuple(
                Layer(f"{number}.{layer}", 2 * int(np.prod(shape.tensor))) for layer in range(shape.layers)
            ),
            kind="full",
        )
        for number, shape in enumerate(KV_SHAPES[model])
    )
    return Namespace(
        engine="bench",
        model=model,
        weights="",
        kv_dtype="bfloat16",
        kv_layout="",
        groups=groups,
        parallel=ParallelStrategy(tp=1),
        chunk_tokens=chunk_tokens,
        block_hash=BlockHash("sha256", BLOCK_TOKENS, ""),
        checksum="sum64",
    )


@contextlib.contextmanager
def make_bed(model: str, chunk_tokens: int, *, check: bool, staging_mib: int) -> Iterator[Bed]:
    namespace = namespace_of(model, chunk_tokens)
    chunks, per_chunk = TOKENS // chunk_tokens, chunk_tokens // BLOCK_TOKENS
    blocks = 2 * chunks * per_chunk + 1  # one half is stored, the other loaded into
    caches = [
        [torch.zeros((blocks, *shape.tensor), dtype=torch.int16, device=DEVICE) for _ in range(shape.layers)]
        for shape in KV_SHAPES[model]
    ]
    for cache in (tensor for group in caches for tensor in group):
        cache.random_()
    order = np.random.default_rng(1).permutation(blocks - 1) + 1
    halves = [part.reshape(chunks, per_chunk) for part in np.split(order, 2)]
    keys = [ChunkKey(number.to_bytes(16, "little")) for number in range(chunks)]
    places = np.arange(chunks, dtype=np.uint32)
    with contextlib.ExitStack() as stack:
        slabs, rows = [], []
        for number in range(len(caches)):
            layout = layout_of(namespace, 0, number)
            slabs.append(stack.enter_context(pinned_slab(SlabShape(chunks, layout.slot_bytes))))
            rows.append([Rows(CopyPlan(number, places, half), keys) for half in halves])
        mover = CudaMover(namespace, 0, caches, blocks, staging_bytes=staging_mib << 20, check=check)
        total = chunks * sum(layout_of(namespace, 0, number).object_bytes for number in range(len(caches)))
        yield Bed(mover, caches, slabs, [row[0] for row in rows], [row[1] for row in rows], total)


@contextlib.contextmanager
def pinned_slab(shape: SlabShape) -> Iterator[Slab]:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, shape.file_bytes)
        slab = Slab(file.fileno(), shape)
        (error,) = cudart.cudaHostRegister(*slab.extent, cudart.cudaHostRegisterPortable)
        assert error == 0, error
        try:
            yield slab
        finally:
            cudart.cudaHostUnregister(slab.extent[0])


def against_the_bus(
    bed: Bed, name: str, plain: Callable[[], Any], ours: Callable[[], Any], ways: int = 1
) -> dict[str, float]:
    """GB/s of plain copies and of ours, in turns, as medians; and the median ratio of neighbours: a bus that
    is shared is not the same from second to second.
    """
    limits, times = [], []
    for _ in range(ROUNDS):
        limits.append(_seconds(plain))
        bed.store()  # plain copies may have left garbage in the slots
        times.append(_seconds(ours))
    moved = ways * bed.bytes / 1e9
    return {
        f"limit_{name}": moved / statistics.median(limits),
        name: moved / statistics.median(times),
        f"{name}_ratio": statistics.median(limit / took for limit, took in zip(limits, times, strict=True)),
    }


def _seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def bus(bed: Bed, kind: Any, stream: torch.cuda.Stream) -> None:
    """The same slots with plain copies, and nothing else."""
    size = max(slab.shape.slot_bytes for slab in bed.slabs)
    buffer = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    for group, slab in enumerate(bed.slabs):
        size = bed.mover.object_bytes(group)
        for number in range(slab.shape.slots):
            host = slab.address(number)
            pair = (buffer.data_ptr(), host) if kind is H2D else (host, buffer.data_ptr())
            cudart.cudaMemcpyAsync(*pair, size, kind, stream.cuda_stream)
    stream.synchronize()


def both(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    other = threading.Thread(target=second)
    other.start()
    first()
    other.join()


def same_bytes(bed: Bed) -> bool:
    """Whether the blocks loaded into hold what the blocks stored from do."""
    return all(
        bool(
            (
                tensor[torch.from_numpy(stored.plan.blocks.reshape(-1)).to(DEVICE)]
                == tensor[torch.from_numpy(loaded.plan.blocks.reshape(-1)).to(DEVICE)]
            ).all()
        )
        for group, stored, loaded in zip(bed.caches, bed.stores, bed.loads, strict=True)
        for tensor in group
    )


def measure(model: str, chunk_tokens: int, *, check: bool = True, staging_mib: int = 64) -> dict[str, Any]:
    with make_bed(model, chunk_tokens, check=check, staging_mib=staging_mib) as bed:
        to_gpu, to_host = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
        bed.store()
        bed.load()
        assert same_bytes(bed)
        flip = bed.slabs[0].slot(3)
        flip[1234] ^= 4
        assert not check or bed.mover.load(bed.loads, bed.slot, None)[0] == [3], "a flipped bit went unseen"
        flip[1234] ^= 4
        row = {
            "model": model,
            "chunk_tokens": chunk_tokens,
            "object_mib": bed.mover.object_bytes(0) / (1 << 20),
            "checksum": check,
            "staging_mib": staging_mib,
        }
        up, down = (lambda: bus(bed, H2D, to_gpu)), (lambda: bus(bed, D2H, to_host))
        row |= against_the_bus(bed, "store", down, bed.store)
        row |= against_the_bus(bed, "load", up, bed.load)
        row |= against_the_bus(bed, "both", lambda: both(up, down), lambda: both(bed.load, bed.store), ways=2)
    torch.cuda.empty_cache()
    return row


CASES: list[dict[str, Any]] = [
    {"model": "llama8b", "chunk_tokens": 128},
    {"model": "llama8b", "chunk_tokens": 128, "check": False},
    {"model": "llama8b", "chunk_tokens": 64},
    {"model": "llama8b", "chunk_tokens": 256},
    {"model": "mla", "chunk_tokens": 128},
    {"model": "hybrid", "chunk_tokens": 128},
]


def options(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there too, after each row")
    return parser


class Figures:
    """Rows, and the file they are written to, if any: whoever is ended loses no more than one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        about = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
        self._found: dict[str, Any] = {"machine": machine() | about, "rows": []}

    def add(self, row: dict[str, Any]) -> None:
        self._found["rows"].append(row)
        if self._path:
            self._path.write_text(json.dumps(self._found, indent=1) + "\n")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", nargs="+", choices=KV_SHAPES, default=list(KV_SHAPES))
    args = parser.parse_args()
    figures = Figures(args.json)
    print("model     chunk  object  sum   store   of bus    load   of bus    both   of bus   (GB/s)")
    for case in CASES:
        if case["model"] not in args.model:
            continue
        row = measure(**case)
        figures.add(row)
        cells = "".join(f"{row[what]:8.1f} {row[what + '_ratio']:8.3f}" for what in ("store", "load", "both"))
        checked = "on " if row["checksum"] else "off"
        print(
            f"{row['model']:9} {row['chunk_tokens']:5} {row['object_mib']:7.1f}  {checked}{cells}",
            flush=True,
        )


if __name__ == "__main__":
    main()
