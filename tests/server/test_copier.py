"""The copier of a rank: stores that wait are copied in one go, and each is answered for by itself."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvcellar.client import Grant
from kvcellar.errors import DeadlineExceeded
from kvcellar.identity import layout_of
from kvcellar.slab import NO_PLACE
from kvcellar.transfer import HostMover, NoMover, Rows
from tests.alone import load
from tests.server.conftest import ServerProcess
from tests.server.engine import Engine, eventually, kv_of
from tests.support import keys

copier, jobs = load("copier"), load("jobs")

_BLOCKS = 128


class Mover(HostMover):
    """Does what it is told when it may, and keeps account of it."""

    def __init__(self, engine: Engine) -> None:
        layout = layout_of(engine.namespace, 0, 0)
        [layer] = layout.layers
        self.size = layout.object_bytes
        self.per_chunk = layout.blocks_per_chunk
        self.memory = np.zeros((_BLOCKS, layer.block_bytes), np.uint8)
        super().__init__(engine.namespace, 0, [[self.memory]])
        self.goes: list[int] = []  # chunks of each
        self.asked, self.may = threading.Event(), threading.Event()
        self.breaks_at = -1
        self.waits_break = False

    def wait(self, after: Any) -> None:
        if self.waits_break:
            raise OSError("broken")

    def store(self, rows: Sequence[Rows], slots: Any, after: Any) -> None:
        [one_group] = rows
        self.goes.append(len(one_group.keys))
        self.asked.set()
        assert self.may.wait(10)
        if len(self.goes) == self.breaks_at:
            raise OSError("broken")
        super().store(rows, slots, after)

    def load(self, rows: Sequence[Rows], slots: Any, after: Any) -> list[list[int]]:
        assert self.may.wait(10)
        return super().load(rows, slots, after)


class Rank:
    """A copier at work for one engine, whose requests have a chunk each."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.mover = Mover(engine)
        self.copier = copier.Copier(engine.workers[0], self.mover, None, writes=True)

    def job(self, number: int) -> Any:
        """A request's only chunk, which lies in blocks of its own."""
        mover, blocks = self.mover, self._blocks(number)
        mover.memory[blocks] = kv_of(keys(1, number)[0], 0, 0, mover.size).reshape(mover.per_chunk, -1)
        return self._job(number, self.engine.reserve(1, seed=number))

    def load(self, number: int) -> Any:
        """Of that chunk, which is stored, into the same blocks."""
        return self._job(number, self.engine.lookup(1, seed=number))

    def _job(self, number: int, grant: Grant) -> Any:
        places = {0: int(grant.places[0][0])}
        copy = jobs.group_copy(self.engine.namespace, 0, places, [self._blocks(number)], keys(1, number))
        return jobs.Job(number, f"request {number}", grant.lease, 0, 1, [copy])

    def _blocks(self, number: int) -> list[int]:
        each = self.mover.per_chunk
        return list(range(number * each, (number + 1) * each))

    def add_one_then_others(self, others: int) -> None:
        self.add_one_then([self.job(number) for number in range(1, others + 1)])

    def add_one_then(self, others: list[Any]) -> None:
        """The others come while the first is being copied."""
        self.copier.add([], [self.job(0)])
        assert self.mover.asked.wait(10)
        self.copier.add([], others)
        self.mover.may.set()

    def begin_a_load(self) -> None:
        """Which waits until it may."""
        self.mover.may.set()
        self.copier.add([], [self.job(0)])
        self.reported(1)
        self.mover.may.clear()
        self.copier.add([self.load(0)], [])

    def reported(self, jobs_over: int) -> Any:
        """All that happened up to when so many stores are over."""
        total = copier.Done()

        def is_over() -> bool:
            if (done := self.copier.take()) is not None:
                total.stores.update(done.stores)
                total.counts.update(done.counts)
            return bool(total.stores.total() == jobs_over)

        eventually(is_over)
        self.engine.flush()
        return total

    def is_stored(self, number: int) -> bool:
        hit = self.engine.lookup(1, seed=number)
        if not hit.lease:
            return False
        assert self.engine.read(hit, seed=number) == []
        self.engine.release(hit)
        return True


