"""KVCellarConnector: what vLLM calls. One-line delegations to the side that lives in this process, nothing
else.

A connector that supports vLLM's hybrid memory allocator (HMA) sees models with several KV cache groups as
they are; any other makes vLLM keep all layers in one group, at the price of memory. Where vLLM cannot
recompute a failed load of several groups, the default is one group, so that a failed load is never worse than
a miss; and no cache, if all layers have a window. Who prefers the cache there, and an engine that stops when
a load fails, says so by the connector's name.
"""

import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvcellar.errors import CellarError
from kvcellar.vllm.compat import TransferResults
from kvcellar.vllm.identity import has_window
from kvcellar.vllm.metrics import CellarMetrics, CellarStats
from kvcellar.vllm.options import read_options
from kvcellar.vllm.scheduler import SchedulerSide
from kvcellar.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# Said in vLLM's own log, in its form and from its level on.
logging.getLogger("kvcellar").parent = logging.getLogger("vllm")


_WINDOW = "this vLLM cannot compute a failed load of layers with a window instead"


class CannotRecompute(CellarError):
    """Nothing is left but to stop: going on would use KV that is not there."""


class _Facade(KVConnectorBase_V1):
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = read_options(vllm_config)
        self._scheduler: Any = None
        self._worker: Any = None
        # Without TransferResults, vLLM computes a failed load from its first bad block on: of several groups
        # it cannot find that, and with a window the blocks before it were never loaded.
        self._cannot_recompute = TransferResults is None and (
            len(kv_cache_config.kv_cache_groups) > 1 or has_window(kv_cache_config)
        )
        if role == KVConnectorRole.SCHEDULER:
            stops = isinstance(self, SupportsHMA)  # which is asked for by name
            problem = _WINDOW if self._cannot_recompute and not stops else ""
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config, options, problem)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, options)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a store that is dropped is a miss later on

    # -- worker -----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.tensor_layout()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Before the step's forward is launched. Newer vLLM calls start_load_kv only after it, and copies
        that wait for what was launched before them would wait for a whole step more.
        """
        super().bind_connector_metadata(connector_metadata)
        self._worker.take(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """They have been."""

    def has_connector_metadata(self) -> bool:
        """Asked by every layer, and nobody else: is the connector to hear of it? There is nothing to do."""
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Whole chunks are stored after the step."""

    def wait_for_save(self) -> None:
        """Stores hold their blocks: nobody has to wait."""

    # Per step, the next five come in this order: the first takes a snapshot, the others tell more of it.

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        finished, failed = self._worker.finished_loads()
        return TransferResults(finished_recving=finished, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Of vLLM that has no get_transfer_results."""
        finished, failed = self._worker.finished_loads()
        if failed and self._cannot_recompute:
            raise CannotRecompute(
                f"the load of {len(failed)} requests failed, and this vLLM cannot compute them instead"
            )
        return None, finished

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad: set[int] = self._worker.bad_blocks() if TransferResults is None else set()
        return bad

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._worker.stats() if self._worker is not None else None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.report()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return CellarStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return CellarMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- scheduler --------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.set_layouts(metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        self._scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: "Request") -> None:
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        offered: tuple[int | None, bool] = self._scheduler.offer(request, num_computed_tokens)
        return offered

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._scheduler.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._scheduler.step_done(connector_output)

    def request_finished(
        self,
        request: "Request",
        block_ids: list[int],  # noqa: ARG002 - held blocks have references of their own
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request), None

    def request_finished_all_groups(
        self,
        request: "Request",
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request), None

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and bool(self._scheduler.stores)

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.stores.will_free_blocks()

    def reset_cache(self) -> bool | None:
        self._scheduler.new_generation()
        return True

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()


class KVCellarHybridConnector(_Facade, SupportsHMA):
    """Several groups, whatever vLLM can do about a failed load."""


if TransferResults is None:

    class KVCellarConnector(_Facade):
        """One group."""

else:

    class KVCellarConnector(KVCellarHybridConnector):  # type: ignore[no-redef]
        """Several groups; what failed to load is computed."""
