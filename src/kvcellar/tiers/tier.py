"""A tier: one storage engine, and everything that keeps its troubles from being anybody else's.

Used from the event loop. Every question is put to a few threads and answered by a future, which never raises:
a tier that fails, hangs or lies is a tier that has nothing. A future is done only when the engine has let go
of the buffer, or will never have it, so a slot is never given away under a call that is still running.
Whoever cannot wait so long waits with a time-out of his own and leaves the future to whoever owns the slot.

Owns threads, retries, the circuit breakers (reading and writing fail apart: a full disk can still be read),
the check of what was read, and the counts. Knows nothing of chunks, leases or other tiers.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from kvcellar.errors import EngineError, StartupError
from kvcellar.tiers.breaker import Breaker
from kvcellar.tiers.crew import Crew
from kvcellar.tiers.engine import Buffer, Engine, PartlyAway, Usage
from kvcellar.tiers.meter import Meter

log = logging.getLogger(__name__)

# Enough to reach what the disks and servers we measured can do (2 to 4 threads), with two to spare when two
# hang.
HANDS = 6
# Calls that wait for a thread, at most. Callers bound themselves far below; this is for those who do not.
_MAX_BACKLOG = 4096
_ATTEMPTS = 2
# A call that takes longer is a failure at once, and the thread is counted as stuck until it returns.
OVERDUE_S = 5.0
_WATCH_S = 0.5
_CLOSE_S = 1.0

T = TypeVar("T")
# Clock time after which nobody wants the answer. Asked for by the thread that could begin: others may have
# joined by then who have more time.
GiveUp = Callable[[], float]


class Stats:
    """What a tier has done since the server started."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter()  # hits, misses, corrupt, errors, skipped, stuck
        self.reads = Meter(clock)
        self.writes = Meter(clock)
        self.latency_s = 0.0  # of asking what exists, lately

    def asked(self, took: float) -> None:
        self.latency_s = took if not self.latency_s else 0.8 * self.latency_s + 0.2 * took


class _TooEarly(EngineError):
    """Somebody is opening the engine: he will see how that goes."""


class _Call(Generic[T]):
    """One question on its way through a thread."""

    def __init__(
        self, breaker: Breaker, work: Callable[[Engine], T], failed: T, give_up: GiveUp | None
    ) -> None:
        self.breaker = breaker
        self.work = work
        self.result = failed
        self.give_up = give_up
        self.error: str | None = None
        self.is_excused = False  # it failed for the sake of this name alone, or came too early
        self.by_heart = False  # it works also where nothing else does
        self.is_trial = not breaker.is_closed  # whether an open breaker may close again
        self.made = False
        self.started = 0.0
        self.overdue = False
        self.told: Callable[[], None] | None = None  # when it is overdue
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    @property
    def says_nothing(self) -> bool:
        """Of whether the engine works."""
        return not self.made or (self.by_heart if self.error is None else self.is_excused)


