"""Where a block's bytes lie in a tensor that an attention backend has shaped and permuted as it likes.

From shape and strides alone; knows no torch. A block is one run of bytes or several: K and V of a block may
lie in two halves of the tensor, heads may be apart, several layers may share memory.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from kvcellar.errors import BadRequest

FEW_PIECES = 64  # of a block: up to so many cost nothing
_MAX_PIECES = 4096


class BlockShape(NamedTuple):
    stride: int  # bytes from a block to the next
    pieces: tuple[int, ...]  # where the block's runs start, in bytes from its first one, in object order
    run: int  # bytes of each

    @property
    def block_bytes(self) -> int:
        return len(self.pieces) * self.run


def block_shape(shape: Sequence[int], strides: Sequence[int], itemsize: int, num_blocks: int) -> BlockShape:
    """Of a tensor with `num_blocks` blocks along its first axis or its second; strides in elements."""
    axis = _block_axis(shape, num_blocks)
    stride = strides[axis] * itemsize
    # A backend may cut the engine's blocks into smaller ones of its own, which then follow each other.
    inside = shape[axis] // num_blocks
    others = [
        (size, step * itemsize)
        for number, (size, step) in enumerate(zip(shape, strides, strict=True))
        if number != axis and size > 1
    ]
    if inside > 1:
        others.append((inside, stride))
        stride *= inside
    run, apart = itemsize, []
    for size, step in sorted(others, key=lambda axis: axis[1]):
        if step == run:
            run *= size
        else:
            apart.append((size, step))
    if stride < run or any(step < run for _, step in apart):
        raise BadRequest(
            f"a tensor of shape {tuple(shape)} and strides {tuple(strides)} that overlaps itself"
        )
    outermost_first = [range(0, size * step, step) for size, step in reversed(apart)]
    pieces = tuple(sum(offsets) for offsets in itertools.product(*outermost_first))
    if len(pieces) > _MAX_PIECES:
        raise BadRequest(f"blocks in {len(pieces)} pieces of {run} bytes, expected at most {_MAX_PIECES}")
    return BlockShape(stride, pieces, run)


def describe(shape: Sequence[int], strides: Sequence[int], num_blocks: int) -> str:
    """What is where inside a block, in words that are the same whatever the number of blocks."""
    axis = _block_axis(shape, num_blocks)
    inside = [
        f"{size} every {step}" if step < strides[axis] else f"{size} apart"
        for number, (size, step) in enumerate(zip(shape, strides, strict=True))
        if number != axis
    ]
    return f"{shape[axis] // num_blocks} x ({', '.join(inside)})"


def _block_axis(shape: Sequence[int], num_blocks: int) -> int:
    if num_blocks < 3:
        raise BadRequest(f"{num_blocks} blocks, expected 3 or more: an axis of two may be that of K and V")
    for axis, size in enumerate(shape[:2]):
        if size and size % num_blocks == 0:
            return axis
    raise BadRequest(f"a tensor of shape {tuple(shape)}, expected {num_blocks} blocks along an outer axis")
