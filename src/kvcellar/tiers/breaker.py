"""The circuit breaker: after some failures in a row a tier is left alone for a while.

    closed --failures in a row, or a call that does not return--> open
    open --pause over--> half-open: one call may try
    half-open --it succeeds--> closed; --it fails--> open, for twice as long

Pure: the clock is passed in. Knows nothing of threads or engines.
"""

from collections.abc import Callable

FAILURES = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class Breaker:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.reason = ""  # why it is not closed
        self._clock = clock
        self._failures = 0
        self._pause = 0.0  # 0 while closed
        self._retry_at = 0.0
        self._trying = False  # half-open, and somebody is at it

    @property
    def is_closed(self) -> bool:
        return not self._pause

    @property
    def may_pass(self) -> bool:
        """Would `enter` let a call through?"""
        return not self._pause or (not self._trying and self._clock() >= self._retry_at)

    def enter(self) -> bool:
        """May a call be made? After a yes, say `success`, `failure` or `no_verdict`."""
        if not self.may_pass:
            return False
        self._trying = bool(self._pause)
        return True

    def success(self) -> None:
        self._failures, self._pause, self._trying, self.reason = 0, 0.0, False, ""

    def failure(self, reason: str, *, at_once: bool = False) -> None:
        """`at_once`: do not wait for more of the kind."""
        self._failures += 1
        if not (at_once or self._failures >= FAILURES or self._pause):
            return
        if not self._pause or self._trying:  # the failure of an old call does not prolong the pause
            self._pause = min(2 * self._pause or FIRST_PAUSE_S, LONGEST_PAUSE_S)
            self._retry_at = self._clock() + self._pause
        self._trying = False
        self.reason = reason

    def no_verdict(self) -> None:
        """The call was never made."""
        self._trying = False
