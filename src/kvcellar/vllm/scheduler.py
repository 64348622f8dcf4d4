"""The connector's scheduler side: what is here, what to load, what to store.

A lookup is one round trip when a request is first considered; everything else leaves in one message per step.
Storing is pipelined: a chunk that this step will have computed is held (its blocks get a reference) and
places are asked for; the next step, with the places, tells the workers to copy; when all ranks have, the
blocks are let go. So finish, abort, preemption and sliding windows need no care: the blocks are ours as long
as the copy may run. How many are held is bounded, and so is the time.
"""

import itertools
import logging
import secrets
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvcellar.client import AdminClient, Grant, SchedulerClient
from kvcellar.errors import BadRequest, CellarError
from kvcellar.identity import KEY_BYTES, SKIP, ChunkKey, Namespace, block_range, plan_load
from kvcellar.slab import NO_PLACE
from kvcellar.vllm.identity import check_supported, hash_block_tokens, make_namespace
from kvcellar.vllm.jobs import CellarMetadata, GroupCopy, Job, StoresDone, TensorLayout
from kvcellar.vllm.options import Options

log = logging.getLogger(__name__)

NULL_BLOCK = 0
# Blocks that stores may hold, as a share of the pool, and for how long while the server does not answer.
_HELD_SHARE = 10
_RESERVE_S = 2.0
_START_S = 1.0


