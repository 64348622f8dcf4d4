"""A tier around engines that work, fail, lie and hang: nobody waits for it, and nobody gets wrong bytes.

The engines that misbehave are real ones with a switch: a gate that holds their calls, or an error to raise.
"""

import asyncio
import threading
import time

import pytest

from kvcellar.errors import StartupError
from kvcellar.tiers import breaker
from kvcellar.tiers.engine import EngineError, PartlyAway
from kvcellar.tiers.memory import MemoryEngine
from kvcellar.tiers.tier import HANDS, Tier
from tests.tiers.conformance import buffer, name_of, same


class Switched(MemoryEngine):
    """The in-memory engine, with trouble at the turn of a switch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.errors: list[Exception] = []  # one each for the next calls
        self.failing_writes: Exception | None = None
        self.failing_deletes: Exception | None = None
        self.calls = 0

    def _trouble(self) -> None:
        self.calls += 1
        self.gate.wait(30)
        if self.errors:
            raise self.errors.pop()
        if self.error is not None:
            raise self.error

    def write(self, name, source):
        self._trouble()
        if self.failing_writes is not None:
            raise self.failing_writes
        super().write(name, source)

    def read(self, name, target):
        self._trouble()
        return super().read(name, target)

    def exist(self, names):
        self._trouble()
        return super().exist(names)

    def delete(self, names):
        if self.failing_deletes is not None:
            raise self.failing_deletes
        super().delete(names)


class Clock:
    """Time that the test lets pass."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


def intact(_) -> bool:
    return True


class Rig:
    def __init__(self) -> None:
        self.engine = Switched()
        self.clock = Clock()
        self.tier = Tier("test", lambda: self.engine, self.clock, overdue_s=60.0)

    async def start(self):
        await self.tier.start(5.0)
        return self

    async def down(self, error: str = "broken") -> None:
        self.engine.error = EngineError(error)
        while self.tier.state[0] != "down":
            await self.tier.exist([name_of(0)])

    async def overdue(self, stuck: int) -> None:
        """So many calls are under way, and the time they have passes."""
        while self.engine.calls < stuck:
            await asyncio.sleep(0.001)
        self.clock.ahead += 61
        while self.tier.state[0] != "down":
            await asyncio.sleep(0.05)

    def stop(self) -> None:
        self.engine.gate.set()
        self.tier.close()


PAUSE_S = 60.0  # of a breaker, so that none ends by itself


