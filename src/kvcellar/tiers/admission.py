"""Which chunks are worth writing to a tier.

Writing wears a disk, and much of what engines compute is never asked for again. A write filter is asked about
a chunk whenever an engine has stored it or has used it, and says yes or no at once. Its memory is fixed.
Knows nothing of tiers, queues or bytes; a wrong answer costs a hit or a write, nothing else.
"""

from array import array
from collections.abc import Callable
from enum import Enum
from struct import Struct
from typing import Protocol

from kvcellar.identity import ChunkKey

_number = Struct("<Q").unpack_from  # chunk keys are hashes: any part of one is as good as another
_TURN = 0xFFFF_FFFF
_MARK = _TURN << 32
_ALL = _MARK | _TURN


class Event(Enum):
    """What happened to a chunk."""

    STORED = "stored"  # an engine computed it, and it is in memory now
    USED = "used"  # an engine found it in memory; asked about what the tier does not hold


class WriteFilter(Protocol):
    def wants(self, key: ChunkKey, event: Event, salt: int = 0) -> bool:
        """Write it now? Asked in the order of a prefix, so that what is written has its parents there.
        `salt` tells namespaces and groups apart, in which equal keys name different things.
        """


class WriteEverything:
    """Whatever was computed, as soon as it is: it can be read again from the next request on."""

    def wants(self, key: ChunkKey, event: Event, salt: int = 0) -> bool:  # noqa: ARG002 - nothing is refused
        return event is Event.STORED


class WriteReused:
    """What was needed twice: found in memory, or computed again after it was lost."""

    def __init__(self, window: int = 1 << 20) -> None:
        self._seen = Ghost(window)  # 16 MiB for what engines compute in hours

    def wants(self, key: ChunkKey, event: Event, salt: int = 0) -> bool:
        if event is Event.USED:
            return True
        number = (_number(key)[0] ^ salt) & _ALL
        known = number in self._seen
        self._seen.add(number)
        return known


class Ghost:
    """The numbers (64 bits of a hash) seen lately, in a fixed number of bytes: 16 to 32 each, where a set has
    100.

    A table of fingerprints, each with its turn: a number is known if it is among the last `window` that were
    added. A newer one takes the cell of an older one, so up to two in five are forgotten early; a new one is
    taken for a known one once in four billion times.
    """

    def __init__(self, window: int) -> None:
        cells = 1 << (2 * window - 1).bit_length()
        self._window = window
        self._cells = array("Q", bytes(8 * cells))
        self._mask = cells - 1
        self._turn = window  # so that empty cells, which read as turn 0, are old

    def __contains__(self, number: int) -> bool:
        cell = self._cells[number & self._mask]
        return (cell ^ number) <= _TURN and (self._turn - cell) & _TURN < self._window

    def add(self, number: int) -> None:
        self._turn = (self._turn + 1) & _TURN  # wraps after four billion, and then mistakes a few
        self._cells[number & self._mask] = number & _MARK | self._turn


# docs/policies.md says what each finds, and what it writes for it.
FILTERS: dict[str, Callable[[], WriteFilter]] = {"everything": WriteEverything, "reused": WriteReused}