@pytest.fixture
def rank(server: ServerProcess, engine: Callable[..., Engine]) -> Iterator[Rank]:
    one = Rank(engine())
    yield one
    one.mover.may.set()
    one.copier.close()
    one.engine.flush()  # what it said last has been heard
    assert server.leases() == 0


def test_stores_that_wait_are_copied_in_one_go_and_all_of_them_are_there(rank: Rank) -> None:
    rank.add_one_then_others(5)
    done = rank.reported(6)
    assert rank.mover.goes == [1, 5]
    assert done.stores == dict.fromkeys(range(6), 1)
    assert done.counts["stores"] == 6
    assert done.counts["store_bytes"] == 6 * rank.mover.size
    assert all(rank.is_stored(number) for number in range(6))


def test_a_go_is_no_larger_than_some_milliseconds_of_the_bus(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "_TOGETHER_BYTES", 2 * rank.mover.size)
    rank.add_one_then_others(5)
    rank.reported(6)
    assert rank.mover.goes == [1, 2, 2, 1]
    assert all(rank.is_stored(number) for number in range(6))


def test_one_that_is_too_large_for_a_go_has_the_next_for_itself(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "_TOGETHER_BYTES", 2 * rank.mover.size)
    small, large, last = (rank.job(number) for number in (1, 2, 3))
    parts = [rank.job(number) for number in (4, 5, 6)]
    large.copies += [part.copies[0] for part in parts]
    rank.add_one_then([small, large, last])
    rank.reported(4)
    assert rank.mover.goes == [1, 1, 4, 1]
    for part in parts:  # their bytes went with the large one's
        rank.engine.workers[0].commit(part.lease, 0, 1)
    rank.engine.flush()
    assert all(rank.is_stored(number) for number in range(7))


def test_a_lease_that_is_no_good_drops_its_own_store_only(rank: Rank) -> None:
    others = [rank.job(number) for number in (1, 2, 3)]
    lease, others[1].lease = others[1].lease, 1
    rank.add_one_then(others)
    done = rank.reported(4)
    assert rank.mover.goes == [1, 2]
    assert done.counts["stores_dropped"] == 1
    assert done.counts["store_bytes"] == 3 * rank.mover.size
    rank.engine.scheduler.abort(lease, 0, 1)
    rank.engine.scheduler.flush()
    assert [rank.is_stored(number) for number in range(4)] == [True, True, False, True]


def test_a_go_that_breaks_is_aborted_whole_and_reported(rank: Rank) -> None:
    rank.mover.breaks_at = 2
    rank.add_one_then_others(3)
    done = rank.reported(4)
    assert done.stores == dict.fromkeys(range(4), 1)
    assert done.counts["stores_dropped"] == 3
    assert [rank.is_stored(number) for number in range(4)] == [True, False, False, False]


def test_a_wait_for_the_engine_that_breaks_is_answered_for_as_well(rank: Rank) -> None:
    rank.mover.waits_break = True
    rank.copier.add([], [rank.job(0), rank.job(1)])
    done = rank.reported(2)
    assert done.stores == {0: 1, 1: 1}
    assert done.counts["stores_dropped"] == 2
    rank.mover.waits_break = False
    rank.mover.may.set()
    rank.copier.add([], [rank.job(2)])
    rank.reported(1)
    assert [rank.is_stored(number) for number in range(3)] == [False, False, True]


def test_what_waits_is_stored_before_it_closes(rank: Rank) -> None:
    rank.add_one_then_others(4)
    rank.copier.close()
    rank.engine.flush()
    assert all(rank.is_stored(number) for number in range(5))
    assert rank.copier.take().stores.total() == 5


