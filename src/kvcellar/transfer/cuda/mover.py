"""Moves KV between paged GPU memory and slots: a kernel to or from a staging buffer, and one DMA per object.

    store   blocks --gather + sum--> staging --DMA--> slot, then the header
    load    slot --DMA--> staging --scatter + sum--> blocks, then the sums are compared

The engine's stream never waits, and nothing synchronises the device; a call blocks its own thread, until what
the engine launched before is over, and until its copies are.

Knows no leases: the caller holds slots and blocks as long as a call runs. One call at a time per direction.
"""

import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcellar.errors import BadRequest
from kvcellar.identity import SKIP, LayoutDesc, Namespace, layout_of
from kvcellar.slab import Place, Slot, slot_of
from kvcellar.transfer import sum64
from kvcellar.transfer.cuda.launch import Launch
from kvcellar.transfer.cuda.pins import Pins, slots_locked_together
from kvcellar.transfer.cuda.ring import BUFFERS, Kernel, Ring, Run, Span
from kvcellar.transfer.geometry import FEW_PIECES, block_shape
from kvcellar.transfer.kernels import BYTE, WORD
from kvcellar.transfer.mover import Rows
from kvcellar.transfer.slots import Slots, Stamp, check_keys, check_places, find_slots
from kvcellar.transfer.steps import BlockIds, check_blocks, check_targets

log = logging.getLogger(__name__)

# A store that had to wait for its step begins so long after it: whoever waits for that step's tokens waits
# for the GIL too, and a store is in no hurry. A new prompt of 2,048 tokens took 1.05 times as long as without
# a connector when stores began at once, and 1.01 with this, in 20 rounds each; at 8,192 tokens the difference
# was less than 12 rounds could show (bench/results/gpu/rests.txt).
_REST_S = 0.002

TableRow = tuple[int, int, int, int, int]  # see kernels.py


class Part(NamedTuple):
    """Layers of an object that are staged together."""

    start: int  # bytes of the object
    stop: int
    load: Launch
    store: Launch


class _Group:
    """What is known of one group: its layout, and the parts in which its objects are staged."""

    def __init__(
        self, namespace: Namespace, shard: int, group: int, layers: Sequence[torch.Tensor], num_blocks: int
    ) -> None:
        self.layout = layout_of(namespace, shard, group)
        self.object_bytes, self.slot_bytes = self.layout.object_bytes, self.layout.slot_bytes
        self.stamp = Stamp(namespace, shard, group)
        self.num_blocks = num_blocks
        self.layers = list(layers)  # keeps them from being freed
        self.rows = _table_rows(self.layout, layers, num_blocks)
        numbers = itertools.chain.from_iterable(itertools.chain.from_iterable(self.rows))
        self.unit = BYTE if any(number % WORD for number in numbers) else WORD
        size = self.layout.object_bytes
        rows = sum64.row_weights(sum64.rows_of(size))
        device = layers[0].device
        self.weights = (_to_gpu(rows, device), _to_gpu(sum64.COLUMN, device))
        self.parts: list[Part] = []

    def stage_in(self, buffer_bytes: int, *, check: bool) -> None:
        """Cut objects into parts that fit a staging buffer, each of whole layers."""
        ends = [*self.layout.layer_offsets()[1:], self.layout.object_bytes]
        start, rows = 0, []
        for number, end in enumerate(ends):
            rows += self.rows[number]
            following = ends[min(number + 1, len(ends) - 1)]
            if number + 1 == len(ends) or following - start > buffer_bytes:
                self.parts.append(self._part(rows, start, end, check=check))
                start, rows = end, []

    def _part(self, rows: list[TableRow], start: int, stop: int, *, check: bool) -> Part:
        table = torch.tensor(rows, dtype=torch.int64, device=self.layers[0].device)
        both = [
            Launch(
                table,
                self.weights,
                self.layout.blocks_per_chunk,
                range(start, stop),
                load=load,
                unit=self.unit,
                check=check,
            )
            for load in (True, False)
        ]
        return Part(start, stop, *both)

    @property
    def largest_layer(self) -> int:
        return max(layer.block_bytes for layer in self.layout.layers) * self.layout.blocks_per_chunk


