"""Storing, as the scheduler side sees it: which chunks, from which blocks, and how long those are held.

A chunk that this step will have computed is held (its blocks get a reference) and places are asked for; a
step or two later, with the places, it is a job for the workers; when all ranks have answered, the blocks are
let go. So finish, abort, preemption and sliding windows need no care: the blocks are ours as long as the copy
may run. How many are held is bounded, and so is the wait for places.
"""

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcellar.client import Grant, SchedulerClient
from kvcellar.identity import ChunkKey, Namespace, block_range
from kvcellar.slab import NO_PLACE
from kvcellar.vllm.jobs import Job, group_copy
from kvcellar.vllm.tracked import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

# Blocks that stores may hold, as a share of the pool. vLLM hears of a store that is over up to three steps
# later, or four, so what those compute must fit; the requests hold most of it anyway, as long as they run.
_HELD_SHARE = 2
# How long blocks are held for a server that does not say where to put them.
_RESERVE_S = 2.0

Blocks = dict[int, list[Any]]  # by group: block objects of vLLM's pool


class _Plan(NamedTuple):
    """Chunks about to be stored."""

    tracked: Tracked
    first: int
    keys: list[ChunkKey]
    groups: list[int]
    blocks: list[Blocks]  # by chunk
    give_up: float

    def all_blocks(self) -> list[Any]:
        return [block for chunk in self.blocks for group in self.groups for block in chunk[group]]


class _Store(NamedTuple):
    """A job that workers are at."""

    lease: int
    blocks: list[Any]
    ranks: int  # that have not answered


class Stores:
    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._pool: BlockPool | None = None
        self._plans: dict[int, _Plan] = {}
        self._stores: dict[int, _Store] = {}
        self._any_plans = False  # when it was last collected
        self._held = 0
        self._ids = itertools.count(1)

    def bind(self, pool: "BlockPool") -> None:
        self._pool = pool

    def __bool__(self) -> bool:
        """Whether blocks are held."""
        return bool(self._plans or self._stores)

    # -- asking for places ------------------------------------------------------------------------------

    def plan(self, client: SchedulerClient, tracked: Tracked, computed: int) -> None:
        """Hold, and ask places for, the chunks that will be computed when this step is over, with `computed`
        tokens in all.
        """
        if tracked.is_mixed:
            return
        namespace = client.namespace
        stop = min(computed // namespace.chunk_tokens, tracked.hashed_chunks())
        if stop <= tracked.planned:
            return
        chunks = [_blocks_of(namespace, tracked.blocks, chunk) for chunk in range(tracked.planned, stop)]
        # Runs of chunks that have blocks in the same groups: a window group has none for what has slid out.
        for groups, run in itertools.groupby(chunks, sorted):
            blocks = list(run)
            fits = self._fitting(blocks) if groups else len(blocks)
            if groups and fits:
                self._hold(client, tracked, groups, blocks[:fits])
            tracked.planned += fits
            if fits < len(blocks):
                return  # too many are held already: go on at the next step

    def _fitting(self, chunks: list[Blocks]) -> int:
        assert self._pool is not None
        sizes = list(itertools.accumulate(sum(map(len, chunk.values())) for chunk in chunks))
        share = self._pool.num_gpu_blocks // _HELD_SHARE
        room = max(share, sizes[0]) - self._held  # one chunk may always be on its way
        return sum(size <= room for size in sizes)

    def _hold(
        self, client: SchedulerClient, tracked: Tracked, groups: list[int], blocks: list[Blocks]
    ) -> None:
        assert self._pool is not None
        first = tracked.planned
        keys = tracked.keys[first : first + len(blocks)]
        plan = _Plan(tracked, first, keys, groups, blocks, time.monotonic() + _RESERVE_S)
        held = plan.all_blocks()
        self._pool.touch(held)
        self._held += len(held)
        tag = next(self._ids)
        self._plans[tag] = plan
        client.reserve(tag, keys, tracked.keys[first - 1] if first else None, groups)

    # -- giving jobs to workers -------------------------------------------------------------------------

    def collect(self, client: SchedulerClient) -> list[Job]:
        """Jobs for the plans that places have come for; of the first ones after a while, a step later. vLLM
        schedules a step before it answers the one before: what a new prompt is waiting for.
        """
        before, self._any_plans = self._any_plans, bool(self._plans)
        if self._any_plans and not before:
            return []
        jobs = [self._make_job(client, int(str(tag)), grant) for tag, grant in client.collect()]
        if self._plans:
            now = time.monotonic()
            for tag in [tag for tag, plan in self._plans.items() if plan.give_up < now]:
                self._let_go(self._plans.pop(tag).all_blocks())
        return [job for job in jobs if job is not None]

    def _make_job(self, client: SchedulerClient, tag: int, grant: Grant) -> Job | None:
        plan = self._plans.pop(tag, None)
        if plan is None:  # it came too late, and nobody was told
            if grant.lease:
                client.abort(grant.lease, 0, grant.chunks)
                client.forget(grant.lease)
            return None
        if grant.chunks < len(plan.keys):
            plan.tracked.refused(plan.first + grant.chunks)
        copies, kept = [], []
        for group, row in zip(plan.groups, grant.places, strict=False):
            places = {chunk: place for chunk, place in enumerate(row.tolist()) if place != NO_PLACE}
            blocks = [plan.blocks[chunk][group] for chunk in places]
            kept += [block for chunk in blocks for block in chunk]
            ids = [[block.block_id for block in chunk] for chunk in blocks]
            copies.append(group_copy(client.namespace, group, places, ids, plan.keys))
        keeping = set(map(id, kept))
        self._let_go([block for block in plan.all_blocks() if id(block) not in keeping])
        if not grant.lease:
            return None
        job = Job(next(self._ids), plan.tracked.request.request_id, grant.lease, 0, grant.chunks, copies)
        self._stores[job.id] = _Store(grant.lease, kept, self._world_size)
        return job

    # -- letting go -------------------------------------------------------------------------------------

    def answered(self, client: SchedulerClient | None, job_id: int, ranks: int) -> None:
        """So many more ranks are done with a job, whether it went well or not."""
        store = self._stores.pop(job_id)
        if store.ranks > ranks:
            self._stores[job_id] = store._replace(ranks=store.ranks - ranks)
            return
        self._let_go(store.blocks)
        if client is not None:
            client.forget(store.lease)

    def drop_plans(self) -> None:
        for tag in list(self._plans):
            self._let_go(self._plans.pop(tag).all_blocks())

    def _let_go(self, blocks: list[Any]) -> None:
        if blocks:
            assert self._pool is not None
            self._held -= len(blocks)
            # In reverse, as vLLM frees a request: later blocks are evicted first.
            self._pool.free_blocks(reversed(blocks))


def _blocks_of(namespace: Namespace, mine: Sequence[Sequence[Any]], chunk: int) -> Blocks:
    """The blocks of one chunk, in the groups that have all of them."""
    start, stop = chunk * namespace.chunk_tokens, (chunk + 1) * namespace.chunk_tokens
    found = {}
    for group, (spec, all_blocks) in enumerate(zip(namespace.groups, mine, strict=False)):
        span = block_range(start, stop, spec.block_tokens)
        blocks = list(all_blocks[span.start : span.stop])
        if len(blocks) == len(span) and not any(block.is_null for block in blocks):
            found[group] = blocks
    return found
