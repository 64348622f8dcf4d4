"""Loads that are over, where both sides of the connector are in one process, as with a single GPU.

vLLM that schedules ahead handles what a worker reports one step later. Here the scheduler side asks for
itself, when vLLM handles the step before, and adds what it finds to that. A load that it does not ask for
within two steps is reported by the worker side, as anywhere else: each is told exactly once.

Used by the engine's thread. Knows nothing of vLLM.
"""

_PATIENCE = 2  # steps


class Landed:
    """Of one engine."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}  # by request: steps for which it was not fetched

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, requests: set[str]) -> set[str]:
        """At the end of a step: their loads are over, and good. Returns those that nobody has fetched."""
        self._waiting = {request: steps + 1 for request, steps in self._waiting.items()}
        self._waiting |= dict.fromkeys(requests, 0)
        late = {request for request, steps in self._waiting.items() if steps == _PATIENCE}
        for request in late:
            del self._waiting[request]
        return late

    def fetch(self) -> set[str]:
        fetched = set(self._waiting)
        self._waiting.clear()
        return fetched


_engines: dict[str, Landed] = {}  # by session: those whose scheduler side is in this process


def listen(session: str) -> None:
    """To be called by the scheduler side of an engine with one rank: others may not be done yet."""
    _engines[session] = Landed()


def landed(session: str) -> Landed | None:
    return _engines.get(session)


def close(session: str) -> None:
    _engines.pop(session, None)
