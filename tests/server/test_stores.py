"""What the connector's scheduler side stores, step by step, with the real client and server. Only vLLM's pool
of blocks is a stand-in here, which counts references; with the real one, tests/vllm has whole engines.
"""

import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.alone import load
from tests.server.conftest import ServerProcess
from tests.server.engine import Engine, eventually
from tests.support import keys

stores, tracked = load("stores"), load("tracked")

CHUNK, PER_CHUNK = 256, 16  # tokens, blocks


class Pool:
    """Who holds which block is all that matters."""

    def __init__(self, num_gpu_blocks: int) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.references: Counter[int] = Counter()

    def touch(self, blocks: Sequence[Any]) -> None:
        self.references.update(block.block_id for block in blocks)

    def free_blocks(self, blocks: Iterator[Any]) -> None:
        self.references.subtract(block.block_id for block in blocks)
        assert min(self.references.values()) >= 0

    @property
    def held(self) -> int:
        return self.references.total()


class Steps:
    """An engine of one rank, of which only the steps are here."""

    def __init__(self, engine: Engine, blocks: int) -> None:
        self.client, self.rank = engine.scheduler, engine.workers[0]
        self.pool, self.stores = Pool(blocks), stores.Stores(1)
        self.stores.bind(self.pool)
        self._engine, self._blocks = engine, 0

    def request(self, chunks: int, seed: int, decoded: int = 0) -> Any:
        """One that is about to be computed, in blocks of its own. `decoded`: so many of the chunks are not of
        its prompt.
        """
        told = SimpleNamespace(
            request_id=f"request {seed}",
            block_hashes=keys(chunks, seed),
            num_preemptions=0,
            num_prompt_tokens=(chunks - decoded) * CHUNK,
        )
        one = tracked.Tracked(told, 1, b"")
        one.blocks = [self._new_blocks(chunks) for _ in self.client.namespace.groups]
        return one

    def _new_blocks(self, chunks: int) -> list[Any]:
        numbers = range(self._blocks, self._blocks + chunks * PER_CHUNK)
        self._blocks = numbers.stop
        return [SimpleNamespace(block_id=number, is_null=False) for number in numbers]

    def step(self, *computing: Any, chunks: int | None = None) -> list[Any]:
        """All of these prompts, or so many chunks of them. When it returns, what the server has to say of it
        is there.
        """
        jobs = self.stores.collect(self.client)
        for one in computing:
            count = len(one.request.block_hashes) if chunks is None else chunks
            self.stores.plan(self.client, one, count * CHUNK)
        self.client.flush()
        assert self.hit(1, seed=0) == 1  # answered after all that was sent before it
        return list(jobs)

    def ready(self) -> None:
        """There is a server again, and it knows all of us."""
        eventually(lambda: self.hit(1, seed=0) == 1)
        self._engine.ready()

    def hit(self, chunks: int, seed: int) -> int:
        return self._engine.hit(chunks, seed)

    def copy(self, jobs: list[Any]) -> None:
        """A rank's answer, in the next step; what is copied does not matter here."""
        for job in jobs:
            self.rank.commit(job.lease, job.first, job.stop)
            self.stores.answered(self.client, job.id, 1)
        self._engine.flush()


@pytest.fixture
def steps(server: ServerProcess, engine: Callable[..., Engine]) -> Iterator[Callable[..., Steps]]:
    made: list[Steps] = []

    def make(blocks: int = 1000, name: str = "one") -> Steps:
        one = engine(name)
        one.store(1)  # so that there is memory
        made.append(Steps(one, blocks))
        return made[-1]

    yield make
    for one in made:
        assert one.pool.held == 0
        assert not one.stores
    assert server.leases() == 0


def test_the_first_store_after_a_while_is_a_job_in_the_step_after_the_next(
    steps: Callable[..., Steps],
) -> None:
    """Where vLLM schedules ahead, the next step is scheduled before the prompt is answered."""
    engine = steps()
    prompt = engine.request(3, seed=1)
    assert engine.step(prompt) == []
    assert engine.pool.held == 3 * PER_CHUNK
    assert engine.step() == []
    jobs = engine.step()
    assert [(job.request_id, job.stop) for job in jobs] == [("request 1", 3)]
    engine.copy(jobs)
    assert engine.step() == []
    assert engine.hit(3, seed=1) == 3


def test_stores_that_come_in_every_step_follow_by_a_step(steps: Callable[..., Steps]) -> None:
    engine = steps()
    jobs = [engine.step(engine.request(1, seed=number)) for number in range(1, 6)]
    assert [[job.request_id for job in its] for its in jobs] == [
        [],
        [],
        ["request 1", "request 2"],
        ["request 3"],
        ["request 4"],
    ]
    last = engine.step()
    for its in [*jobs, last]:
        engine.copy(its)


def test_storing_goes_on_from_the_end_of_the_caches_hit(steps: Callable[..., Steps]) -> None:
    """However much the engine had: it may still have what the cache has lost."""
    engine = steps()
    engine.step(engine.request(1, seed=1))
    engine.step()
    engine.copy(engine.step())
    prompt = engine.request(4, seed=1)
    prompt.plan_from(engine.hit(4, seed=1))
    engine.step(prompt)
    assert engine.pool.held == 3 * PER_CHUNK
    engine.step()
    engine.copy(engine.step())
    assert engine.hit(4, seed=1) == 4