class CudaMover:
    """All groups of one rank."""

    def __init__(
        self,
        namespace: Namespace,
        shard: int,
        groups: Sequence[Sequence[torch.Tensor]],
        num_blocks: int,
        *,
        staging_bytes: int,
        pins: Pins | None = None,
        check: bool = True,
    ) -> None:
        if namespace.checksum != "sum64":
            raise BadRequest(f"checksum {namespace.checksum!r}, expected 'sum64' for KV in GPU memory")
        self._groups = [
            _Group(namespace, shard, number, layers, num_blocks) for number, layers in enumerate(groups)
        ]
        self._pins = pins  # None: the caller has page-locked all slabs
        self._check = check  # off only to measure what checking costs
        self.device = groups[0][0].device
        share = staging_bytes // (2 * BUFFERS) // 4096 * 4096
        largest = max(group.largest_layer for group in self._groups)
        buffer_bytes = max(share, -(-largest // 4096) * 4096)
        self._loads = Ring(self.device, buffer_bytes)
        self._stores = Ring(self.device, buffer_bytes, rest=_REST_S)
        for group in self._groups:
            group.stage_in(buffer_bytes, check=check)
        self._tell_what_is_slow()

    def _tell_what_is_slow(self) -> None:
        """Once per engine: what works, but not as fast as the bus."""
        if any(group.unit == BYTE for group in self._groups):
            log.warning("KVCellar: copies will be slow, KV is not in whole, aligned words of 8 bytes")
        pieces = max(len(rows) for group in self._groups for rows in group.rows)
        if pieces > FEW_PIECES:
            log.warning("KVCellar: copies will be slow, a block's KV is in %d pieces", pieces)

    def object_bytes(self, group: int) -> int:
        return self._groups[group].object_bytes

    def fence(self) -> torch.cuda.Event:
        """What the engine has launched so far, on the calling thread's stream: pass it to load and store."""
        event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, after: torch.cuda.Event | None) -> None:
        """As a store does, before anything else is done for it."""
        self._stores.wait_for_the_engine(after)

    def store(self, rows: Sequence[Rows], slots: Slots, after: Any) -> None:
        """Copy each row's blocks into its slot, then write the slot's header."""
        headers: list[list[memoryview]] = [[] for _ in rows]
        with self._stores.running(lambda: self._sources(rows), after) as run:
            for number, part in enumerate(rows):
                for _, places, launch in self._batches(run, number, part, slots, load=False):
                    headers[number] += [slot.header.data for slot in places]
                    self._stores.store(*launch)
        for part, some, sums in zip(rows, headers, self._finish(run, rows), strict=True):
            stamp = self._groups[part.plan.group].stamp
            for header, key, checksum in zip(some, part.keys, sums, strict=True):
                stamp.write(header, key, checksum)

    def load(self, rows: Sequence[Rows], slots: Slots, after: Any) -> list[list[int]]:
        """Copy each row's slot into its blocks, except where they are SKIP; return the rows that failed.

        A row fails when its slot holds another object, or bytes that do not match their checksum; its blocks
        then hold garbage.
        """
        promised: list[list[int | None]] = [[] for _ in rows]
        with self._loads.running(lambda: self._targets(rows), after) as run:
            for number, part in enumerate(rows):
                stamp = self._groups[part.plan.group].stamp
                for some, places, launch in self._batches(run, number, part, slots, load=True):
                    keys = part.keys[some.start : some.stop]
                    self._loads.load(*launch)
                    promised[number] += map(stamp.promised, (slot.header for slot in places), keys)
        return [
            [
                row
                for row, (want, got) in enumerate(zip(wanted, sums, strict=True))
                if self._differs(want, got)
            ]
            for wanted, sums in zip(promised, self._finish(run, rows), strict=True)
        ]

    def _differs(self, promised: int | None, added: int) -> bool:
        return promised != added if self._check else promised is None

    def _finish(self, run: Run, rows: Sequence[Rows]) -> list[list[int]]:
        """The checksums of all rows, as the kernels have seen their bytes."""
        sizes = [self.object_bytes(part.plan.group) for part in rows]
        return [sum64.finish(sums, size).tolist() for sums, size in zip(run.added, sizes, strict=True)]

    def _sources(self, rows: Sequence[Rows]) -> list[BlockIds]:
        """The blocks to store, once they are known to be in order."""
        if any((part.plan.blocks == SKIP).any() for part in rows):
            raise BadRequest("a store that skips a block: an object is never stored in part")
        return self._checked(rows)

    def _targets(self, rows: Sequence[Rows]) -> list[BlockIds]:
        """The blocks to load into, likewise."""
        for part in rows:
            check_targets(part.plan.blocks)
        return self._checked(rows)

    def _checked(self, rows: Sequence[Rows]) -> list[BlockIds]:
        for plan, keys in rows:
            group = self._groups[plan.group]
            check_blocks(plan.blocks, len(plan.places), group.layout, group.num_blocks)
            check_keys(keys, len(plan.places))
            check_places(plan.places.tolist())
        return [part.plan.blocks for part in rows]

    def _batches(
        self, run: Run, number: int, rows: Rows, slots: Slots, *, load: bool
    ) -> Iterator[tuple[range, list[Slot], tuple[Sequence[Span], Kernel]]]:
        """What fits a buffer, one after the other: the rows, their slots where they are first met, and what
        the ring needs. Slots are looked up here and not before, while the bus is busy with earlier ones.
        """
        group, places = self._groups[rows.plan.group], rows.plan.places.tolist()
        together = max(1, self._loads.buffer_bytes // group.object_bytes)
        for first in range(0, len(places), together):
            some = range(first, min(first + together, len(places)))
            found = find_slots(slots, rows.plan.group, places[some.start : some.stop], group.object_bytes)
            addresses = [slot.address for slot in found]
            if self._pins is not None:
                self._pins.ensure(_pieces(addresses, places[some.start :], group.slot_bytes))
                self._loads.locked = self._stores.locked = self._pins.all_locked
            for part in group.parts:
                launch = part.load if load else part.store
                kernel = functools.partial(launch, run, number, some)
                starts = [address + part.start for address in addresses]
                spans = _spans(starts, places[some.start :], part.stop - part.start, group.slot_bytes)
                yield some, found if part.start == 0 else [], (spans, kernel)


def _pieces(addresses: list[int], places: list[int], slot_bytes: int) -> set[int]:
    """Where the pieces start that these slots are locked with."""
    together = slots_locked_together(slot_bytes)
    return {
        address - slot_of(Place(place)) % together * slot_bytes
        for address, place in zip(addresses, places, strict=False)
    }


def _spans(starts: list[int], places: list[int], size: int, slot_bytes: int) -> list[Span]:
    """One span per slot, or fewer: slots side by side are one, as long as they were page-locked together."""
    together = slots_locked_together(slot_bytes)
    spans: list[Span] = []
    for start, place in zip(starts, places, strict=False):
        if spans and sum(spans[-1]) == start and slot_of(Place(place)) % together:
            spans[-1] = (spans[-1][0], spans[-1][1] + size)
        else:
            spans.append((start, size))
    return spans


def _table_rows(layout: LayoutDesc, layers: Sequence[torch.Tensor], num_blocks: int) -> list[list[TableRow]]:
    """By layer: the rows of the kernel's table."""
    if len(layers) != len(layout.layers):
        raise BadRequest(f"memory for {len(layers)} layers, expected {len(layout.layers)}")
    rows = []
    for tensor, layer, offset in zip(layers, layout.layers, layout.layer_offsets(), strict=True):
        shape = block_shape(tensor.shape, tensor.stride(), tensor.element_size(), num_blocks)
        if shape.block_bytes != layer.block_bytes:
            raise BadRequest(
                f"layer {layer.name}: blocks of {shape.block_bytes} bytes, expected {layer.block_bytes}"
            )
        rows.append(
            [
                (
                    tensor.data_ptr() + piece,
                    shape.stride,
                    shape.run,
                    offset + number * shape.run,
                    layer.block_bytes,
                )
                for number, piece in enumerate(shape.pieces)
            ]
        )
    return rows


def _to_gpu(words: sum64.Words, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int64).copy()).to(device)
