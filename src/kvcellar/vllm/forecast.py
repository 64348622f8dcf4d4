"""When the load under way should be over, by the fastest of the last ones. Knows bytes and seconds only."""

import math
from collections.abc import Callable

_FORGET = 1.1  # by which the fastest counts as slower from load to load: memory may have become slower


class Forecast:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._per_byte = math.inf
        self._begun = 0.0
        self._due = math.inf

    def begin(self, size: int) -> None:
        self._begun = self._clock()
        self._due = self._begun + size * self._per_byte if size else self._begun

    def end(self, size: int) -> None:
        """So many bytes were loaded; none if it failed."""
        if size:
            took = (self._clock() - self._begun) / size
            self._per_byte = min(took, self._per_byte * _FORGET)
        self._due = math.inf

    def is_due(self, within: float) -> bool:
        return self._due - self._clock() <= within