def test_no_more_than_half_of_the_blocks_are_held_and_the_rest_follows(steps: Callable[..., Steps]) -> None:
    engine = steps(blocks=6 * PER_CHUNK)
    prompt = engine.request(5, seed=1)
    engine.step(prompt)
    assert engine.pool.held == 3 * PER_CHUNK
    engine.step(prompt)
    assert engine.pool.held == 3 * PER_CHUNK
    engine.copy(engine.step())
    assert engine.pool.held == 0
    engine.step(prompt)
    assert engine.pool.held == 2 * PER_CHUNK
    engine.step()
    engine.copy(engine.step())


def test_one_chunk_is_held_even_where_it_is_more_than_half(steps: Callable[..., Steps]) -> None:
    engine = steps(blocks=PER_CHUNK)
    engine.step(engine.request(2, seed=1))
    assert engine.pool.held == PER_CHUNK
    engine.step()
    engine.copy(engine.step())


def test_places_for_what_was_dropped_meanwhile_are_given_back(steps: Callable[..., Steps]) -> None:
    engine = steps()
    engine.step(engine.request(2, seed=1))
    engine.stores.drop_plans()
    assert engine.pool.held == 0
    assert engine.step() == []
    engine.step()  # with which they are given back


def test_what_is_decoded_is_stored_four_chunks_at_a_time_and_the_rest_at_the_end(
    steps: Callable[..., Steps],
) -> None:
    engine = steps()
    request = engine.request(8, seed=1, decoded=7)
    jobs = []
    for chunks in range(1, 8):
        jobs.append(engine.step(request, chunks=chunks))
        engine.copy(jobs[-1])
    assert [[job.stop for job in its] for its in jobs] == [[], [], [1], [], [], [], [4]]
    assert engine.hit(8, seed=1) == 5
    engine.stores.plan_rest(engine.client, request)
    assert engine.pool.held == 2 * PER_CHUNK
    for _ in range(3):
        engine.copy(engine.step())
    assert engine.hit(8, seed=1) == 7  # the eighth was never computed


@pytest.mark.parametrize("why", ["preempted", "mixed"])
def test_the_rest_of_a_request_whose_blocks_may_hold_something_else_is_not_stored(
    steps: Callable[..., Steps], why: str
) -> None:
    engine = steps()
    request = engine.request(3, seed=1, decoded=3)
    engine.step(request)
    if why == "preempted":
        request.request.num_preemptions += 1
    else:
        request.mixed_at = 0
    engine.stores.plan_rest(engine.client, request)
    assert not engine.stores


def test_what_is_decoded_does_not_wait_until_it_has_slid_out_of_a_window(
    steps: Callable[..., Steps],
) -> None:
    engine = steps(name="hybrid")  # a window of two chunks
    request = engine.request(3, seed=1, decoded=3)
    for chunks in (1, 2, 3, 3, 3):
        engine.copy(engine.step(request, chunks=chunks))
    assert engine.hit(3, seed=1) == 3


@pytest.mark.parametrize(("short", "chunks"), [(0, 3), (1, 2), (PER_CHUNK, 2), (3 * PER_CHUNK, 0)])
def test_a_chunk_is_stored_when_every_group_has_its_blocks(
    steps: Callable[..., Steps], short: int, chunks: int
) -> None:
    engine = steps(name="hybrid")
    request = engine.request(3, seed=1)
    del request.blocks[1][3 * PER_CHUNK - short :]
    engine.step(request)
    assert engine.pool.held == 2 * chunks * PER_CHUNK
    engine.step()
    engine.copy(engine.step())
    assert engine.hit(3, seed=1) == chunks


def test_of_blocks_that_have_slid_out_only_the_other_groups_are_stored(steps: Callable[..., Steps]) -> None:
    engine = steps(name="hybrid")
    request = engine.request(3, seed=1)
    for block in request.blocks[1][: PER_CHUNK + 1]:  # all of the first chunk, and one of the second
        block.is_null = True
    engine.step(request)
    assert engine.pool.held == (3 + 1) * PER_CHUNK
    engine.step()
    engine.copy(engine.step())
    assert engine.hit(2, seed=1) == 0


def test_what_a_lost_connection_left_unanswered_is_asked_again_however_often(
    steps: Callable[..., Steps], server: ServerProcess
) -> None:
    engine = steps()
    prompt = engine.request(3, seed=1)
    for _ in range(tracked._TRIES + 1):
        server.signal(signal.SIGSTOP)
        engine.stores.plan(engine.client, prompt, 3 * CHUNK)
        engine.client.flush()
        assert engine.pool.held == 3 * PER_CHUNK
        server.restart()
        engine.ready()
        assert engine.stores.collect(engine.client) == []
        assert engine.stores.collect(engine.client) == []
        assert engine.pool.held == 0
    engine.step(prompt)
    engine.step()
    [job] = engine.step()
    engine.copy([job])
    assert engine.hit(3, seed=1) == 3


def test_without_a_server_nothing_is_held(steps: Callable[..., Steps], server: ServerProcess) -> None:
    engine = steps()
    prompt = engine.request(3, seed=1)
    server.kill()
    assert engine.hit(1, seed=0) == 0  # by now it knows
    eventually(lambda: not engine.client.is_connected)
    for _ in range(tracked._TRIES + 1):
        engine.stores.plan(engine.client, prompt, 3 * CHUNK)
        assert engine.pool.held == 0
        engine.client.flush()
        assert engine.stores.collect(engine.client) == []
    server.start()
    engine.ready()
    engine.step(prompt)
    engine.step()
    [job] = engine.step()
    engine.copy([job])
    assert engine.hit(3, seed=1) == 3
