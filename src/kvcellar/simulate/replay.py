"""Replay a trace against memory and disk, with the shelves, policies and write filters of the server.

Requests come one after the other: each looks up its prompt, loads what is there, and stores the rest. The
disk is written in the order of prefixes and evicts each chunk by itself, as tiers/books.py does. Nothing
takes time, so nothing is pinned by anybody else and nothing comes too late; hit rates are those of an engine
that waits. Knows nothing of bytes: sizes are counted in blocks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvcellar.identity import ChunkKey
from kvcellar.ledger import EvictionPolicy, SecondChance, Shelf, Stripe
from kvcellar.simulate.trace import Trace
from kvcellar.slab import MAX_SLOTS_PER_RACK
from kvcellar.tiers.admission import Event, WriteFilter


class Score(NamedTuple):
    """In tokens, but for what was written to disk."""

    asked: int
    memory_hits: int
    disk_hits: int
    written_blocks: int

    @property
    def hit_rate(self) -> float:
        return (self.memory_hits + self.disk_hits) / max(1, self.asked)


class _Table:
    """A rack's table that keeps nothing."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def write(self, slot: int, key: ChunkKey, parent: ChunkKey | None) -> None: ...

    def publish(self, slot: int) -> None: ...

    def free(self, slot: int) -> None: ...

    def withdraw(self, slot: int) -> None: ...


class Store:
    """One shelf of a given number of blocks: memory, or a disk."""

    def __init__(self, blocks: int, policy: EvictionPolicy) -> None:
        self.shelf = Shelf(1, policy)
        for number, first in enumerate(range(0, blocks, MAX_SLOTS_PER_RACK)):
            self.shelf.add_rack(number, _Table(min(MAX_SLOTS_PER_RACK, blocks - first)))

    def __contains__(self, key: ChunkKey) -> bool:
        return self.shelf.get(key) is not None

    def held(self, keys: Sequence[ChunkKey]) -> list[Stripe]:
        return [stripe for stripe in map(self.shelf.get, keys) if stripe is not None]

    def add(self, keys: Sequence[ChunkKey], positions: Iterable[int]) -> int:
        """Write these of a prompt's keys, up to the first for which there is no room. Returns how many."""
        taken: list[Stripe] = []
        for position in positions:
            stripe = self.shelf.take(keys[position], keys[position - 1] if position else None)
            if stripe is None:
                break
            taken.append(stripe)
        self.shelf.publish(reversed(taken))
        return len(taken)

    def add_alone(self, keys: Iterable[ChunkKey]) -> int:
        """The same without parents: one after the other, and any of them may go before the others."""
        stripes = (self.shelf.take(key, None) for key in keys)
        return sum(self.shelf.publish([stripe]) for stripe in stripes if stripe is not None)


class Cellar:
    """Memory over a disk (of 0 blocks: none)."""

    def __init__(
        self, memory: int, disk: int, policy: Callable[[], EvictionPolicy], write_filter: WriteFilter
    ) -> None:
        self.memory = Store(memory, policy())
        self.disk = Store(disk, SecondChance())
        self.disk_hits = self.disk_written = 0  # blocks
        self._filter = write_filter

    def serve(self, keys: Sequence[ChunkKey]) -> int:
        """One request: load the longest prefix that is here, store the rest. Returns how long it was."""
        memory, disk = self.memory, self.disk
        hit = next((n for n, key in enumerate(keys) if key not in memory and key not in disk), len(keys))
        here, below = memory.held(keys[:hit]), disk.held([key for key in keys[:hit] if key not in memory])
        memory.shelf.pin(here)
        disk.shelf.pin(below)
        missing = [n for n in range(hit) if keys[n] not in memory]
        brought = memory.add(keys, missing)
        if brought < len(missing):
            hit = missing[brought]
        self.disk_hits += brought
        disk.shelf.unpin(below[::-1])  # later chunks first, as leases settle
        memory.shelf.unpin(here[::-1])
        self._write_back(keys, range(hit), Event.USED)
        stored = memory.add(keys, range(hit, len(keys)))
        self._write_back(keys, range(hit, hit + stored), Event.STORED)
        return hit

    def _write_back(self, keys: Sequence[ChunkKey], positions: Iterable[int], event: Event) -> None:
        missing = [keys[n] for n in positions if keys[n] not in self.disk]
        self.disk_written += self.disk.add_alone(key for key in missing if self._filter.wants(key, event))


def replay(trace: Trace, cellar: Cellar, on_request: Callable[[], None] = lambda: None) -> Score:
    asked = hits = 0
    for prompt in trace.prompts:
        asked += prompt.tokens
        hits += cellar.serve(prompt.keys)
        on_request()
    disk_hits = cellar.disk_hits * trace.block_tokens
    return Score(asked, hits * trace.block_tokens - disk_hits, disk_hits, cellar.disk_written)


def ceiling(trace: Trace) -> float:
    """The hit rate of a cache that never forgets."""
    seen = set[ChunkKey]()
    hits = 0
    for prompt in trace.prompts:
        hits += next((n for n, key in enumerate(prompt.keys) if key not in seen), len(prompt.keys))
        seen.update(prompt.keys)
    return hits * trace.block_tokens / max(1, trace.tokens)
