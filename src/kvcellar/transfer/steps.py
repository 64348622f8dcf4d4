"""An engine's block memory on the host, and the steps in which an object is copied to or from it.

A step is what stays in the cache between being copied and being hashed: a few layers' blocks, or a few blocks
of one layer where they are large. Knows nothing of slots and keys.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcellar.errors import BadRequest
from kvcellar.identity import SKIP, LayoutDesc
from kvcellar.slab import Bytes
from kvcellar.transfer.checksum import Digest

BlockIds = npt.NDArray[np.int64]

# Half of a 1 MiB L2. Loads of 16 MiB objects run at 7.5 GB/s with 128 KiB, 8.3 with 256, 8.7 with 512; stores
# gain another 2 % with 1 MiB (one thread of an EPYC Zen 4, bench/copy.py, 2026-08).
STEP_BYTES = 512 * 1024

# Numpy keeps the GIL while it scatters a few rows of a void type, and gives it up for rows of bytes, which
# costs 0.8 us more per call: a tenth of what copying this much takes, and other threads can work meanwhile.
SHARED_RUN_BYTES = 64 * 1024

# Smaller fragments are hashed in a gathered copy, larger ones where they are: at 2 KiB both take 0.15 us.
SMALL_FRAGMENT = 2048


class Step(NamedTuple):
    """Some positions of the chunk in layers of equal shape."""

    layers: list[Bytes]
    rows: list[npt.NDArray[Any]]  # the same memory; a row is a block's bytes, or one void of that width
    contiguous: bool  # no gaps between a layer's blocks
    positions: slice
    offset: int  # where the step's bytes start in the object
    shape: tuple[int, ...]  # theirs there: layers, positions, and what a row is

    def within(self, payload: Bytes) -> npt.NDArray[Any]:
        """The step's bytes in a slot."""
        return np.ndarray(self.shape, self.rows[0].dtype, payload.data, self.offset)

    def gather(self, blocks: BlockIds, targets: npt.NDArray[Any]) -> None:
        """Engine to slot."""
        for rows, target in zip(self.rows, targets, strict=True):
            if self.contiguous:
                rows.take(blocks, 0, target, "clip")  # in its default mode it would buffer the target
            else:
                target[...] = rows[blocks]  # take() would first copy the whole layer

    def store(self, blocks: BlockIds, targets: npt.NDArray[Any], digest: Digest) -> None:
        """Engine to slot, hashing the bytes where they come from: others may write to a slot."""
        if self._has_small_fragments:
            targets[...] = self._hash_copy(blocks, digest)
        else:
            self.gather(blocks, targets)
            self._hash_blocks(blocks, digest)

    def scatter(self, sources: npt.NDArray[Any], blocks: BlockIds, digest: Digest) -> None:
        """Slot to engine, hashing the bytes where they have arrived."""
        for rows, source in zip(self.rows, sources, strict=True):
            rows[blocks] = source
        if self._has_small_fragments:
            self._hash_copy(blocks, digest)
        else:
            self._hash_blocks(blocks, digest)

    @property
    def _has_small_fragments(self) -> bool:
        return bool(self.layers[0].shape[1] < SMALL_FRAGMENT)

    def _hash_copy(self, blocks: BlockIds, digest: Digest) -> npt.NDArray[Any]:
        copy = np.empty(self.shape, self.rows[0].dtype)
        self.gather(blocks, copy)
        digest.update(copy)
        return copy

    def _hash_blocks(self, blocks: BlockIds, digest: Digest) -> None:
        ids = blocks.tolist()
        for layer in self.layers:
            for block in ids:
                digest.update(layer[block])

    def scatter_some(self, sources: npt.NDArray[Any], blocks: BlockIds, digest: Digest) -> None:
        """The same where some blocks are SKIP: those are not written, and hashed as they are in the slot."""
        wanted = blocks != SKIP
        ids = blocks[wanted]
        arrived = sources.copy()
        for rows, source, target in zip(self.rows, sources, arrived, strict=True):
            rows[ids] = source[wanted]
            target[wanted] = rows[ids]
        digest.update(arrived)


class _Run(NamedTuple):
    """Blocks of one layer that follow each other in the object."""

    layer: Bytes
    positions: slice

    @property
    def kind(self) -> tuple[slice, int, int]:
        """Equal for runs that can be in one step."""
        return self.positions, self.layer.shape[1], self.layer.strides[0]


