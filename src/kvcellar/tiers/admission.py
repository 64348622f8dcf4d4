"""Which chunks are worth writing to a tier.

Writing wears a disk and fills a network, and much of what engines compute is never asked for again. A write
filter is asked about a chunk that the tier does not hold, whenever something happens to it, and says yes or
no at once. Its memory is fixed. Knows nothing of tiers, queues or bytes; a wrong answer costs a hit or a
write, nothing else.
"""

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from kvcellar.ghost import Ghost
from kvcellar.identity import ChunkKey


class Event(Enum):
    """What happened to a chunk that the tier does not hold."""

    STORED = "stored"  # an engine computed it, and it is in memory now
    USED = "used"  # a lookup found it in memory
    EVICTED = "evicted"  # it has to leave memory


class WriteFilter(Protocol):
    def wants(self, key: ChunkKey, event: Event) -> bool:
        """Write it now? Asked in the order of a prefix, so that what is written has its parents there. A yes
        that is not heeded costs nothing: the chunk will be asked about again.
        """


class WriteEverything:
    """Whatever was computed, as soon as it is: it can be read again from the next request on."""

    def wants(self, key: ChunkKey, event: Event) -> bool:  # noqa: ARG002 - nothing is refused
        return event is not Event.EVICTED


class WriteReused:
    """What was needed twice: found in memory, or computed again after it was lost."""

    def __init__(self, window: int = 1 << 20) -> None:
        self._seen = Ghost(window)  # 16 MiB for what engines compute in hours

    def wants(self, key: ChunkKey, event: Event) -> bool:
        if event is not Event.STORED:
            return event is Event.USED
        known = key in self._seen
        self._seen.add(key)
        return known


class WriteEvicted:
    """What memory has no room for any more. The tier then holds little that memory holds too, but whoever
    needs the room waits for the write, and what is lost with the memory is lost.
    """

    def wants(self, key: ChunkKey, event: Event) -> bool:  # noqa: ARG002 - not by key
        return event is Event.EVICTED


DefaultFilter = WriteEverything

FILTERS: dict[str, Callable[[], WriteFilter]] = {
    "everything": WriteEverything,
    "reused": WriteReused,
    "evicted": WriteEvicted,
}
