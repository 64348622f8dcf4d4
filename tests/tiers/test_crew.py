"""The threads of a tier: each call is one thread's or nobody's."""

import threading
from functools import partial

from kvcellar.tiers.crew import Crew
from tests.server.engine import eventually


def test_what_is_withdrawn_is_never_done_and_what_is_not_is_done_once():
    crew, ended = Crew("test", 3), threading.Semaphore(0)
    done: list[int] = []
    calls = [partial(done.append, number) for number in range(2000)]
    for call in calls:
        crew.submit(call, urgent=call.args[0] % 2 == 0)
    withdrawn = [call.args[0] for call in reversed(calls) if crew.withdraw(call)]
    crew.submit(ended.release, urgent=False)
    crew.close()
    assert ended.acquire(timeout=30)
    eventually(lambda: crew.is_idle)
    assert sorted(done + withdrawn) == list(range(2000))
    assert not any(crew.withdraw(call) for call in calls)


def test_a_crew_is_idle_when_nothing_is_queued_and_nobody_is_at_work():
    crew, begun, go_on = Crew("test", 1), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(30)

    crew.submit(work, urgent=True)
    assert begun.wait(30)
    assert not crew.backlog
    assert not crew.is_idle
    go_on.set()
    eventually(lambda: crew.is_idle)
    crew.close()