class _Tracked:
    """What the connector knows of one request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.keys: list[ChunkKey] = []
        self.grant: Grant | None = (
            None  # what the cache has of it; asked for once, and again after a preemption
        )
        self.asked_at = -1  # number of preemptions when it was asked
        self.computed = 0  # what the engine had when it was offered
        self.loading = False
        self.failed = False  # a load went wrong: it is not offered the cache again
        self.planned = 0  # chunks before this one are stored, or on their way


class _Plan(NamedTuple):
    """Chunks about to be stored; their blocks are held."""

    request_id: str
    keys: list[ChunkKey]
    groups: list[int]
    blocks: list[list[list[Any]]]  # by group, chunk: block objects of vLLM's pool
    give_up: float

    def all_blocks(self) -> list[Any]:
        return [block for group in self.blocks for chunk in group for block in chunk]


class SchedulerSide:
    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options) -> None:
        assert config.kv_transfer_config is not None
        # vLLM's default ends a request whose load failed. Read after this constructor, so setting it here
        # counts.
        config.kv_transfer_config.kv_load_failure_policy = "recompute"
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._layouts: dict[str, str] = {}
        self._problem = ""  # why there is no cache for this engine
        self._generation = 0
        self._client: SchedulerClient | None = None
        self._manager: KVCacheManager | None = None
        self._requests: dict[str, _Tracked] = {}
        self._loads: list[Job] = []
        self._loading: dict[str, int] = {}  # request id -> lease, until all ranks have answered
        self._plans: dict[int, _Plan] = {}
        self._stores: dict[
            int, tuple[int, list[Any], int]
        ] = {}  # job id -> lease, blocks held, ranks still at it
        self._held = 0
        self._ids = itertools.count(1)
        self._greet()

    def _greet(self) -> None:
        """Say at the engine's start, in one line, if there will be no cache."""
        try:
            check_supported(self._config, self._kv_cache_config)
        except BadRequest as error:
            self._disable(str(error))
            return
        try:
            with AdminClient(self._options.socket, _START_S) as admin:
                admin.ping()
        except CellarError as error:
            if self._options.require:
                raise
            log.warning("KVCellar: no cache for now, computing everything: %s", error)

    def set_layouts(self, layouts: Iterable[TensorLayout]) -> None:
        for layout in layouts:
            self._layouts |= layout.layers
            if layout.problem:
                self._disable(layout.problem)

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    @property
    def has_stores(self) -> bool:
        return bool(self._plans or self._stores)

    # -- loading ----------------------------------------------------------------------------------------

    def offer(self, request: Request, computed: int) -> tuple[int, bool]:
        """How many tokens beyond `computed` can be loaded. The answer is remembered: asking again costs
        nothing.
        """
        client = self._get_client()
        tracked = self._requests.setdefault(request.request_id, _Tracked(request))
        if client is None or tracked.failed or request.skip_reading_prefix_cache:
            return 0, False
        if tracked.grant is None or tracked.asked_at != request.num_preemptions:
            self._ask(client, tracked, computed)
        assert tracked.grant is not None
        chunk = client.namespace.chunk_tokens
        span = plan_load(computed, tracked.grant.chunks * chunk, request.num_tokens, chunk, self._alignment)
        if not span.new_tokens:
            return 0, False
        tracked.computed = computed
        return span.new_tokens, True

    def _ask(self, client: SchedulerClient, tracked: _Tracked, computed: int) -> None:
        self._give_back(tracked)
        chunk = client.namespace.chunk_tokens
        chunks = self._hashed_chunks(tracked, client.namespace)
        if len(client.namespace.groups) > 1:
            # A window is read up to the end of the hit: a hit must not be cut, so it leaves a token to
            # compute.
            chunks = min(chunks, (tracked.request.num_tokens - 1) // chunk)
        tracked.asked_at = tracked.request.num_preemptions
        tracked.grant = Grant(0, 0, [], "")
        if chunks * chunk > computed:
            tracked.grant = client.lookup(tracked.keys[:chunks], self._options.lookup_timeout)
        tracked.planned = tracked.grant.chunks

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM has blocks for the offer, or will not take it."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.grant is None or not tracked.grant.lease or tracked.loading:
            return
        if not external:
            self._give_back(tracked)
            return
        assert self._client is not None
        namespace, grant = self._client.namespace, tracked.grant
        end = tracked.computed + external
        first, stop = tracked.computed // namespace.chunk_tokens, -(-end // namespace.chunk_tokens)
        self._client.release(grant.lease, 0, first)
        self._client.release(grant.lease, stop, grant.chunks)
        copies = [
            self._load_copy(namespace, tracked, group, ids, range(first, stop))
            for group, ids in enumerate(blocks.get_block_ids())
        ]
        tracked.loading = True
        self._loading[request.request_id] = grant.lease
        self._loads.append(Job(next(self._ids), request.request_id, grant.lease, first, stop, copies))

    def _load_copy(
        self, namespace: Namespace, tracked: _Tracked, group: int, ids: list[int], chunks: range
    ) -> GroupCopy:
        assert tracked.grant is not None
        size, chunk_tokens = namespace.groups[group].block_tokens, namespace.chunk_tokens
        rows, places, taken = [], [], []
        for chunk in chunks:
            place = int(tracked.grant.places[group][chunk])
            row = [
                ids[at] if at * size >= tracked.computed and at < len(ids) and ids[at] != NULL_BLOCK else SKIP
                for at in block_range(chunk * chunk_tokens, (chunk + 1) * chunk_tokens, size)
            ]
            if place != NO_PLACE and any(block != SKIP for block in row):
                rows.append(row)
                places.append(place)
                taken.append(chunk)
        return _group_copy(namespace, group, places, rows, taken, [tracked.keys[chunk] for chunk in taken])

    def _give_back(self, tracked: _Tracked) -> None:
        """No rank was told: the whole lease goes back at once."""
        grant, tracked.grant = (
            tracked.grant,
            Grant(0, tracked.grant.chunks, [], "") if tracked.grant else None,
        )
        if grant is not None and grant.lease and not tracked.loading and self._client is not None:
            self._client.release(grant.lease, 0, grant.chunks)
            self._client.forget(grant.lease)

    # -- storing ----------------------------------------------------------------------------------------

    def plan_step(self, output: SchedulerOutput) -> CellarMetadata:
        client = self._client
        if client is None:
            return CellarMetadata()
        loads, self._loads = self._loads, []
        stores = [job for tag, grant in client.collect() if (job := self._reserved(int(str(tag)), grant))]
        self._drop_overdue()
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                self._plan_stores(client, tracked, scheduled)
        client.flush()
        return CellarMetadata(client.namespace.encode(), loads, stores)

    def _plan_stores(self, client: SchedulerClient, tracked: _Tracked, scheduled: int) -> None:
        """Hold, and ask places for, the chunks that will have been computed when this step is over."""
        assert self._manager is not None
        namespace = client.namespace
        done = (tracked.request.num_computed_tokens + scheduled) // namespace.chunk_tokens
        stop = min(done, self._hashed_chunks(tracked, namespace))
        if stop <= tracked.planned:
            return
        mine = self._manager.get_blocks(tracked.request.request_id).blocks
        chunks = [self._chunk_blocks(namespace, mine, chunk) for chunk in range(tracked.planned, stop)]
        # Runs of chunks that have blocks in the same groups: a window group has none for what has slid out.
        for groups, run in itertools.groupby(
            enumerate(chunks, tracked.planned), lambda item: sorted(item[1])
        ):
            numbered = list(run)
            fits = self._fitting(numbered)
            if groups and fits:
                self._hold(client, tracked, groups, numbered[:fits])
            tracked.planned = numbered[0][0] + (fits if groups else len(numbered))
            if groups and fits < len(numbered):
                return  # too many blocks are held: go on at the next step

    def _fitting(self, numbered: list[tuple[int, dict[int, list[Any]]]]) -> int:
        assert self._manager is not None
        sizes = list(itertools.accumulate(sum(map(len, blocks.values())) for _, blocks in numbered))
        share = self._manager.block_pool.num_gpu_blocks // _HELD_SHARE
        room = max(share, sizes[0]) - self._held  # one chunk may always be on its way
        return sum(size <= room for size in sizes)

    def _chunk_blocks(self, namespace: Namespace, mine: Any, chunk: int) -> dict[int, list[Any]]:
        """The blocks of one chunk, in the groups that have all of them."""
        start, stop = chunk * namespace.chunk_tokens, (chunk + 1) * namespace.chunk_tokens
        found = {}
        for group, spec in enumerate(namespace.groups):
            span = block_range(start, stop, spec.block_tokens)
            blocks = list(mine[group][span.start : span.stop])
            if len(blocks) == len(span) and not any(block.is_null for block in blocks):
                found[group] = blocks
        return found

    def _hold(
        self,
        client: SchedulerClient,
        tracked: _Tracked,
        groups: list[int],
        run: list[tuple[int, dict[int, list[Any]]]],
    ) -> None:
        assert self._manager is not None
        first = run[0][0]
        keys = [tracked.keys[chunk] for chunk, _ in run]
        blocks = [[found[group] for _, found in run] for group in groups]
        plan = _Plan(tracked.request.request_id, keys, groups, blocks, time.monotonic() + _RESERVE_S)
        held = plan.all_blocks()
        self._manager.block_pool.touch(held)
        self._held += len(held)
        tag = next(self._ids)
        self._plans[tag] = plan
        client.reserve(tag, keys, tracked.keys[first - 1] if first else None, groups)

    def _reserved(self, tag: int, grant: Grant) -> Job | None:
        """Places came for a plan: make it a job for the workers; let go of the blocks it does not need."""
        assert self._client is not None
        plan = self._plans.pop(tag, None)
        if plan is None:  # it came too late, and nobody was told
            if grant.lease:
                self._client.abort(grant.lease, 0, grant.chunks)
                self._client.forget(grant.lease)
            return None
        copies, kept = [], []
        for position, group in enumerate(plan.groups):
            places = grant.places[position].tolist() if grant.lease else []
            taken = [chunk for chunk, place in enumerate(places) if place != NO_PLACE]
            rows = [plan.blocks[position][chunk] for chunk in taken]
            kept += [block for row in rows for block in row]
            copies.append(
                _group_copy(
                    self._client.namespace,
                    group,
                    [places[chunk] for chunk in taken],
                    [[block.block_id for block in row] for row in rows],
                    taken,
                    [plan.keys[chunk] for chunk in taken],
                )
            )
        keeping = set(map(id, kept))
        self._let_go([block for block in plan.all_blocks() if id(block) not in keeping])
        if not grant.lease:
            return None
        job = Job(next(self._ids), plan.request_id, grant.lease, 0, grant.chunks, copies)
        self._stores[job.id] = (grant.lease, kept, self._config.parallel_config.world_size)
        return job

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        for tag in [tag for tag, plan in self._plans.items() if plan.give_up < now]:
            self._let_go(self._plans.pop(tag).all_blocks())

    def _let_go(self, blocks: list[Any]) -> None:
        if blocks:
            assert self._manager is not None
            self._held -= len(blocks)
            # In reverse, as vLLM frees a request: later blocks are evicted first.
            self._manager.block_pool.free_blocks(reversed(blocks))

    # -- what the workers say, and the end --------------------------------------------------------------

    def step_done(self, output: KVConnectorOutput) -> None:
        for request_id in output.finished_recving or ():
            lease = self._loading.pop(request_id, None)
            if lease is not None and self._client is not None:
                self._client.forget(lease)
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            tracked.loading = False
            tracked.grant = Grant(0, tracked.grant.chunks if tracked.grant else 0, [], "")
            if request_id in output.failed_recving:
                tracked.failed = True
                tracked.planned = 0  # what was bad is gone from the cache, and worth storing again
        done = output.kv_connector_worker_meta
        if isinstance(done, StoresDone):
            for job_id, ranks in done.jobs.items():
                self._store_done(job_id, ranks)

    def _store_done(self, job_id: int, ranks: int) -> None:
        lease, blocks, left = self._stores.pop(job_id)
        if left > ranks:
            self._stores[job_id] = (lease, blocks, left - ranks)
            return
        self._let_go(blocks)
        if self._client is not None:
            self._client.forget(lease)

    def finished(self, request: Request) -> None:
        tracked = self._requests.pop(request.request_id, None)
        if tracked is not None:
            self._give_back(tracked)

    def new_generation(self) -> None:
        """The weights changed in place: nothing stored so far is ours any more, but it stays for others."""
        self._generation = secrets.randbelow(1 << 31) + 1
        for tag in list(self._plans):
            self._let_go(self._plans.pop(tag).all_blocks())
        for tracked in self._requests.values():
            self._give_back(tracked)
            tracked.keys, tracked.planned = [], 0
        if self._client is not None:
            self._client.close()
            self._client = None

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    # -- the namespace ----------------------------------------------------------------------------------

    def _get_client(self) -> SchedulerClient | None:
        """Made at the first request: only then has vLLM derived the hash seed, a part of the namespace."""
        if self._client is None and not self._problem:
            try:
                namespace = make_namespace(
                    self._config, self._kv_cache_config, self._layouts, self._generation, self._options.tenant
                )
            except BadRequest as error:
                self._disable(str(error))
                return None
            label = f"vLLM {self._config.model_config.model}"
            self._client = SchedulerClient(self._options.socket, self._options.session, namespace, label)
            self._client.wait_connected(self._options.lookup_timeout)
        return self._client

    def _disable(self, reason: str) -> None:
        if self._options.require:
            raise BadRequest(reason)
        self._problem = reason
        log.warning("KVCellar: no cache for this engine: %s", reason)

    @property
    def _alignment(self) -> int:
        assert self._client is not None
        return max(group.block_tokens for group in self._client.namespace.groups)

    def _hashed_chunks(self, tracked: _Tracked, namespace: Namespace) -> int:
        """Chunks whose last block vLLM has hashed; brings the keys up to date."""
        per_chunk = namespace.chunk_tokens // hash_block_tokens(self._kv_cache_config)
        hashes = tracked.request.block_hashes
        for chunk in range(len(tracked.keys), len(hashes) // per_chunk):
            tracked.keys.append(ChunkKey(bytes(hashes[(chunk + 1) * per_chunk - 1][:KEY_BYTES])))
        return len(tracked.keys)


def _group_copy(
    namespace: Namespace,
    group: int,
    places: list[int],
    rows: list[list[int]],
    chunks: list[int],
    keys: list[ChunkKey],
) -> GroupCopy:
    per_chunk = namespace.chunk_tokens // namespace.groups[group].block_tokens
    table = np.asarray(rows, dtype=np.int64).reshape(len(rows), per_chunk)
    return GroupCopy(group, np.asarray(places, dtype=np.uint32), table, chunks, keys)
