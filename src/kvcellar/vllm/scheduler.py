"""The connector's scheduler side: what is here, what to load, and the one message per step to the server.

A lookup is one round trip when a request is first considered, and its answer is remembered. What was offered
is held by a lease until vLLM has blocks for it, or does not want it. Where there are tiers, the server hears
of a request that the engine does not get to in the step in which it arrives, and has its chunks brought up
meanwhile. Storing is next door, in stores.py.
"""

import itertools
import logging
import secrets
import time

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvcellar.client import AdminClient, Grant, SchedulerClient
from kvcellar.errors import BadRequest, CellarError, StartupError
from kvcellar.identity import SKIP, Namespace, block_range, loadable_tokens, loaded_chunks
from kvcellar.vllm.adapters import Adapters
from kvcellar.vllm.compat import derive_hash_seed, hash_block_tokens, warn_if_open, warn_if_untested
from kvcellar.vllm.hashes import cover as hashes_cover
from kvcellar.vllm.identity import check_supported, make_namespace
from kvcellar.vllm.jobs import GroupCopy, Job
from kvcellar.vllm.metadata import CellarMetadata, TensorLayout, WorkerReport, this_host
from kvcellar.vllm.near import landed_of
from kvcellar.vllm.options import Options
from kvcellar.vllm.patience import Patience
from kvcellar.vllm.stores import Stores
from kvcellar.vllm.tracked import Tracked

log = logging.getLogger(__name__)

NULL_BLOCK = 0
_PROBE_S = 1.0
# What stores under way may take when everything starts anew: that waits for an answer, and they take
# milliseconds.
_RESET_S = 1.0


