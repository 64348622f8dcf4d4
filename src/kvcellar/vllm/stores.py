"""Storing, as the scheduler side sees it: which chunks, from which blocks, and how long those are held.

A chunk that this step will have computed is held (its blocks get a reference) and places are asked for; a
step or two later, with the places, it is a job for the workers; when all ranks have answered, the blocks are
let go. So finish, abort, preemption and sliding windows need no care: the blocks are ours as long as the copy
may run. How many are held is bounded, and so is the wait for places.
"""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcellar.client import Grant, SchedulerClient
from kvcellar.errors import Disconnected
from kvcellar.identity import ChunkKey, Namespace, block_range
from kvcellar.slab import NO_PLACE
from kvcellar.vllm.jobs import Job, group_copy
from kvcellar.vllm.tracked import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

# Blocks that stores may hold, as a share of the pool. vLLM hears of a store that is over up to three steps
# later, or four, so what those compute must fit; the requests hold most of it anyway, as long as they run.
_HELD_SHARE = 2
# Chunks that a request decodes are stored so many at a time, or when it ends: hardly anybody needs them
# before, its blocks are its own anyway, and a store is messages, a job and wake-ups, whatever its size.
_DECODED_TOGETHER = 4
# How long blocks are held for a server that does not say where to put them.
_RESERVE_S = 2.0

Blocks = Sequence[Any]  # objects of vLLM's pool


class _Plan(NamedTuple):
    """Chunks about to be stored."""

    tracked: Tracked
    first: int
    keys: list[ChunkKey]
    blocks: dict[int, Blocks]  # by group, as many for each chunk
    give_up: float

    def all_blocks(self) -> list[Any]:
        return list(itertools.chain.from_iterable(self.blocks.values()))

    def blocks_of(self, group: int, chunk: int) -> Blocks:
        """`chunk` counts from the plan's first."""
        each = len(self.blocks[group]) // len(self.keys)
        return self.blocks[group][chunk * each : (chunk + 1) * each]


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

    def will_free_blocks(self) -> bool:
        """Whether any of them is nobody else's: vLLM that is short of blocks then waits instead of taking
        those of a request, which is in vain while requests have all that is held.
        """
        held = [block for plan in self._plans.values() for block in plan.all_blocks()]
        held += itertools.chain.from_iterable(store.blocks for store in self._stores.values())
        ours = Counter(block.block_id for block in held)
        return any(block.ref_cnt == ours[block.block_id] for block in held)

    # -- asking for places ------------------------------------------------------------------------------

    def plan(self, client: SchedulerClient, tracked: Tracked, computed: int) -> None:
        """Hold, and ask places for, the chunks that will be computed when this step is over, with `computed`
        tokens in all. Of those that a request has decoded, some at a time.
        """
        if tracked.is_mixed:
            return
        namespace = client.namespace
        ready = min(
            computed // namespace.chunk_tokens, tracked.hashed_chunks(), _covered(namespace, tracked.blocks)
        )
        tracked.ready, tracked.ready_at = max(tracked.planned, ready), tracked.request.num_preemptions
        decodes = tracked.planned >= tracked.request.num_prompt_tokens // namespace.chunk_tokens
        if tracked.ready - tracked.planned >= (_decoded_together(namespace) if decodes else 1):
            self._plan(client, tracked)

    def plan_rest(self, client: SchedulerClient, tracked: Tracked) -> None:
        """The request is over, and its blocks are about to be freed."""
        # After a preemption its blocks are others', or not computed yet.
        if not tracked.is_mixed and tracked.ready_at == tracked.request.num_preemptions:
            self._plan(client, tracked)

    def _plan(self, client: SchedulerClient, tracked: Tracked) -> None:
        """What is ready, as soon as there is a server."""
        if not client.is_connected:
            return
        namespace, chunks = client.namespace, range(tracked.planned, tracked.ready)
        has = [_which(namespace, group, blocks, chunks) for group, blocks in enumerate(tracked.blocks)]
        # Runs of chunks that have blocks in the same groups: a window group has none for what has slid out.
        for having, run in itertools.groupby(zip(*has, strict=True)):
            count = sum(1 for _ in run)
            groups = [group for group, here in enumerate(having) if here]
            fits = self._fitting(namespace, groups, count) if groups else count
            if groups and fits:
                self._hold(client, tracked, groups, fits)
            tracked.planned += fits
            if fits < count:  # too many are held already: go on at the next step
                tracked.plan_from(tracked.planned)
                return

    def _fitting(self, namespace: Namespace, groups: list[int], chunks: int) -> int:
        assert self._pool is not None
        size = sum(namespace.blocks_per_chunk[group] for group in groups)
        share: int = self._pool.num_gpu_blocks // _HELD_SHARE
        room = max(share, size) - self._held  # one chunk may always be on its way
        return min(chunks, max(0, room // size))

    def _hold(self, client: SchedulerClient, tracked: Tracked, groups: list[int], count: int) -> None:
        assert self._pool is not None
        first, stop = tracked.planned, tracked.planned + count
        keys = tracked.keys[first:stop]
        blocks = {
            group: _slice(client.namespace, group, tracked.blocks[group], range(first, stop))
            for group in groups
        }
        plan = _Plan(tracked, first, keys, blocks, time.monotonic() + _RESERVE_S)
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
            plan.tracked.refused(plan.first + grant.chunks, unheard=grant.reason == Disconnected.code)
        copies, kept = [], []
        for group, row in zip(plan.blocks, grant.places, strict=False):
            places = {chunk: place for chunk, place in enumerate(row.tolist()) if place != NO_PLACE}
            blocks = [plan.blocks_of(group, chunk) for chunk in places]
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
        store = self._stores.pop(job_id, None)
        if store is None:
            return  # heard of before, see near.py
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


def _decoded_together(namespace: Namespace) -> int:
    """None of them may have slid out of a window by then."""
    windows = [group.window_tokens for group in namespace.groups if group.window_tokens is not None]
    return max(1, min([_DECODED_TOGETHER, *(window // namespace.chunk_tokens - 1 for window in windows)]))


def _covered(namespace: Namespace, groups: Sequence[Blocks]) -> int:
    """Chunks for which every group has blocks, if only such as have slid out of its window."""
    each = namespace.blocks_per_chunk
    return min((len(blocks) // count for blocks, count in zip(groups, each, strict=False)), default=0)


def _slice(namespace: Namespace, group: int, mine: Blocks, chunks: range) -> Blocks:
    tokens, size = namespace.chunk_tokens, namespace.groups[group].block_tokens
    span = block_range(chunks.start * tokens, chunks.stop * tokens, size)
    return mine[span.start : span.stop]


def _which(namespace: Namespace, group: int, mine: Blocks, chunks: range) -> list[bool]:
    """Of which of these chunks has the group all blocks?"""
    each = namespace.blocks_per_chunk[group]
    there = [not block.is_null for block in _slice(namespace, group, mine, chunks)]
    if len(there) == each * len(chunks) and all(there):
        return [True] * len(chunks)
    parts = [there[chunk * each : (chunk + 1) * each] for chunk in range(len(chunks))]
    return [len(part) == each and all(part) for part in parts]
