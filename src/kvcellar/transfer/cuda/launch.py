"""Launches the kernel between blocks and staging, for one part of a group's objects and one direction.

What is the same in every launch is looked up once. Then the driver is called directly: Triton's own way takes
25 us and lets go of the GIL (see driver.py). Where a compiled kernel is not as expected, and under Triton's
interpreter, it is Triton's own way.
"""

import logging
import re
from typing import Any

import torch

from kvcellar.transfer.cuda import driver
from kvcellar.transfer.cuda.ring import Lane, Run
from kvcellar.transfer.kernels import compiled, move

log = logging.getLogger(__name__)

_BITS = ["64"] * 6 + ["32"] * 4  # of the kernel's parameters: pointers, then integers
_WARP = 32


class Launch:
    def __init__(
        self,
        table: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        per_chunk: int,
        part: range,
        *,
        load: bool,
        unit: int,
        check: bool,
    ) -> None:
        self._table, self._weights, self._per_chunk, self._part = table, weights, per_chunk, part
        self._how: dict[str, Any] = {"load": load, "unit": unit, "check": check}
        self._kernel = _direct(compiled(table.device, **self._how), part.stop)
        self._rows, self._address = len(table), table.data_ptr()
        self._more = [tensor.data_ptr() for tensor in weights]

    def __call__(self, run: Run, table: int, chunks: range, lane: Lane) -> None:
        """`chunks`: rows of that table of the run's."""
        sent, part = run.sent, self._part
        blocks, sums = sent.blocks[table], sent.sums[table]
        if self._kernel is None:
            ids = sent.words[blocks : sent.blocks[table + 1]].view(-1, self._per_chunk)
            about = (self._table, ids, chunks, lane.words, sent.words[sums:], self._weights)
            with torch.cuda.stream(lane.stream):
                move(*about, part.start, len(part), **self._how)
            return
        self._kernel.launch(
            self._rows,
            len(chunks) * self._per_chunk,
            lane.raw,
            self._address,
            sent.address + 8 * blocks,
            lane.address,
            sent.address + 8 * sums,
            *self._more,
            chunks.start,
            self._per_chunk,
            part.start,
            len(part),
        )


def _direct(kernel: Any, most: int) -> driver.Kernel | None:
    """The compiled kernel for the driver, if it is one that takes what we give it."""
    if kernel is None:  # interpreted
        return None
    try:
        about = kernel.metadata
        scratch = about.global_scratch_size or getattr(about, "profile_scratch_size", 0)
        if takes_ours(kernel.asm["ptx"]) and about.num_ctas == 1 and not scratch and most < 1 << 31:
            return driver.Kernel(int(kernel.function), about.num_warps * _WARP, about.shared, len(_BITS))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        log.info("KVCellar: a version of Triton that is not known: %s", error)
    log.warning("KVCellar: launching through Triton: beside loads and stores, the engine will be slower")
    return None


def takes_ours(ptx: str) -> bool:
    """Whether the kernel's parameters, as it was compiled, are ours, and behind them nothing but pointers of
    the compiler's own. One that took anything else would write to the wrong memory.
    """
    entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    bits = re.findall(r"\.param\s+\.[a-z](\d+)", entry.group(1)) if entry else []
    ours, hidden = bits[: len(_BITS)], bits[len(_BITS) :]
    return ours == _BITS and set(hidden) <= {"64"} and len(hidden) <= driver.HIDDEN