@pytest.fixture
def run(monkeypatch):
    """Run an async test with a rig of its own, within a deadline."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", PAUSE_S)
    monkeypatch.setattr(breaker, "LONGEST_PAUSE_S", PAUSE_S)
    rigs = []

    def run(test):
        async def body():
            rig = Rig()
            rigs.append(rig)
            async with asyncio.timeout(20):
                await test(await rig.start())

        asyncio.run(body())

    yield run
    for rig in rigs:
        rig.stop()


def test_what_is_written_is_found_and_read(run):
    async def test(rig):
        assert await rig.tier.write(name_of(1), buffer(5000, seed=1))
        assert await rig.tier.exist([name_of(0), name_of(1)]) == [False, True]
        read = buffer(5000)
        assert await rig.tier.read(name_of(1), read, intact)
        assert same(read, buffer(5000, seed=1))
        assert not await rig.tier.read(name_of(0), buffer(5000), intact)
        assert await rig.tier.delete([name_of(1)])
        assert await rig.tier.exist([name_of(1)]) == [False]
        assert rig.tier.state == ("up", "")
        assert rig.tier.stats.counts == {"hits": 1, "misses": 1}
        assert rig.tier.stats.reads.bytes == rig.tier.stats.writes.bytes == 5000
        assert rig.tier.stats.reads.rate > 0

    run(test)


def test_what_is_not_intact_is_a_miss_is_counted_and_removed(run):
    async def test(rig):
        await rig.tier.write(name_of(1), buffer(5000, seed=1))
        assert not await rig.tier.read(name_of(1), buffer(5000), lambda _: False)
        assert await rig.tier.exist([name_of(1)]) == [False]
        assert rig.tier.stats.counts == {"corrupt": 1}

    run(test)


def test_what_is_not_intact_and_cannot_be_removed_costs_itself_alone(run):
    async def test(rig):
        for number in range(2):
            await rig.tier.write(name_of(number), buffer(5000, seed=number))
        rig.engine.failing_deletes = EngineError("AccessDenied")
        for _ in range(4):
            assert not await rig.tier.read(name_of(1), buffer(5000), lambda _: False)
        assert rig.tier.state == ("up", "")
        assert rig.tier.stats.counts == {"corrupt": 4}
        assert await rig.tier.read(name_of(0), buffer(5000), intact)

    run(test)


def test_one_failure_is_tried_again_and_not_noticed(run):
    async def test(rig):
        await rig.tier.write(name_of(1), buffer(10, seed=1))
        rig.engine.errors = [EngineError("connection reset")]
        assert await rig.tier.exist([name_of(1)]) == [True]
        assert rig.tier.stats.counts["errors"] == 0

    run(test)


def test_an_engine_that_fails_is_left_alone_and_comes_back(run):
    async def test(rig):
        await rig.tier.write(name_of(1), buffer(10, seed=1))
        await rig.down("no route to host")
        assert rig.tier.state == ("down", "no route to host")
        calls = rig.engine.calls
        assert await rig.tier.exist([name_of(1)]) == [False]
        assert not await rig.tier.read(name_of(1), buffer(10), intact)
        assert rig.engine.calls == calls, "it was not asked"
        rig.engine.error = None
        rig.clock.ahead += PAUSE_S
        assert await rig.tier.exist([name_of(1)]) == [True]
        assert rig.tier.state == ("up", "")

    run(test)


def test_an_engine_that_works_at_the_second_try_is_back_whatever_the_first_one_said(run):
    async def test(rig):
        await rig.down()
        rig.engine.error, rig.engine.errors = None, [PartlyAway("a node")]
        rig.clock.ahead += PAUSE_S + 1
        assert await rig.tier.exist([name_of(0)]) == [False]
        assert rig.tier.state == ("up", "")

    run(test)


def test_writes_that_fail_do_not_stop_reads(run):
    async def test(rig):
        await rig.tier.write(name_of(1), buffer(10, seed=1))
        rig.engine.failing_writes = EngineError("No space left on device")
        for _ in range(5):
            assert not await rig.tier.write(name_of(2), buffer(10, seed=2))
        assert rig.tier.state == ("no writes", "No space left on device")
        assert await rig.tier.read(name_of(1), buffer(10), intact)

    run(test)


def test_an_engine_that_breaks_in_any_way_is_an_engine_that_fails(run):
    async def test(rig):
        rig.engine.error = ZeroDivisionError("oops")
        for _ in range(3):
            assert await rig.tier.exist([name_of(1)]) == [False]
        assert rig.tier.state == ("down", "ZeroDivisionError: oops")

    run(test)


def test_a_question_that_fails_or_is_never_put_does_not_count_as_an_answers_time(run):
    """Engines would take the tier for slow, and never wait for it again."""

    async def test(rig):
        await rig.tier.exist([name_of(1)])
        usual = rig.tier.stats.latency_s
        assert usual > 0
        await rig.down()
        await rig.tier.exist([name_of(1)])
        assert rig.tier.stats.counts["errors"] == 3
        assert rig.tier.stats.counts["skipped"] == 1
        assert rig.tier.stats.latency_s == usual
        rig.engine.error = None
        rig.clock.ahead += PAUSE_S
        await rig.tier.exist([name_of(1)])
        assert rig.tier.stats.latency_s != usual

    run(test)


def test_a_call_that_hangs_opens_the_breaker_and_holds_its_buffer_until_it_returns(run):
    async def test(rig):
        await rig.tier.write(name_of(1), buffer(10, seed=1))
        rig.engine.gate.clear()
        rig.engine.calls = 0
        stuck = rig.tier.read(name_of(1), buffer(10), intact)
        await rig.overdue(1)
        assert rig.tier.state[1] == "no answer within 60 s"
        assert rig.tier.stats.counts["stuck"] == 1
        assert await rig.tier.exist([name_of(1)]) == [False], "others are answered at once"
        assert not stuck.done(), "the engine still has the buffer"
        rig.engine.gate.set()
        assert await stuck
        assert rig.tier.state == ("up", "")

    run(test)


def test_with_every_thread_stuck_nobody_waits_once_it_is_known(run):
    """Nor does what queued behind them keep its buffers: no thread will ever have those."""

    async def test(rig):
        rig.engine.gate.clear()
        stuck = [rig.tier.read(name_of(n), buffer(10), intact) for n in range(HANDS)]
        queued = [rig.tier.exist([name_of(1)]) for _ in range(10)]
        queued += [rig.tier.read(name_of(1), buffer(10), intact) for _ in range(10)]
        write = rig.tier.write(name_of(2), buffer(10, seed=2))
        await rig.overdue(HANDS)
        assert not await rig.tier.read(name_of(1), buffer(10), intact)
        assert not any(map(any, await asyncio.gather(*queued[:10])))
        assert not any(await asyncio.gather(*queued[10:]))
        assert not any(one.done() for one in stuck), "the engine has their buffers"
        assert not write.done(), "writes were not seen to fail"
        rig.engine.gate.set()
        await asyncio.gather(*stuck)
        assert await write
        assert rig.engine.calls == HANDS + 1
        assert rig.tier.state == ("up", "")

    run(test)


def test_what_nobody_wants_any_more_is_not_begun(run):
    async def test(rig):
        rig.engine.gate.clear()
        stuck = [rig.tier.exist([name_of(n)]) for n in range(HANDS)]
        while rig.engine.calls < HANDS:
            await asyncio.sleep(0.001)
        give_up = rig.clock() + 1
        late = rig.tier.read(name_of(1), buffer(10), intact, lambda: give_up)
        rig.clock.ahead += 2
        rig.engine.gate.set()
        assert not await late
        await asyncio.gather(*stuck)
        assert rig.engine.calls == HANDS
        assert rig.tier.state == ("up", "")

    run(test)


def test_what_nobody_wants_any_more_does_not_wait_for_a_thread(run):
    async def test(rig):
        rig.engine.gate.clear()
        stuck = [rig.tier.exist([name_of(n)]) for n in range(HANDS)]
        while rig.engine.calls < HANDS:
            await asyncio.sleep(0.001)
        give_up = rig.clock() + 1
        late = rig.tier.read(name_of(1), buffer(10), intact, lambda: give_up)
        rig.clock.ahead += 2
        assert not await late
        assert not any(one.done() for one in stuck)
        rig.engine.gate.set()
        await asyncio.gather(*stuck)
        assert rig.engine.calls == HANDS
        assert rig.tier.state == ("up", "")

    run(test)


def test_what_somebody_with_more_time_joined_is_begun(run):
    async def test(rig):
        await rig.tier.write(name_of(1), buffer(10, seed=1))
        rig.engine.gate.clear()
        rig.engine.calls = 0
        stuck = [rig.tier.exist([name_of(n)]) for n in range(HANDS)]
        while rig.engine.calls < HANDS:
            await asyncio.sleep(0.001)
        give_up = rig.clock() + 1
        joined = rig.tier.read(name_of(1), buffer(10), intact, lambda: give_up)
        give_up += 60
        rig.clock.ahead += 2
        rig.engine.gate.set()
        assert await joined
        await asyncio.gather(*stuck)

    run(test)


def test_close_waits_for_nobody(run):
    async def test(rig):
        rig.engine.gate.clear()
        stuck = rig.tier.exist([name_of(1)])
        rig.tier.close()
        assert await rig.tier.exist([name_of(1)]) == [False]
        assert not stuck.done()

    run(test)


def test_wrong_settings_are_refused_at_the_start_and_an_absent_engine_is_not():
    async def test():
        asked = []

        def refuse():
            asked.append("once")
            raise StartupError("no such bucket; make it")

        refused = Tier("test", refuse)
        with pytest.raises(StartupError, match="make it"):
            await refused.start(5.0)
        assert asked == ["once"]
        refused.close()

        clock = Clock()
        engines: list[MemoryEngine] = []

        def absent():
            if not engines:
                raise EngineError("connection refused")
            return engines[0]

        tier = Tier("test", absent, clock)
        await tier.start(5.0)
        assert tier.state == ("down", "connection refused")
        engines.append(MemoryEngine())
        clock.ahead += 60
        assert await tier.write(name_of(1), buffer(10, seed=1))
        assert await tier.exist([name_of(1)]) == [True]
        assert tier.state == ("up", "")
        tier.close()

    asyncio.run(test())


def test_settings_that_prove_wrong_after_the_start_are_logged(caplog):
    """Before, whoever starts the tier is told."""
    slow = threading.Event()

    def open_engine() -> MemoryEngine:
        slow.wait(30)
        raise StartupError("no such bucket")

    async def start() -> None:
        tier = Tier("late", open_engine)
        await tier.start(0.01)
        for _ in range(breaker.FAILURES):
            assert await tier.exist([name_of(0)]) == [False]  # no verdict: it is still being opened
        slow.set()
        while tier.state != ("down", "no such bucket"):
            await asyncio.sleep(0.01)
        tier.close()

    asyncio.run(start())
    assert "late: no reads for a while: no such bucket" in caplog.text


def test_settings_that_are_wrong_at_the_start_are_said_once(caplog):
    def open_engine() -> MemoryEngine:
        raise StartupError("no such bucket")

    async def start() -> None:
        tier = Tier("early", open_engine)
        with pytest.raises(StartupError):
            await tier.start(30)
        tier.close()

    asyncio.run(start())
    assert "no such bucket" not in caplog.text
