"""What copies cost an engine's steps: a step as engines make it, alone and beside copies of the same process.

    python -m bench.gpu.beside [--json FILE]

A step copies a few small tables to the GPU, launches some hundred kernels, and waits for a small copy back.
Beside it another thread loads, or stores, Llama 8B's KV, or fills the bus with plain copies on one stream:
the GPU's copy engine does not let go of a stream that has copies ready, and the step's own have to wait.
Alone and beside take turns, and what is compared are neighbours.
"""

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bench.gpu.copy import DEVICE, H2D, Bed, Figures, bus, make_bed, options

PAIRS = 5
ALONE_S, BESIDE_S = 0.3, 0.6
_TABLES = (136_000, *[64] * 7)  # elements; the first is as large as the block table of 32 long requests
_LAYERS, _SMALL_KERNELS = 32, 10


class Step:
    def __init__(self) -> None:
        self._stream = torch.cuda.Stream(DEVICE)
        self._here = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for size in _TABLES]
        self._there = [table.to(DEVICE) for table in self._here]
        self._vector = torch.zeros(4096, device=DEVICE)
        self._matrix = torch.zeros(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
        self._answer = torch.zeros(32, pin_memory=True)

    def __call__(self) -> None:
        for here, there in zip(self._here, self._there, strict=True):
            there.copy_(here, non_blocking=True)
            self._vector.add_(1)
        for _ in range(_LAYERS):
            for _ in range(_SMALL_KERNELS):
                self._vector.add_(1)
            torch.mm(self._matrix, self._matrix)
        self._answer.copy_(self._vector[:32], non_blocking=True)
        self._stream.synchronize()

    def median_ms(self, seconds: float) -> float:
        times, end = [], time.perf_counter() + seconds
        with torch.cuda.stream(self._stream):
            while (begun := time.perf_counter()) < end:
                self()
                times.append((time.perf_counter() - begun) * 1e3)
        return statistics.median(times)


def beside(step: Step, work: Callable[[], Any]) -> tuple[float, int]:
    """Of a step while that is done again and again, and how often it was done."""
    over = threading.Event()

    def again() -> int:
        done = 0
        while not over.is_set():
            work()
            done += 1
        return done

    with ThreadPoolExecutor(1) as pool:
        counting = pool.submit(again)
        try:
            found = step.median_ms(BESIDE_S)
        finally:
            over.set()
        return found, counting.result()


def measure(step: Step, bed: Bed, name: str, work: Callable[[], Any]) -> dict[str, Any]:
    pairs = []
    for _ in range(PAIRS):
        alone = step.median_ms(ALONE_S)
        begun = time.perf_counter()
        found, done = beside(step, work)
        took = time.perf_counter() - begun
        pairs.append({"alone_ms": alone, "beside_ms": found, "gbps": done * bed.bytes / took / 1e9})
    row = {key: statistics.median(pair[key] for pair in pairs) for key in pairs[0]}
    times = statistics.median(pair["beside_ms"] / pair["alone_ms"] for pair in pairs)
    return {"beside": name, **row, "times": times, "pairs": pairs}


def main() -> None:
    figures = Figures(options(__doc__).parse_args().json)
    with make_bed("llama8b", 128, check=True, staging_mib=64) as bed:
        step, stream = Step(), torch.cuda.Stream(DEVICE)
        works = {"stores": bed.store, "loads": bed.load, "plain copies": lambda: bus(bed, H2D, stream)}
        step.median_ms(ALONE_S)
        print("a step beside        alone ms  beside ms   times    GB/s")
        for name, work in works.items():
            work()
            row = measure(step, bed, name, work)
            figures.add(row)
            cells = f"{row['alone_ms']:10.2f} {row['beside_ms']:10.2f} {row['times']:7.2f} {row['gbps']:7.1f}"
            print(f"{name:18} {cells}", flush=True)


if __name__ == "__main__":
    main()
