"""The connector's worker side: copies between this rank's KV memory and slots, in a thread of its own.

Loads go before stores. A load that fails in any way, a checksum that does not match among them, is reported
as failed, and vLLM computes those tokens itself; a store that fails is aborted. Every job is reported exactly
once, also by ranks that have nothing to copy.
"""

import logging
import threading
import time
from collections import Counter, deque
from contextlib import AbstractContextManager

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvcellar.client import Slots, WorkerClient
from kvcellar.errors import CellarError
from kvcellar.identity import CopyPlan, decode_namespace
from kvcellar.slab import Bytes
from kvcellar.transfer import HostTransfer, block_memory
from kvcellar.vllm.identity import group_layers
from kvcellar.vllm.jobs import CellarMetadata, Job, StoresDone, TensorLayout
from kvcellar.vllm.metrics import CellarStats
from kvcellar.vllm.options import Options

log = logging.getLogger(__name__)

# What a load or store may wait for its memory to be mapped, from when it was asked for: however many wait,
# they wait no longer than one.
_MAP_S = 2.0


class WorkerSide:
    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options) -> None:
        self._rank = config.parallel_config.rank
        self._layers = group_layers(kv_cache_config)
        self._memory: dict[str, Bytes] = {}
        self._layout = TensorLayout({})
        # Attached at once, long before the namespace is known: a rank has no share in what was granted before
        # it came.
        self._client = WorkerClient(options.socket, options.session, self._rank)
        self._copier: _Copier | None = None
        self._namespace = b""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for name, tensor in kv_caches.items():
            try:
                if tensor.device.type != "cpu":
                    raise CellarError(f"KV in {tensor.device.type} memory is not supported yet")
                self._memory[name] = block_memory(tensor.view(torch.uint8).numpy(), tensor.shape[0])
            except (CellarError, RuntimeError) as error:
                self._layout.problem = f"layer {name}: {error}"
            self._layout.layers[name] = f"{tensor.dtype} {tuple(tensor.shape[1:])} {tensor.stride()[1:]}"

    def tensor_layout(self) -> TensorLayout:
        return self._layout

    def start_loads(self, metadata: CellarMetadata) -> None:
        self._take(metadata)

    def start_stores(self, metadata: CellarMetadata) -> None:
        self._take(metadata)

    def _take(self, metadata: CellarMetadata) -> None:
        if metadata.namespace and metadata.namespace != self._namespace:
            self._use(metadata.namespace)
        if self._copier is None:
            return
        # A store copies what this step's forward computed, so it must wait for it; loads may as well.
        for job in metadata.loads:
            self._copier.add_load(job)
        metadata.loads = []
        for job in metadata.stores:
            self._copier.add_store(job)
        metadata.stores = []

    def _use(self, encoded: bytes) -> None:
        """The engine's namespace is known, or another one: after an update of the weights."""
        before = self._copier
        if before is not None:
            before.close()
        self._namespace = encoded
        namespace = decode_namespace(encoded)
        self._client.register(namespace)
        shard = namespace.parallel.kv_worker_id(self._rank)
        transfers = [
            HostTransfer(namespace, shard, group, [self._memory[name] for name in names])
            for group, names in enumerate(self._layers)
        ]
        self._copier = _Copier(self._client, transfers, writes=namespace.parallel.is_writer(self._rank))
        if before is not None:
            self._copier.inherit(before)

    def take_loads(self) -> KVConnectorTransferResults:
        return self._copier.take_loads() if self._copier is not None else KVConnectorTransferResults()

    def take_stores(self) -> StoresDone | None:
        done = self._copier.take_stores() if self._copier is not None else Counter[int]()
        return StoresDone(done) if done else None

    def take_stats(self) -> CellarStats | None:
        counted = self._copier.take_counts() if self._copier is not None else {}
        return CellarStats(counted) if counted else None

    def close(self) -> None:
        if self._copier is not None:
            self._copier.close()
        self._client.close()


