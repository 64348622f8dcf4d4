"""What the connector's scheduler side stores, step by step, with the real client and server. Only vLLM's pool
of blocks is a stand-in here, which counts references; with the real one, tests/vllm has whole engines.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.alone import load
from tests.server.conftest import ServerProcess
from tests.server.engine import Engine
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

    def __init__(self, engine: Engine, blocks: int = 1000) -> None:
        self.client, self.rank = engine.scheduler, engine.workers[0]
        self.pool, self.stores = Pool(blocks), stores.Stores(1)
        self.stores.bind(self.pool)
        self._engine, self._blocks = engine, 0

    def request(self, chunks: int, seed: int) -> Any:
        """One that is about to be computed, in blocks of its own."""
        told = SimpleNamespace(
            request_id=f"request {seed}", block_hashes=keys(chunks, seed), num_preemptions=0
        )
        one = tracked.Tracked(told, 1, b"")
        numbers = range(self._blocks, self._blocks + chunks * PER_CHUNK)
        self._blocks = numbers.stop
        one.blocks = ([SimpleNamespace(block_id=number, is_null=False) for number in numbers],)
        return one

    def step(self, *computing: Any) -> list[Any]:
        """All of these prompts. When it returns, what the server has to say of it is there."""
        jobs = self.stores.collect(self.client)
        for one in computing:
            self.stores.plan(self.client, one, len(one.request.block_hashes) * CHUNK)
        self.client.flush()
        assert self.hit(1, seed=0) == 1  # answered after all that was sent before it
        return list(jobs)

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

    def make(blocks: int = 1000) -> Steps:
        one = engine()
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
