"""How fast a tier moves bytes: measured over the time in which it had something to do.

Several calls run at once, so neither one call's speed nor the wall time alone says it: `rate` is bytes over
busy time, where old measurements fade. A call that is alone shows how long one takes, not what the tier can
do, so its speed counts only until calls were seen together. Pure: the clock is passed in.
"""

from collections.abc import Callable

_WINDOW_S = 1.0  # busy time after which what was measured counts half
_FRESH_S = 60.0  # what is older says nothing of now


class _Pace:
    """Bytes over time, where what is old counts less and less."""

    def __init__(self) -> None:
        self.bytes = 0.0
        self.seconds = 0.0

    def fade(self) -> None:
        if self.seconds > _WINDOW_S:
            self.bytes /= 2
            self.seconds /= 2

    @property
    def rate(self) -> float:
        return self.bytes / self.seconds if self.seconds and self.bytes else 0.0


class Meter:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.bytes = 0
        self.call_s = 0.0  # what one call takes from question to answer, lately
        self._clock = clock
        self._active = 0
        self._since = 0.0  # up to when the busy time is accounted for
        self._alone, self._together = _Pace(), _Pace()
        self._pace = self._alone  # of the busy time that is going on

    def begin(self) -> float:
        """Returns what `end` wants to know."""
        self._tick()
        self._active += 1
        if self._active > 1:
            self._pace = self._together
        return self._since

    def end(self, began: float, moved: int) -> None:
        self._tick()
        if moved:
            took = self._since - began
            self.call_s = took if not self.call_s else 0.8 * self.call_s + 0.2 * took
        self.bytes += moved
        self._pace.bytes += moved
        self._pace.fade()
        self._active -= 1
        if not self._active:
            self._pace = self._alone

    @property
    def rate(self) -> float:
        """Bytes per second; 0 while nothing has been measured."""
        return self._together.rate or self._alone.rate

    @property
    def is_sure(self) -> bool:
        """Calls were seen together."""
        return self._together.rate > 0

    @property
    def fresh_rate(self) -> float:
        """The same, but 0 if that was a while ago: a tier that was slow once deserves another trial."""
        return self.rate if self._clock() - self._since < _FRESH_S else 0.0

    def _tick(self) -> None:
        now = self._clock()
        if self._active:
            self._pace.seconds += now - self._since
        self._since = now
