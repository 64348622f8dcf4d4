"""What is over, where both sides of the connector are in one process, as with a single GPU.

vLLM that schedules ahead handles what a worker reports one step later. Here the scheduler side asks for
itself which loads are over, when vLLM handles the step before, and adds what it finds to that. A load that it
does not ask for within two steps is reported by the worker side, as anywhere else: each is told exactly once.

Of stores it asks when steps may not come: an engine inside its caller's process makes none without requests.
Then it may hear of a job twice, since the last step that was made may be handled before or after.

Used by the engine's thread. Knows nothing of vLLM.
"""

from collections import Counter
from collections.abc import Callable

_PATIENCE = 2  # steps


class Landed:
    """Of one engine."""

    def __init__(self, take_stores: Callable[[float], Counter[int]]) -> None:
        self.take_stores = take_stores  # jobs that are over; waits so many seconds for the others
        self.is_asked = False  # there is a scheduler side here, and it asks
        self._waiting: dict[str, int] = {}  # by request: steps for which it was not fetched

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, requests: set[str]) -> set[str]:
        """At the end of a step: their loads are over, and good. Returns those that the worker side has to
        report.
        """
        if not self.is_asked:
            return requests
        self._waiting = {request: steps + 1 for request, steps in self._waiting.items()}
        self._waiting |= dict.fromkeys(requests, 0)
        late = {request for request, steps in self._waiting.items() if steps == _PATIENCE}
        for request in late:
            del self._waiting[request]
        return late

    def fetch(self) -> set[str]:
        self.is_asked = True
        fetched = set(self._waiting)
        self._waiting.clear()
        return fetched


# By session, those whose worker side is in this process; None: there are two of that name, and a scheduler
# side could not tell which one is its own.
_engines: dict[str, Landed | None] = {}


def open_landed(session: str, take_stores: Callable[[float], Counter[int]]) -> Landed:
    """For the worker side of an engine with one rank: others may not be done yet."""
    landed = Landed(take_stores)
    _engines[session] = None if session in _engines else landed
    return landed


def landed_of(session: str) -> Landed | None:
    return _engines.get(session)


def close_landed(session: str, landed: Landed) -> None:
    if _engines.get(session) is landed:
        del _engines[session]
