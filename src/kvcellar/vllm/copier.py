"""The threads of the connector's worker side that copy: one for loads, one for stores.

A load that fails in any way, a checksum that does not match among them, is reported as failed, and vLLM
computes those tokens itself; a store that fails is aborted. Every job is reported exactly once, also by ranks
that have nothing to copy.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvcellar.client import Slots, WorkerClient
from kvcellar.errors import CellarError, DeadlineExceeded
from kvcellar.identity import SKIP, CopyPlan
from kvcellar.transfer import Mover, Rows
from kvcellar.vllm.forecast import Forecast
from kvcellar.vllm.jobs import GroupCopy, Job

log = logging.getLogger(__name__)

# What a load or store may wait for its memory to be mapped, from when it was asked for: however many wait,
# they wait no longer than one.
_MAP_S = 2.0
# What is under way, and waits, when it is closed may take so long: a long prompt takes a quarter of a second.
_CLOSE_S = 60.0
# Loads are mostly a bit later than the fastest of the last ones says. So an idle step waits the longer time
# for one that should be over within this part of it, and the rest is for being late.
_DUE = 0.8
# Small stores that wait are copied in one go, up to some milliseconds of the bus: requests that decode beside
# each other may fill their chunks in the same step, and each go takes the GIL from the engine.
_TOGETHER_BYTES = 256 << 20


class _Task(NamedTuple):
    job: Job
    after: Any  # the fence
    give_up: float


@dataclass
class Done:
    """What happened since it was last asked."""

    loads: set[str] = field(default_factory=set)  # requests whose load is over, well or not
    failed: set[str] = field(default_factory=set)  # those where it was not
    bad_blocks: set[int] = field(default_factory=set)  # of theirs
    stores: Counter[int] = field(default_factory=Counter)  # jobs
    counts: Counter[str] = field(default_factory=Counter)  # see metrics.py

    def count(self, what: str, times: int, moved: int, seconds: float) -> None:
        self.counts.update({f"{what}s": times, f"{what}_bytes": moved, f"{what}_seconds": seconds})


class Copier:
    def __init__(self, client: WorkerClient, mover: Mover, done: Done | None, *, writes: bool) -> None:
        """`done`: what an earlier one has not reported."""
        self._client = client
        self._mover = mover
        self._writes = writes
        self._done = done  # None: nothing happened, which is so in most steps
        self._loading = self._storing = 0
        self._forecast = Forecast(time.monotonic)
        self._changed = threading.Condition()  # guards the four above
        self._just_begun = False  # this step has handed over loads, and none was under way before
        self._loads: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._next: _Task | None = None  # the store that was too large for the last go
        self._threads = [
            threading.Thread(target=self._run_loads, name="kvcellar-loads", daemon=True),
            threading.Thread(target=self._run_stores, name="kvcellar-stores", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def add(self, loads: list[Job], stores: list[Job]) -> None:
        """To be called on the engine's thread: copies start after what it has launched so far."""
        if not loads and not stores:
            return
        after, give_up = self._mover.fence(), time.monotonic() + _MAP_S
        with self._changed:
            if loads and not self._loading:  # the engine may wait for it before the thread has woken up
                self._forecast.begin(self._bytes_of(loads[0]))
                self._just_begun = True
            self._loading += len(loads)
            self._storing += len(stores)
        for job in loads:
            self._loads.put(_Task(job, after, give_up))
        for job in stores:
            self._stores.put(_Task(job, after, give_up))

    def wait_for_a_load(self, seconds: float, soon: float, *, ahead: bool) -> None:
        """Until there is one to report, or none under way. The longer time is for one that should be over by
        then. Where vLLM schedules ahead, the step that hands over the first load does not wait: it is handled
        after the next one, and vLLM sleeps in between, however long it took.
        """
        if ahead and self._just_begun:
            return
        with self._changed:
            patience = soon if self._forecast.is_due(_DUE * soon) else seconds
            self._changed.wait_for(lambda: (self._done and self._done.loads) or not self._loading, patience)

    def take(self) -> Done | None:
        """At the end of each step."""
        self._just_begun = False
        if self._done is None:
            return None  # no need for the lock: what comes now is there at the next step
        with self._changed:
            done, self._done = self._done, None
        return done

    def take_stores(self, seconds: float) -> Counter[int]:
        """Where no step may come for long: the stores that are over, as soon as none is under way, or when
        this time is. No step tells of them any more; of all else one will.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._storing, seconds)
            done = self._done or Done()
            stores, done.stores = done.stores, Counter()
        return stores

    def _news(self) -> Done:
        """To be added to, under the lock."""
        if self._done is None:
            self._done = Done()
        return self._done

    def close(self) -> None:
        """Finish what was started, then leave."""
        self._loads.put(None)
        self._stores.put(None)
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise DeadlineExceeded(f"copies are still under way after {_CLOSE_S:.0f} s; does the GPU hang?")

    # -- loads ------------------------------------------------------------------------------------------

    def _run_loads(self) -> None:
        while (task := self._loads.get()) is not None:
            job, started, size = task.job, time.monotonic(), self._bytes_of(task.job)
            with self._changed:
                self._forecast.begin(size)
            bad = self._load(task)
            moved = 0 if bad else size
            with self._changed:
                self._loading -= 1
                self._forecast.end(moved)
                self._changed.notify_all()
                done = self._news()
                done.loads.add(job.request_id)
                if bad:
                    done.failed.add(job.request_id)
                    done.bad_blocks |= bad
                done.count("load", 1, moved, time.monotonic() - started)
                done.counts["loads_failed"] += bool(bad)
            self._client.release(job.lease, job.first, job.stop)  # last: the engine waits for the rest
            del task  # and its fence now, not when the next load is waited for: that lets go of the GIL

    def _load(self, task: _Task) -> set[int]:
        """Returns the blocks that hold garbage."""
        job, bad = task.job, set[int]()
        try:
            with self._copying(task) as slots:
                failed = self._mover.load([_rows(copy) for copy in job.copies], slots, task.after)
            for copy, rows in zip(job.copies, failed, strict=True):
                for row in rows:
                    self._client.condemn(job.lease, copy.group, copy.chunks[row])
                    bad |= _blocks(copy, row)
            if bad:
                log.warning("KVCellar: bytes do not match their checksum, computing instead")
        except CellarError as error:
            log.warning("KVCellar: a load failed, computing instead: %s", error)
            bad = _all_blocks(job)
        except Exception:  # whatever went wrong, vLLM must hear of it and compute
            log.exception("KVCellar: a load broke, computing instead")
            bad = _all_blocks(job)
        return bad

    # -- stores -----------------------------------------------------------------------------------------

    def _run_stores(self) -> None:
        while tasks := self._next_stores():
            started = time.monotonic()
            good = self._store(tasks)
            moved = sum(self._bytes_of(task.job) for task in good)
            with self._changed:
                self._storing -= len(tasks)
                self._changed.notify_all()
                done = self._news()
                done.stores.update(task.job.id for task in tasks)
                if self._writes:
                    done.count("store", len(tasks), moved, time.monotonic() - started)
                    done.counts["stores_dropped"] += len(tasks) - len(good)

    def _next_stores(self) -> list[_Task]:
        """Those to be copied in one go; none at the end."""
        tasks: list[_Task] = []
        size = 0
        while not (tasks and self._stores.empty()):
            task, self._next = self._next or self._stores.get(), None
            if task is None:
                self._stores.put(None)  # it ends after those
                break
            size += self._bytes_of(task.job)
            if tasks and size > _TOGETHER_BYTES:
                self._next = task
                break
            tasks.append(task)
        return tasks

    def _store(self, tasks: list[_Task]) -> list[_Task]:
        """Those that are stored, as far as this rank goes. If copying breaks, none is: a store less is a miss
        later on.
        """
        if not self._writes:
            return tasks
        begun, good = list(tasks), list[_Task]()
        with self._or_dropped(begun):
            # First of all: what this thread does, the engine's thread cannot do, and somebody waits for that.
            self._mover.wait(tasks[-1].after)
        with ExitStack() as leases:
            slots: Slots | None = None
            for task in begun:
                with self._or_dropped([task]):
                    slots = leases.enter_context(self._copying(task))
                    good.append(task)
            with self._or_dropped(good):
                if slots is not None:
                    rows = _joined([copy for task in good for copy in task.job.copies])
                    # What the engine had launched before the last is all that it had launched before any.
                    self._mover.store(rows, slots, good[-1].after)
        for job in (task.job for task in good):
            self._client.commit(job.lease, job.first, job.stop)
        return good

    @contextmanager
    def _or_dropped(self, tasks: list[_Task]) -> Iterator[None]:
        """If it breaks, they are aborted, and gone from the list."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            log.warning("KVCellar: stores were dropped, %d: %s", len(tasks), error)
            for job in (task.job for task in tasks):
                self._client.abort(job.lease, job.first, job.stop)
            tasks.clear()

    def _copying(self, task: _Task) -> AbstractContextManager[Slots]:
        self._client.wait_attached(max(0.0, task.give_up - time.monotonic()))
        return self._client.copying(task.job.lease, max(0.0, task.give_up - time.monotonic()))

    def _bytes_of(self, job: Job) -> int:
        return sum(len(copy.keys) * self._mover.object_bytes(copy.group) for copy in job.copies)


def _rows(copy: GroupCopy) -> Rows:
    return Rows(CopyPlan(copy.group, copy.places, copy.blocks), copy.keys)


def _joined(copies: list[GroupCopy]) -> list[Rows]:
    """One for each group: small stores then fill staging buffers together."""
    rows = []
    for group in sorted({copy.group for copy in copies}):
        its = [copy for copy in copies if copy.group == group]
        places, blocks = (
            np.concatenate([one.places for one in its]),
            np.concatenate([one.blocks for one in its]),
        )
        rows.append(Rows(CopyPlan(group, places, blocks), [key for one in its for key in one.keys]))
    return rows


def _blocks(copy: GroupCopy, row: int) -> set[int]:
    return set(copy.blocks[row].tolist()) - {SKIP}


def _all_blocks(job: Job) -> set[int]:
    return {block for copy in job.copies for row in range(len(copy.keys)) for block in _blocks(copy, row)}