class Tier:
    def __init__(
        self,
        label: str,
        open_engine: Callable[[], Engine],
        clock: Callable[[], float] = time.monotonic,
        overdue_s: float = OVERDUE_S,
    ) -> None:
        self.label = label  # for people: no credentials
        self.stats = Stats(clock)
        self._clock = clock
        self._overdue_s = overdue_s
        self._open_engine = open_engine
        self._engine: Engine | None = None
        self._opening = threading.Lock()
        self._refusal: StartupError | None = None  # what is wrong with the settings, if that is why
        self._readable = Breaker(clock)
        self._writable = Breaker(clock)
        self._crew = Crew(f"kvcellar-{label}"[:40], HANDS)
        self._unfinished: dict[_Call[Any], Callable[[], None]] = {}  # and what a thread has to do for each
        self._running: dict[_Call[Any], None] = {}
        self._watch: asyncio.TimerHandle | None = None
        self._starting = True
        self._closed = False

    async def start(self, patience: float) -> None:
        """Open the engine. Raises StartupError if its settings are wrong; an engine that is away may come
        later.
        """
        opened = self._ask(_Call(self._readable, lambda _: True, failed=False, give_up=None), urgent=True)
        await asyncio.wait([opened], timeout=patience)
        self._starting = False
        if self._refusal is not None:
            raise self._refusal

    # -- asking -----------------------------------------------------------------------------------------

    @property
    def can_read(self) -> bool:
        return not self._closed and self._readable.may_pass

    @property
    def can_write(self) -> bool:
        return not self._closed and self._writable.may_pass

    @property
    def expected_rate(self) -> float:
        """Bytes per second that reading will reach: as measured, else as writing did; 0 if nobody knows."""
        reads, writes = self.stats.reads, self.stats.writes
        if reads.is_sure and reads.fresh_rate:
            return reads.fresh_rate
        return max(reads.fresh_rate, writes.fresh_rate)

    @property
    def expected_lead_s(self) -> float:
        """What asking takes, and one object: no hit comes sooner, however many threads there are."""
        return self.stats.latency_s + (self.stats.reads.call_s or self.stats.writes.call_s)

    def exist(self, names: Sequence[str], give_up: GiveUp | None = None) -> asyncio.Future[list[bool]]:
        """Which of them are there. All False when in doubt."""
        nothing = [False] * len(names)
        asked_at = self._clock()

        call = _Call(self._readable, lambda engine: engine.exist(names), nothing, give_up)
        call.by_heart = getattr(self._engine, "knows_by_heart", False)

        def answered(_future: object) -> None:
            if call.made and call.error is None:  # how long it takes to fail says nothing of answers
                self.stats.asked(self._clock() - asked_at)

        future = self._ask(call, urgent=True)
        future.add_done_callback(answered)
        return future

    def read(
        self,
        name: str,
        target: Buffer,
        is_intact: Callable[[Buffer], bool],
        give_up: GiveUp | None = None,
        overdue: Callable[[], None] | None = None,
    ) -> asyncio.Future[bool]:
        """Fill the target. False: not there, or not intact, and then the target holds rubbish. `is_intact` is
        called in a thread; `overdue` on the loop, if the engine does not return in time: it may yet write to
        the target.
        """
        found = ""  # counted on the loop: += of several threads loses some

        def work(engine: Engine) -> bool:
            nonlocal found
            if not engine.read(name, target):
                found = "misses"
                return False
            found = "hits" if is_intact(target) else "corrupt"
            if found == "corrupt":
                log.warning("%s: %s is not what was written; removed", self.label, name)
                try:
                    engine.delete([name])
                except EngineError as error:  # of this object; the others can be read as before
                    log.warning("%s: %s could not be removed: %s", self.label, name, error)
            return found == "hits"

        def answered(future: asyncio.Future[bool]) -> None:
            self.stats.reads.end(began, target.size if _is_good(future) else 0)
            if found:
                self.stats.counts[found] += 1

        began = self.stats.reads.begin()
        call = _Call(self._readable, work, failed=False, give_up=give_up)
        call.told = overdue
        future = self._ask(call, urgent=True)
        future.add_done_callback(answered)
        return future

    def write(self, name: str, source: Buffer) -> asyncio.Future[bool]:
        """Was it written? The source must not change until the future is done."""

        def work(engine: Engine) -> bool:
            engine.write(name, source)
            return True

        def answered(future: asyncio.Future[bool]) -> None:
            self.stats.writes.end(began, source.size if _is_good(future) else 0)

        began = self.stats.writes.begin()
        future = self._ask(_Call(self._writable, work, failed=False, give_up=None), urgent=False)
        future.add_done_callback(answered)
        return future

    def delete(self, names: Sequence[str]) -> asyncio.Future[bool]:
        def work(engine: Engine) -> bool:
            engine.delete(names)
            return True

        return self._ask(_Call(self._writable, work, failed=False, give_up=None), urgent=False)

    def forget(self, memory: memoryview) -> None:
        """No buffer of this memory will come any more. It stays mapped until the engine has let go of it."""
        let_go = getattr(self._engine, "forget", None)
        if let_go is not None and not self._closed:
            self._crew.submit(lambda: let_go(memory), urgent=False)

    # -- for people -------------------------------------------------------------------------------------

    @property
    def state(self) -> tuple[str, str]:
        """(up, scanning, no writes or down; why)"""
        if not self._readable.is_closed:
            return "down", self._readable.reason
        if self._engine is None:
            return "down", "not opened yet"
        if not self._writable.is_closed:
            return "no writes", self._writable.reason
        usage = self.usage
        return ("scanning" if usage.scanning else "up"), usage.trouble

    @property
    def usage(self) -> Usage:
        tell = getattr(self._engine, "usage", None)
        return tell() if tell is not None else Usage(0, 0, 0)

    @property
    def is_idle(self) -> bool:
        """No thread has a buffer in its hands, or will have."""
        return not self._unfinished and not self._crew.backlog

    def close(self) -> None:
        """No more questions. Waits a moment for the engine to close; what hangs goes with the process."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        engine, closed = self._engine, threading.Event()

        def work(engine: Engine) -> None:
            with contextlib.suppress(Exception):  # engines of others may break in any way
                engine.close()
            closed.set()

        if engine is not None and self.is_idle:
            self._crew.submit(lambda: work(engine), urgent=True)
            closed.wait(_CLOSE_S)
        self._crew.close()

    # -- inside -----------------------------------------------------------------------------------------

    def _ask(self, call: _Call[T], *, urgent: bool) -> asyncio.Future[T]:
        if self._closed or self._crew.backlog >= _MAX_BACKLOG or not call.breaker.enter():
            self.stats.counts["skipped"] += 1
            call.future.set_result(call.result)
            return call.future
        loop = asyncio.get_running_loop()
        work = self._unfinished[call] = partial(self._run, call, loop)
        self._crew.submit(work, urgent=urgent)
        if self._watch is None:
            self._watch = loop.call_later(_WATCH_S, self._look_after)
        return call.future

    def _run(self, call: _Call[T], loop: asyncio.AbstractEventLoop) -> None:
        """In a thread."""
        call.started = self._clock()
        call.made = self._is_worth_a_try(call)
        if call.made:
            self._running[call] = None
            self._make(call)
            self._running.pop(call, None)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            loop.call_soon_threadsafe(self._finish, call)

    def _is_worth_a_try(self, call: _Call[Any]) -> bool:
        """Not what nobody wants any more, nor what waited behind calls that hang until the breaker opened."""
        in_time = call.give_up is None or self._clock() < call.give_up()
        return in_time and (call.is_trial or call.breaker.is_closed)

    def _make(self, call: _Call[T]) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                call.result = call.work(self._get_engine())
            except EngineError as error:
                call.error, call.is_excused = str(error), isinstance(error, (PartlyAway, _TooEarly))
            except StartupError as error:  # that will be no better a moment later
                call.error, call.is_excused = str(error), False
                return
            except Exception as error:  # engines of others may break in any way
                call.error, call.is_excused = f"{type(error).__name__}: {error}", False
                log.exception("%s: the engine broke", self.label)
                return
            else:
                call.error = None
                return
            # Once more, for a connection that was closed under us; not if it took its time to fail.
            if attempt == 0 and self._clock() - call.started > 1.0:
                return

    def _get_engine(self) -> Engine:
        if self._engine is not None:
            return self._engine
        if not self._opening.acquire(blocking=False):
            raise _TooEarly("still being opened")  # perhaps by a call that hangs
        try:
            if self._engine is None:
                self._engine = self._open_engine()
                self._refusal = None
            return self._engine
        except StartupError as error:
            self._refusal = error
            raise
        finally:
            self._opening.release()

    def _finish(self, call: _Call[T]) -> None:
        """When a thread is done with it, or none will begin."""
        del self._unfinished[call]
        if not call.made:
            self.stats.counts["skipped"] += 1
        if call.error is not None:
            self.stats.counts["errors"] += 1
        if call.says_nothing:
            if call.is_trial:
                call.breaker.no_verdict()
        elif call.error is None:
            if not call.breaker.is_closed:
                log.warning("%s is back", self.label)
            call.breaker.success()
        else:
            self._fail(call.breaker, call.error, at_once=self._engine is None)
        if not call.future.done():
            call.future.set_result(call.result)

    def _fail(self, breaker: Breaker, reason: str, *, at_once: bool) -> None:
        was_closed = breaker.is_closed
        breaker.failure(reason, at_once=at_once)
        if was_closed and not breaker.is_closed and not (self._starting and self._refusal):  # it raises that
            what = "reads" if breaker is self._readable else "writes"
            log.warning("%s: no %s for a while: %s", self.label, what, reason)

    def _look_after(self) -> None:
        """Notice calls that do not return. Those behind them shall not wait for a thread, and hold their
        slots, as long as that.
        """
        now = self._clock()
        running = list(self._running)
        for call in running:
            if not call.overdue and now - call.started > self._overdue_s:
                call.overdue = True
                self.stats.counts["stuck"] += 1
                self._fail(call.breaker, f"no answer within {self._overdue_s:g} s", at_once=True)
                if call.told is not None:
                    call.told()
        for call, work in list(self._unfinished.items()):
            # A thread may be taking it just now: then it is that thread's, and with it the buffer.
            if not self._is_worth_a_try(call) and self._crew.withdraw(work):
                self._finish(call)
        busy = bool(self._unfinished)
        self._watch = asyncio.get_running_loop().call_later(_WATCH_S, self._look_after) if busy else None


def _is_good(future: asyncio.Future[bool]) -> bool:
    return not future.cancelled() and future.result()
