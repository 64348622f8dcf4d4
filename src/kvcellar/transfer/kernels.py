"""The kernel between an engine's paged blocks and staged objects, with the checksum in the same pass.

One program per piece of a block. Everything it must know of a layer it reads from a table, so one launch
serves layers of any shape:

    table[row] = (address of block 0's piece, bytes between blocks, bytes of the piece,
                  where the piece of position 0 starts in the object, bytes between positions)

It moves units of 8 bytes, the words of sum64, where everything in the table is a multiple of 8, and single
bytes where anything is not: slower, and the same sum, since a byte is a part of its word.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

WORD, BYTE = 8, 1  # what may be moved at a time

_UNITS = {WORD: torch.int64, BYTE: torch.uint8}
_TILE = 1024  # units; larger tiles and more warps measured the same on an H200, the bus being the limit


# Not specialised for the values of these: one kernel per direction, compiled when the engine starts.
_PLAIN = [
    "table",
    "blocks",
    "sums",
    "row_weights",
    "column_weights",
    "first",
    "per_chunk",
    "part_start",
    "staged_bytes",
]


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def] # Triton reads this, not Python
    table,
    blocks,
    staging,
    sums,
    row_weights,
    column_weights,
    first,
    per_chunk,
    part_start,
    staged_bytes,
    UNIT: tl.constexpr,
    LOAD: tl.constexpr,
    CHECK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = table + tl.program_id(0) * 5
    cell = tl.program_id(1).to(tl.int64)  # of the block table: a chunk and a position in it
    chunk = cell // per_chunk  # of this launch; `first` came before
    base = tl.load(row)
    stride = tl.load(row + 1)
    units = tl.load(row + 2) // UNIT
    at = tl.load(row + 3) + (cell % per_chunk) * tl.load(row + 4)
    block = tl.load(blocks + first * per_chunk + cell)
    engine = (base + block * stride).to(tl.pointer_type(staging.dtype.element_ty))
    staged = staging + (chunk * staged_bytes + at - part_start) // UNIT
    wanted = tl.where(block >= 0, units, 0)  # a skipped block counts in the sum but is not written
    total = tl.zeros((TILE,), dtype=tl.int64)
    for start in range(0, units, TILE):
        unit = start + tl.arange(0, TILE)
        inside = unit < units
        if LOAD:
            value = tl.load(staged + unit, mask=inside, other=0)
            tl.store(engine + unit, value, mask=unit < wanted)
        else:
            value = tl.load(engine + unit, mask=inside, other=0)
            tl.store(staged + unit, value, mask=inside)
        if CHECK:
            place = at // UNIT + unit
            if UNIT == 8:
                word = place
                share = value
            else:
                word = place >> 3
                share = value.to(tl.int64) << ((place & 7) * 8)  # little-endian, as sum64 has it
            weight = tl.load(row_weights + (word >> 9), mask=inside, other=0)
            weight *= tl.load(column_weights + (word & 511))
            total += share * weight
    if CHECK:
        tl.atomic_add(sums + first + chunk, tl.sum(total, axis=0), sem="relaxed")


def move(
    table: Any,
    blocks: Any,
    chunks: range,
    staging: Any,
    sums: Any,
    weights: tuple[Any, Any],
    part_start: int,
    staged_bytes: int,
    *,
    load: bool,
    unit: int = WORD,
    check: bool = True,
) -> Any:
    """Move some rows of `blocks` (chunks x positions) to or from `staging`, adding up their sums.

    `staging` holds one part of each object, which starts at byte `part_start` of it, every `staged_bytes`.
    `unit` may be WORD where everything in the table is a multiple of it. Returns the kernel, as compiled.
    """
    per_chunk = blocks.shape[1]
    grid = (table.shape[0], len(chunks) * per_chunk)
    return _move[grid](
        table,
        blocks,
        staging.view(_UNITS[unit]),
        sums,
        weights[0],
        weights[1],
        chunks.start,
        per_chunk,
        part_start,
        staged_bytes,
        UNIT=unit,
        LOAD=load,
        CHECK=check,
        TILE=_TILE,
        num_warps=4,
    )


@functools.cache
def compiled(device: torch.device, *, load: bool, unit: int = WORD, check: bool = True) -> Any:
    """The kernel for that, compiled: a second or two that no request should wait for."""
    words = torch.zeros(2 * 512, dtype=torch.int64, device=device)
    table = torch.tensor([[words.data_ptr(), 4096, 4096, 0, 4096]], dtype=torch.int64, device=device)
    blocks = torch.zeros((1, 1), dtype=torch.int64, device=device)
    weights = (words, words)
    return move(
        table, blocks, range(1), words[512:], words, weights, 0, 4096, load=load, unit=unit, check=check
    )


def warm_up(device: torch.device) -> None:
    """Compile what most need."""
    for load in (True, False):
        compiled(device, load=load)
