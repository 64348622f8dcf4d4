"""The threads of a tier: each call is one thread's or nobody's."""

import threading
from functools import partial

from kvcellar.tiers.crew import Crew
from tests.server.engine import eventually


def test_what_is_withdrawn_is_never_done_and_what_is_not_is_done_once():
    crew = Crew("test", 3)
    done: list[int] = []
    free = threading.Event()

    def hold() -> None:
        free.wait()

    for _ in range(3):  # its threads have something to do first
        crew.submit(partial(hold), urgent=True)
    calls = [partial(done.append, number) for number in range(2000)]
    for call in calls:
        crew.submit(call, urgent=call.args[0] % 2 == 0)
    withdrawn = [call.args[0] for call in calls[:500] if crew.withdraw(call)]
    assert withdrawn == list(range(500))
    free.set()
    withdrawn += [call.args[0] for call in reversed(calls) if crew.withdraw(call)]
    eventually(lambda: len(done) + len(withdrawn) >= len(calls))
    crew.close()
    assert sorted(done + withdrawn) == list(range(2000))
    assert not any(crew.withdraw(call) for call in calls)