class _Copier:
    """The thread that copies, and what it has to report."""

    def __init__(self, client: WorkerClient, transfers: list[HostTransfer], *, writes: bool) -> None:
        self._client = client
        self._transfers = transfers
        self._writes = writes
        self._loads: deque[tuple[Job, float]] = deque()  # with the time until which it may wait
        self._stores: deque[tuple[Job, float]] = deque()
        self._results = KVConnectorTransferResults()
        self._stored: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kvcellar-copier", daemon=True)
        self._thread.start()

    def inherit(self, before: "_Copier") -> None:
        """Report what one that is closed has not: vLLM waits for every answer."""
        with self._changed:
            self._results, self._stored = before.take_loads(), before.take_stores()
            self._counts.update(before.take_counts())

    def add_load(self, job: Job) -> None:
        with self._changed:
            self._loads.append((job, time.monotonic() + _MAP_S))
            self._changed.notify()

    def add_store(self, job: Job) -> None:
        with self._changed:
            self._stores.append((job, time.monotonic() + _MAP_S))
            self._changed.notify()

    def take_loads(self) -> KVConnectorTransferResults:
        with self._changed:
            results, self._results = self._results, KVConnectorTransferResults()
        return results

    def take_stores(self) -> Counter[int]:
        with self._changed:
            stored, self._stored = self._stored, Counter()
        return stored

    def take_counts(self) -> dict[str, float]:
        with self._changed:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """Finish what was started, then leave."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._loads or self._stores or self._stopped)
                load = self._loads.popleft() if self._loads else None
                store = self._stores.popleft() if load is None and self._stores else None
            if load is not None:
                started = time.monotonic()
                good = self._load(*load)
                with self._changed:
                    self._results.finished_recving.add(load[0].request_id)
                    if not good:
                        self._results.failed_recving.add(load[0].request_id)
                    self._count("load", started, self._bytes_of(load[0]) if good else 0)
                    self._counts["loads_failed"] += not good
            elif store is not None:
                started = time.monotonic()
                good = self._store(*store)
                with self._changed:
                    self._stored[store[0].id] += 1
                    if self._writes:
                        self._count("store", started, self._bytes_of(store[0]) if good else 0)
                        self._counts["stores_dropped"] += not good
            else:
                return

    def _load(self, job: Job, give_up: float) -> bool:
        good = True
        try:
            with self._copying(job, give_up) as slots:
                for copy in job.copies:
                    plan = CopyPlan(copy.group, copy.places, copy.blocks)
                    for row in self._transfers[copy.group].load(plan, copy.keys, slots):
                        self._client.condemn(job.lease, copy.group, copy.chunks[row])
                        good = False
        except CellarError as error:
            log.warning("KVCellar: a load failed, computing instead: %s", error)
            good = False
        except Exception:  # whatever went wrong, vLLM must hear of it and compute
            log.exception("KVCellar: a load broke, computing instead")
            good = False
        self._client.release(job.lease, job.first, job.stop)
        return good

    def _copying(self, job: Job, give_up: float) -> AbstractContextManager[Slots]:
        self._client.wait_attached(max(0.0, give_up - time.monotonic()))
        return self._client.copying(job.lease, max(0.0, give_up - time.monotonic()))

    def _count(self, what: str, started: float, moved: int) -> None:
        self._counts.update(
            {f"{what}s": 1, f"{what}_bytes": moved, f"{what}_seconds": time.monotonic() - started}
        )

    def _bytes_of(self, job: Job) -> int:
        return sum(len(copy.keys) * self._transfers[copy.group].layout.object_bytes for copy in job.copies)

    def _store(self, job: Job, give_up: float) -> bool:
        """Whether it is stored, as far as this rank goes."""
        if not self._writes:
            return True
        try:
            with self._copying(job, give_up) as slots:
                for copy in job.copies:
                    self._transfers[copy.group].store(
                        CopyPlan(copy.group, copy.places, copy.blocks), copy.keys, slots
                    )
        except Exception as error:  # noqa: BLE001 - a store that breaks is a store less
            log.warning("KVCellar: a store was dropped: %s", error)
            self._client.abort(job.lease, job.first, job.stop)
            return False
        self._client.commit(job.lease, job.first, job.stop)
        return True