def test_a_copy_that_hangs_is_not_waited_for_without_end(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.copier.add([], [rank.job(0)])
    assert rank.mover.asked.wait(10)
    monkeypatch.setattr(copier, "_CLOSE_S", 0.1)
    with pytest.raises(DeadlineExceeded, match="still under way"):
        rank.copier.close()
    rank.mover.may.set()
    rank.reported(1)


def test_a_load_that_lacks_a_slot_fails_as_a_whole(rank: Rank) -> None:
    rank.mover.may.set()
    rank.copier.add([], [rank.job(0)])
    rank.reported(1)
    hit, per_chunk = rank.engine.lookup(1, seed=0), rank.mover.per_chunk
    rows = [list(range(first, first + per_chunk)) for first in (0, per_chunk)]
    places = {0: int(hit.places[0][0]), 1: NO_PLACE}
    copy = jobs.group_copy(rank.engine.namespace, 0, places, rows, keys(2, 0))
    rank.copier.add([jobs.Job(1, "request", hit.lease, 0, 1, [copy])], [])
    done = eventually(rank.copier.take)
    assert done.loads == done.failed == {"request"}
    assert done.bad_blocks == set(range(2 * per_chunk))


def test_nothing_is_reported_when_nothing_happened(rank: Rank) -> None:
    assert rank.copier.take() is None
    rank.mover.may.set()
    rank.copier.add([], [rank.job(0)])
    rank.reported(1)
    assert rank.copier.take() is None


def test_a_rank_that_cannot_copy_answers_for_everything(rank: Rank) -> None:
    rank.mover.may.set()
    rank.copier.add([], [rank.job(0)])
    rank.reported(1)
    rank.copier.close()
    rank.copier = copier.Copier(rank.engine.workers[0], NoMover("out of memory"), None, writes=True)
    rank.copier.add([], [rank.job(1)])
    assert rank.reported(1).counts["stores_dropped"] == 1
    assert rank.is_stored(0)
    assert not rank.is_stored(1)
    rank.copier.add([rank.load(0)], [])
    rank.copier.wait_for_a_load(10.0, 10.0, ahead=False)
    done = rank.copier.take()
    assert done.loads == done.failed == {"request 0"}
    assert done.bad_blocks == set(range(rank.mover.per_chunk))


def test_a_load_is_due_before_its_thread_has_woken_up(rank: Rank) -> None:
    rank.mover.may.set()
    rank.copier.add([], [rank.job(0)])
    rank.reported(1)
    for speed_is_known in (False, True):
        with rank.copier._changed:  # which the thread has to wait for
            rank.copier.add([rank.load(0)], [])
            assert rank.copier._forecast.is_due(3600.0) == speed_is_known
        assert eventually(rank.copier.take).loads == {"request 0"}


def test_vllm_that_schedules_ahead_waits_for_a_load_in_the_next_step(rank: Rank) -> None:
    rank.begin_a_load()
    rank.copier.wait_for_a_load(30.0, 30.0, ahead=True)  # longer than the load waits for its turn
    assert rank.copier.take() is None
    rank.mover.may.set()
    rank.copier.wait_for_a_load(30.0, 30.0, ahead=True)
    done = rank.copier.take()
    assert (done.loads, done.failed) == ({"request 0"}, set())


@pytest.mark.parametrize(("due", "waits"), [(24.5, False), (23.5, True)])
def test_an_idle_step_waits_longer_for_a_load_that_may_be_late_and_still_in_time(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, due: float, waits: bool
) -> None:
    rank.begin_a_load()
    monkeypatch.setattr(rank.copier._forecast, "is_due", lambda within: due <= within)
    if waits:
        rank.mover.may.set()
    rank.copier.wait_for_a_load(0.0, 30.0, ahead=False)
    assert (rank.copier.take() is not None) == waits
    rank.mover.may.set()


def test_a_step_that_hands_over_another_load_waits_for_the_first(rank: Rank) -> None:
    rank.begin_a_load()
    assert rank.copier.take() is None
    rank.copier.add([rank.load(0)], [])
    rank.mover.may.set()
    rank.copier.wait_for_a_load(30.0, 30.0, ahead=True)
    assert rank.copier.take().loads == {"request 0"}
