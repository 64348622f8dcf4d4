"""How fast a tier moves bytes: measured over the time in which it had something to do.

Several calls run at once, so neither one call's speed nor the wall time alone says it: `rate` is bytes over
busy time, where old measurements fade. Pure: the clock is passed in.
"""

from collections.abc import Callable

_WINDOW_S = 1.0  # busy time after which what was measured counts half
_FRESH_S = 60.0  # what is older says nothing of now


class Meter:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.calls = 0
        self.bytes = 0
        self._clock = clock
        self._active = 0
        self._since = 0.0  # up to when the busy time is accounted for
        self._recent_bytes = 0.0
        self._recent_s = 0.0

    def begin(self) -> None:
        self._tick()
        self._active += 1

    def end(self, moved: int) -> None:
        self._tick()
        self._active -= 1
        self.calls += 1
        self.bytes += moved
        self._recent_bytes += moved
        if self._recent_s > _WINDOW_S:
            self._recent_bytes /= 2
            self._recent_s /= 2

    @property
    def rate(self) -> float:
        """Bytes per second; 0 while nothing has been measured."""
        return self._recent_bytes / self._recent_s if self._recent_s and self._recent_bytes else 0.0

    @property
    def fresh_rate(self) -> float:
        """The same, but 0 if that was a while ago: a tier that was slow once deserves another trial."""
        return self.rate if self._clock() - self._since < _FRESH_S else 0.0

    def _tick(self) -> None:
        now = self._clock()
        if self._active:
            self._recent_s += now - self._since
        self._since = now