class SchedulerSide:
    def __init__(
        self, config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options, problem: str
    ) -> None:
        """`problem`: why there can be no cache for this engine, if that is known already."""
        assert config.kv_transfer_config is not None
        # vLLM's default ends a request whose load failed. It is read after this constructor.
        config.kv_transfer_config.kv_load_failure_policy = "recompute"
        self._knows_seed = derive_hash_seed(config)
        self.stores = Stores(config.parallel_config.world_size)
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._stages: list[TensorLayout] = []  # what a rank of each has
        self._problem = ""  # why there is no cache for this engine
        self._told = ""  # why there is none for now
        self._generation = 0
        self._client: SchedulerClient | None = None
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Job] = []
        self._loading: dict[str, int] = {}  # request id -> lease, until all ranks have answered
        self._ids = itertools.count(1)
        self._adapters = Adapters(config.lora_config)
        self._patience = Patience(time.monotonic)
        self._greet(problem)

    def _greet(self, problem: str) -> None:
        """Say at the engine's start what its owner should know, and in one line if there will be no cache."""
        warn_if_untested()
        warn_if_open(self._config)
        try:
            check_supported(self._config, self._kv_cache_config)
        except BadRequest as error:
            problem = str(error)
        if problem:
            self._disable(problem)
            return
        try:
            with AdminClient(self._options.socket, _PROBE_S) as admin:
                admin.ping()
            log.info("KVCellar: storing and loading KV through %s", self._options.socket)
        except CellarError as error:
            if self._options.require:
                raise StartupError(f"KVCellar is required, and {error}") from None
            self._told = str(error)
            log.warning("KVCellar: no cache for now, computing everything: %s", error)

    def _disable(self, reason: str) -> None:
        if self._options.require:
            raise StartupError(f"KVCellar is required, and {reason}")
        self._problem = reason
        log.warning("KVCellar: no cache for this engine: %s", reason)

    def set_layouts(self, layouts: dict[tuple[int, int], TensorLayout]) -> None:
        """What every rank has, by pipeline stage and rank within it; at the engine's start."""
        self._stages = [layouts[stage, 0] for stage in range(1 + max(stage for stage, _ in layouts))]
        problems = [layout.problem for layout in layouts.values() if layout.problem]
        if {layout.host for layout in layouts.values()} != {this_host()}:
            problems.append("it runs on several hosts, and a server has the KV of one")
        if any(layout != self._stages[stage] for (stage, _), layout in layouts.items()):
            problems.append("ranks of one pipeline stage have different KV")
        if problems and not self._problem:
            self._disable(problems[0])
        if self._knows_seed:
            self._get_client()  # so that there is memory to store into when the first request comes

    def bind(self, pool: BlockPool) -> None:
        self.stores.bind(pool)

    def _get_client(self) -> SchedulerClient | None:
        """Made when the hash seed is known, which is a part of the namespace: at the first request at the
        latest.
        """
        if self._client is None and not self._problem:
            try:
                namespace = self._make_namespace()
            except BadRequest as error:
                self._disable(str(error))
                return None
            label = f"vLLM {self._config.model_config.model}"
            self._client = SchedulerClient(
                self._options.socket, self._options.session, namespace, label, self._told
            )
            self._client.wait_connected(self._options.lookup_timeout)
        return self._client

    def _make_namespace(self) -> Namespace:
        return make_namespace(
            self._config, self._kv_cache_config, self._stages, self._generation, self._options.tenant
        )

    # -- offering ---------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """The engine will get to it in this step or in a later one. Asks nobody and waits for nothing."""
        client = self._client
        if client is None or not client.has_tiers or request.skip_reading_prefix_cache:
            return
        tracked = self._track(client, request)
        if chunks := tracked.hashed_chunks():
            wait = self._patience.ahead(chunks, client.namespace.chunk_tokens)
            tracked.expected = client.expect(tracked.keys[:chunks], wait)

    def _no_longer_expected(self, tracked: Tracked) -> None:
        if tracked.expected is not None and self._client is not None:
            self._client.no_longer(tracked.expected)
        tracked.expected = None

    def offer(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed` can be loaded; None: ask later. Asking again costs nothing."""
        client = self._get_client()
        if client is None:
            return 0, False
        tracked = self._track(client, request)
        if tracked.failed or request.skip_reading_prefix_cache:
            return 0, False
        if tracked.grant is None or tracked.asked_at != request.num_preemptions:
            self._ask(client, tracked, computed)
        if not self._all_here(client, tracked):
            return None, False
        self._no_longer_expected(tracked)  # not before: what was brought up for it is under its lease now
        assert tracked.grant is not None
        chunk = client.namespace.chunk_tokens
        alignment = max(group.block_tokens for group in client.namespace.groups)
        gained = loadable_tokens(computed, tracked.grant.chunks * chunk, request.num_tokens, alignment)
        if not gained or not tracked.grant.lease:
            return 0, False
        tracked.computed = computed
        return gained, True

    def _track(self, client: SchedulerClient, request: Request) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            hashes = client.namespace.chunk_tokens // hash_block_tokens(self._config, self._kv_cache_config)
            covered = hashes_cover(request, self._config)
            adapter = self._adapters.digest(request.lora_request) if covered else None
            tracked = self._requests[request.request_id] = Tracked(request, hashes, adapter)
        return tracked

    def _ask(self, client: SchedulerClient, tracked: Tracked, computed: int) -> None:
        self._give_back(tracked)
        chunk, chunks = client.namespace.chunk_tokens, tracked.hashed_chunks()
        tracked.asked_at = tracked.request.num_preemptions
        tracked.grant = _nothing(0)
        if chunks * chunk > computed:
            had = computed // chunk
            wait = self._patience.worth(chunks - had, chunk)
            grant = client.lookup(tracked.keys[:chunks], self._options.lookup_timeout, wait)
            self._patience.told(grant.lead_s, grant.chunk_s)
            if grant.ticket:
                pays = self._patience.worth(chunks - max(had, grant.chunks), chunk)
                self._patience.begin(grant.ticket, wait if pays else 0.0)
            tracked.grant = grant
        tracked.plan_from(tracked.grant.chunks)
        if tracked.expected is not None and not tracked.expected.is_told:
            self._no_longer_expected(tracked)  # considered in the step in which it came: that was the lookup

    def _all_here(self, client: SchedulerClient, tracked: Tracked) -> bool:
        """Has all come from tiers that is worth waiting for? Then the grant is all there is."""
        grant = tracked.grant
        if grant is None or not grant.ticket:
            return True
        brought = client.brought(grant.ticket)
        if brought is None and self._patience.lasts(grant.ticket):
            return False
        if brought is not None and brought.lease:
            self._give_back(tracked)
            tracked.grant = brought
            tracked.plan_from(brought.chunks)
            return True
        client.give_up(grant.ticket)
        self._patience.forget(grant.ticket)
        tracked.grant = grant._replace(ticket=0)
        return True

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM has blocks for the offer, or will not take it."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        tracked.blocks = blocks.blocks
        if tracked.grant is None or not tracked.grant.lease or tracked.loading:
            return
        if not external:
            self._give_back(tracked)
            return
        assert self._client is not None
        grant, chunk = tracked.grant, self._client.namespace.chunk_tokens
        chunks = loaded_chunks(tracked.computed, external, chunk)
        self._client.release(grant.lease, 0, chunks.start)
        self._client.release(grant.lease, chunks.stop, grant.chunks)
        copies = [
            self._load_copy(self._client, tracked, group, ids, chunks)
            for group, ids in enumerate(blocks.get_block_ids())
        ]
        tracked.loading = True
        self._loading[request.request_id] = grant.lease
        job = Job(next(self._ids), request.request_id, grant.lease, chunks.start, chunks.stop, copies)
        self._loads.append(job)

    def _load_copy(
        self, client: SchedulerClient, tracked: Tracked, group: int, ids: list[int], chunks: range
    ) -> GroupCopy:
        """Which blocks to fill; never one that vLLM had already, nor the null block of what has slid out. All
        others: vLLM will read them, and a load that has no slot for one of them fails.
        """
        assert tracked.grant is not None
        namespace = client.namespace
        size, per_chunk = namespace.groups[group].block_tokens, namespace.chunk_tokens
        span = block_range(chunks.start * per_chunk, chunks.stop * per_chunk, size)
        rows = np.full(len(span), SKIP, dtype=np.int64)
        had = max(0, -(-tracked.computed // size) - span.start)
        there = np.asarray(ids[span.start : span.stop], dtype=np.int64)
        rows[had : len(there)] = there[had:]
        rows[rows == NULL_BLOCK] = SKIP
        table = rows.reshape(len(chunks), -1)
        places = tracked.grant.places[group][chunks.start : chunks.stop]
        wanted = np.flatnonzero((table != SKIP).any(axis=1))
        numbers = (wanted + chunks.start).tolist()
        return GroupCopy(
            group, places[wanted], table[wanted], numbers, [tracked.keys[number] for number in numbers]
        )

    def _give_back(self, tracked: Tracked) -> None:
        """No rank was told: the whole lease goes back at once."""
        grant = tracked.grant
        if grant is None or tracked.loading or self._client is None:
            return
        if grant.ticket:
            self._client.give_up(grant.ticket)
            self._patience.forget(grant.ticket)
        if not grant.lease:
            return
        self._client.release(grant.lease, 0, grant.chunks)
        self._client.forget(grant.lease)
        tracked.grant = _nothing(grant.chunks)

    # -- steps ------------------------------------------------------------------------------------------

    def plan_step(self, output: SchedulerOutput) -> CellarMetadata:
        client = self._client
        if client is None:
            return CellarMetadata()
        loads, self._loads = self._loads, []
        jobs = self.stores.collect(client)
        chunk = client.namespace.chunk_tokens
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            computed = tracked.request.num_computed_tokens + scheduled
            if computed >= (tracked.ready + 1) * chunk:  # not so in most steps of requests that decode
                self.stores.plan(client, tracked, computed)
        client.flush()
        if output.total_num_scheduled_tokens:
            self._patience.step_begins(output.total_num_scheduled_tokens)
        return CellarMetadata(
            client.namespace.encoded, loads, jobs, idle=not output.total_num_scheduled_tokens
        )

    def step_done(self, output: KVConnectorOutput) -> None:
        """What the ranks have to say of a step; vLLM reads on in it after this."""
        landed = landed_of(self._options.session)
        if landed is not None and (fetched := landed.fetch()):
            output.finished_recving = fetched | (output.finished_recving or set())
        report = output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport) or not report.idle:
            self._patience.step_ends()
        if isinstance(report, WorkerReport):
            for job_id, ranks in report.stores.items():
                self.stores.answered(self._client, job_id, ranks)
            for request_id in report.failed & self._requests.keys():
                self._requests[request_id].failed = True
        for request_id in output.finished_recving or ():
            lease = self._loading.pop(request_id, None)
            if lease is not None and self._client is not None:
                self._client.forget(lease)
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            tracked.loading = False
            tracked.grant = _nothing(tracked.grant.chunks if tracked.grant else 0)
            if tracked.failed:
                tracked.plan_from(0)  # what was bad is gone from the cache, and worth storing again

    def finished(self, request: Request) -> bool:
        """Whether vLLM has to keep its blocks until its load is over. It does so for one that is aborted, but
        one that was preempted may also stop by itself while it loads: by a token that was still on its way.
        """
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        self._give_back(tracked)
        self._no_longer_expected(tracked)
        if self._client is not None:
            self.stores.plan_rest(self._client, tracked)
        return tracked.loading

    def new_generation(self) -> None:
        """The weights changed in place: nothing stored so far is ours any more, but it stays for others."""
        self._generation = secrets.randbelow(1 << 31) + 1
        self.stores.drop_plans()
        landed = landed_of(self._options.session)
        if landed is not None:  # no step may come that tells of them, and vLLM resets when no block is held
            for job_id, ranks in landed.take_stores(_RESET_S).items():
                self.stores.answered(self._client, job_id, ranks)
        for tracked in self._requests.values():
            self._give_back(tracked)
            self._no_longer_expected(tracked)
            tracked.plan_from(0)
            if tracked.loading or tracked.request.num_computed_tokens:
                tracked.mixed_at = tracked.request.num_preemptions
        if self._client is not None:
            self._client.flush()  # the next step may be far away
            self._client.register(self._make_namespace(), self._options.lookup_timeout)

    def close(self) -> None:
        if self._client is not None:
            self._client.flush()
            self._client.close()


def _nothing(chunks: int) -> Grant:
    """No lease any more, but the cache has, or had, so many chunks."""
    return Grant(0, chunks, [], "")