def make_steps(layers: Sequence[Bytes], layout: LayoutDesc) -> Iterator[Step]:
    """The steps of one object, in object order."""
    offset = 0
    for (positions, width, _), runs in itertools.groupby(_runs(layers, layout), lambda run: run.kind):
        alike = [run.layer for run in runs]
        run_bytes = (positions.stop - positions.start) * width
        together = max(1, STEP_BYTES // run_bytes)
        for first in range(0, len(alike), together):
            step = _step(alike[first : first + together], positions, offset)
            yield step
            offset += len(step.rows) * run_bytes
    assert offset == layout.object_bytes


def _runs(layers: Sequence[Bytes], layout: LayoutDesc) -> Iterator[_Run]:
    for layer in layers:
        together = max(1, STEP_BYTES // layer.shape[1])
        for first in range(0, layout.blocks_per_chunk, together):
            yield _Run(layer, slice(first, min(first + together, layout.blocks_per_chunk)))


def _step(layers: list[Bytes], positions: slice, offset: int) -> Step:
    count, width = positions.stop - positions.start, layers[0].shape[1]
    rows: list[npt.NDArray[Any]] = list(layers)
    if count * width < SHARED_RUN_BYTES:
        rows = [layer.view(f"V{width}")[:, 0] for layer in layers]
    shape = (len(rows), count, *rows[0].shape[1:])
    return Step(layers, rows, rows[0].flags.c_contiguous, positions, offset, shape)


def block_memory(memory: Any, num_blocks: int) -> Bytes:
    """A layer's memory as (num_blocks, block_bytes) bytes. A view, never a copy.

    Takes an array whose first axis counts blocks, strided or not, each block contiguous; or anything flat
    that has the buffer protocol, which is cut into equal blocks.
    """
    array = memory if isinstance(memory, np.ndarray) else np.asarray(memoryview(memory))
    if array.ndim == 1 and num_blocks > 0 and array.size % num_blocks == 0 and array.flags.c_contiguous:
        array = array.reshape(num_blocks, -1)
    if array.ndim < 2 or array.shape[0] != num_blocks or not array.size:
        raise BadRequest(f"memory of shape {array.shape}, expected {num_blocks} blocks along the first axis")
    if not array[0].flags.c_contiguous:
        shape, strides = array.shape[1:], array.strides[1:]
        raise BadRequest(f"blocks of shape {shape} with strides {strides}, expected contiguous ones")
    return array.reshape(num_blocks, -1).view(np.uint8)


def check_layers(layers: Sequence[Bytes], layout: LayoutDesc) -> int:
    """Refuse memory that does not fit the layout; return its number of blocks."""
    if len(layers) != len(layout.layers):
        raise BadRequest(f"memory for {len(layers)} layers, expected {len(layout.layers)}")
    num_blocks = len(layers[0])
    for memory, layer in zip(layers, layout.layers, strict=True):
        expected = (num_blocks, layer.block_bytes)
        if memory.dtype != np.uint8 or memory.shape != expected:
            got = f"{memory.dtype} of shape {memory.shape}"
            raise BadRequest(f"layer {layer.name}: {got}, expected uint8 of shape {expected}")
        if not memory[:1].flags.c_contiguous or memory.strides[0] < layer.block_bytes:
            raise BadRequest(
                f"layer {layer.name}: strides {memory.strides}, expected whole rows in ascending order"
            )
        if not memory.flags.writeable:
            raise BadRequest(f"layer {layer.name}: read-only memory, expected writeable")
    return num_blocks


def check_blocks(blocks: BlockIds, rows: int, layout: LayoutDesc, num_blocks: int) -> None:
    """Refuse a block table with another shape, or with ids that are neither SKIP nor a block."""
    expected = (rows, layout.blocks_per_chunk)
    if blocks.dtype != np.int64 or blocks.shape != expected:
        got = f"{blocks.dtype} of shape {blocks.shape}"
        raise BadRequest(f"a block table of {got}, expected int64 of shape {expected}")
    strange = blocks[(blocks >= num_blocks) | ((blocks < 0) & (blocks != SKIP))]
    if strange.size:
        raise BadRequest(f"no block {strange[0]}, expected 0 to {num_blocks - 1}")


def check_targets(blocks: BlockIds) -> None:
    """Refuse a load that writes a block twice."""
    wanted = np.sort(blocks[blocks != SKIP])
    if (wanted[1:] == wanted[:-1]).any():
        raise BadRequest("a load that writes a block twice")
