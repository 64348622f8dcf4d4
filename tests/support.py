"""Small builders that many tests share. Imports no test framework."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvcellar.identity import (
    BlockHash,
    ChunkKey,
    CopyPlan,
    Group,
    Layer,
    LayoutDesc,
    Namespace,
    NamespaceId,
    ParallelStrategy,
)
from kvcellar.ledger import SCHEDULER, Granted, Ledger

FREE, WRITING, READY = 0, 1, 2


def full_group(pp: int = 1) -> Group:
    """One layer per pipeline stage, one page per chunk of 256 tokens and shard."""
    return Group(16, tuple(Layer(f"layers.{stage}", 256, stage) for stage in range(pp)))


def window_group(chunks: int) -> Group:
    """A sliding window that needs the last `chunks` chunks of 256 tokens."""
    return Group(16, (Layer("window.0", 256),), kind="sliding", window_tokens=256 * chunks)


def namespace(**changes: Any) -> Namespace:
    """One full group of one page per chunk and shard; any field can be changed."""
    parallel = changes.get("parallel", ParallelStrategy())
    fields: dict[str, Any] = {
        "engine": "test/1",
        "model": "tiny",
        "weights": "sha256:ab",
        "kv_dtype": "bfloat16",
        "kv_layout": "NHD",
        "groups": (full_group(parallel.pp),),
        "parallel": parallel,
        "chunk_tokens": 256,
        "block_hash": BlockHash("sha256_cbor", 16, "00ff"),
        "checksum": "linear64",
    }
    return Namespace(**fields | changes)


def keys(n: int, seed: int | str = 0) -> list[ChunkKey]:
    """The chunk keys of one prompt; another seed is another prompt."""
    return [ChunkKey(hashlib.blake2b(f"{seed}/{i}".encode(), digest_size=16).digest()) for i in range(n)]


class MemoryTable:
    """A ledger.Table that only remembers."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.states = [FREE] * slots
        self.entries: list[tuple[ChunkKey, ChunkKey | None] | None] = [None] * slots

    def write(self, slot: int, key: ChunkKey, parent: ChunkKey | None) -> None:
        held = self.entries[slot] if self.states[slot] != FREE else None
        assert held is None or held[0] == key, "written over"
        self.entries[slot] = (key, parent)
        self.states[slot] = WRITING

    def publish(self, slot: int) -> None:
        assert self.states[slot] == WRITING
        self.states[slot] = READY

    def free(self, slot: int) -> None:
        self.states[slot] = FREE

    def withdraw(self, slot: int) -> None:
        self.states[slot] = WRITING


def clear(ledger: Ledger, namespace_id: NamespaceId | None = None) -> int:
    """To the end, as the server does in many turns."""
    cleared = ledger.clear(namespace_id)
    sweep(ledger)
    return cleared


def end_grace(ledger: Ledger) -> None:
    ledger.set_grace(False)
    sweep(ledger)


def sweep(ledger: Ledger) -> None:
    while ledger.sweep():
        pass


class Engine:
    """One session with its scheduler and all its ranks, as a ledger sees a well-behaved engine.

    The first of a namespace brings `slots` of memory for each group.
    """

    def __init__(self, ledger: Ledger, namespace: Namespace, name: str = "engine", slots: int = 8) -> None:
        self.ledger = ledger
        self.namespace = namespace
        self.ranks = range(namespace.parallel.world_size)
        for rank in (SCHEDULER, *self.ranks):
            self.session = ledger.join(name, rank)
        self.room = ledger.register(self.session, SCHEDULER, namespace)
        for shelf in self.room.shelves:
            if not shelf.tables:
                shelf.add_rack(0, MemoryTable(slots))

    def lookup(self, asked: Sequence[ChunkKey]) -> Granted:
        return self.ledger.lookup(self.session, self.namespace.id, asked)

    def reserve(self, asked: Sequence[ChunkKey], parent: ChunkKey | None = None, **more: Any) -> Granted:
        return self.ledger.reserve(self.session, self.namespace.id, asked, parent, **more)

    def commit(self, granted: Granted, rank: int = 0, first: int = 0, stop: int | None = None) -> int:
        end = granted.chunks if stop is None else stop
        return self.ledger.commit(self.session, rank, granted.lease, first, end)

    def abort(self, granted: Granted, rank: int = 0, first: int = 0, stop: int | None = None) -> int:
        end = granted.chunks if stop is None else stop
        return self.ledger.abort(self.session, rank, granted.lease, first, end)

    def release(self, granted: Granted, rank: int = 0, first: int = 0, stop: int | None = None) -> int:
        end = granted.chunks if stop is None else stop
        return self.ledger.release(self.session, rank, granted.lease, first, end)

    def store(self, asked: Sequence[ChunkKey], parent: ChunkKey | None = None, **more: Any) -> Granted:
        """Reserve, and let every writer commit."""
        granted = self.reserve(asked, parent, **more)
        for rank in self.namespace.parallel.writer_ranks:
            self.commit(granted, rank)
        return granted

    def bring(self, key: ChunkKey) -> None:
        """As the server does from a tier, for one use."""
        shelf = self.room.shelves[0]
        stripe = shelf.take(key, None, temporary=True)
        assert stripe is not None
        shelf.publish([stripe])

    def part(self, *ranks: int) -> None:
        for rank in ranks:
            self.ledger.part(self.session, rank)

    def leave(self) -> None:
        self.part(SCHEDULER, *self.ranks)

    def hit(self, asked: Sequence[ChunkKey]) -> int:
        """How many chunks a lookup finds; what it pins is given back."""
        granted = self.lookup(asked)
        if granted.chunks:
            self.release(granted, SCHEDULER)
        return granted.chunks

    def pins(self, asked: Sequence[ChunkKey], group: int = 0) -> list[int]:
        """Read leases on each of these; -1 where there is nothing."""
        found = [self.room.shelves[group].get(key) for key in asked]
        return [-1 if stripe is None else stripe.pins for stripe in found]

    def free_slots(self, group: int = 0) -> int:
        return self.room.shelves[group].free_slots


def plan_of(group: int, places: Sequence[int], blocks: Sequence[Sequence[int]]) -> CopyPlan:
    return CopyPlan(group, np.array(places, np.uint32), np.array(blocks, np.int64))


class Fragment(NamedTuple):
    """One contiguous run of bytes: `length` bytes of `block` in layer `layer` at `offset` of the object in
    the slot at `place`.
    """

    place: int
    offset: int
    layer: int
    block: int
    length: int


def fragments(plan: CopyPlan, layout: LayoutDesc) -> Iterator[Fragment]:
    """In object order; skipped blocks come too, as block SKIP, since a checksum covers them."""
    offsets = layout.layer_offsets()
    for place, blocks in zip(plan.places.tolist(), plan.blocks.tolist(), strict=True):
        for number, layer in enumerate(layout.layers):
            for position, block in enumerate(blocks):
                offset = offsets[number] + position * layer.block_bytes
                yield Fragment(place, offset, number, block, layer.block_bytes)
