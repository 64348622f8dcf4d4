"""The connector's worker side: this rank's KV memory, and what its copier has to report."""

import contextlib
import logging
from collections import Counter
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvcellar.client import WorkerClient
from kvcellar.errors import BadRequest, CellarError, DeadlineExceeded
from kvcellar.identity import Namespace, decode_namespace
from kvcellar.transfer import HostMover, Mover, NoMover, block_memory
from kvcellar.transfer.geometry import block_shape, describe
from kvcellar.vllm.compat import attention_backend, derive_hash_seed
from kvcellar.vllm.copier import Copier, Done
from kvcellar.vllm.identity import block_bytes, check_supported, make_namespace
from kvcellar.vllm.metadata import CellarMetadata, TensorLayout, WorkerReport
from kvcellar.vllm.metrics import CellarStats
from kvcellar.vllm.near import Landed, close_landed, open_landed
from kvcellar.vllm.options import Options

log = logging.getLogger(__name__)

# How long a step without a forward may wait for a load; longer, if that should be over by then: vLLM sleeps
# for a millisecond after such a step, and learns of a load that ends meanwhile that much later. New requests
# wait as long.
_IDLE_S, _SOON_S = 0.002, 0.005
# Of a model's configuration, what makes vLLM allocate in pools that it may empty.
_POOLED = ("enable_sleep_mode", "enable_cumem_allocator")


class WorkerSide:
    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._rank = config.parallel_config.rank
        self._num_blocks = kv_cache_config.num_blocks
        self._options = options
        self._tensors: dict[str, torch.Tensor] = {}
        self._layout = TensorLayout(block_bytes(kv_cache_config))
        self._pins: Any = None  # page-locks slabs, where KV is in GPU memory
        self._client: WorkerClient | None = None
        self._copier: Copier | None = None
        self._namespace = b""
        self._done: Done | None = None
        self._idle = False  # the engine's step has no forward
        # vLLM handles a step only after the next one; where it does not tell, it is taken not to.
        self._ahead = getattr(config, "max_concurrent_batches", 1) > 1
        alone = config.parallel_config.world_size == 1
        self._landed: Landed | None = open_landed(options.session, self.take_stores) if alone else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        try:
            check_supported(self._config, self._kv_cache_config)
        except BadRequest as error:  # the scheduler side does not see the layers of every stage
            self._layout.problem = str(error)
        for name, tensor in kv_caches.items():
            try:
                if not isinstance(tensor, torch.Tensor):
                    raise CellarError("its state is not one tensor")
                strides, itemsize = tensor.stride(), tensor.element_size()
                shape = block_shape(tensor.shape, strides, itemsize, self._num_blocks)
                if any(
                    shape.block_bytes != layers.get(name, shape.block_bytes) for layers in self._layout.groups
                ):
                    raise CellarError(f"blocks of {shape.block_bytes} bytes in larger pages")
                self._layout.layers[name] = (
                    f"{tensor.dtype} {describe(tensor.shape, strides, self._num_blocks)} "
                    f"by {attention_backend(self._config, name)}"
                )
                self._tensors[name] = tensor
            except CellarError as error:
                self._layout.problem = f"layer {name}: {error}"
        device = next(iter(self._tensors.values())).device if self._tensors else torch.device("cpu")
        if device.type == "cuda":
            self._prepare_gpu(device)
        elif device.type != "cpu":
            self._layout.problem = f"KV in {device.type} memory is not supported yet"
        # Attached at once, long before the namespace is known: a rank has no share in what was granted before
        # it came.
        self._client = self._attach()
        self._use_early()

    def _use_early(self) -> None:
        """The scheduler side will name the namespace with the first step. Whoever can tell it now has mapped,
        and page-locked, memory by then.
        """
        whole = self._config.parallel_config.pipeline_parallel_size == 1  # or others have layers too
        # An engine that can sleep hands over its KV inside a memory pool, which sleep empties: what we
        # allocate on the GPU now would be gone.
        sleeps = any(getattr(self._config.model_config, name, False) for name in _POOLED)
        if self._layout.problem or sleeps or not whole or not derive_hash_seed(self._config):
            return
        with contextlib.suppress(BadRequest):  # unsupported: the scheduler side says so
            self._use(
                make_namespace(
                    self._config, self._kv_cache_config, [self._layout], 0, self._options.tenant
                ).encoded
            )

    def _prepare_gpu(self, device: torch.device) -> None:
        try:
            # Only here: torch for CPU comes without what these need.
            from kvcellar.transfer.cuda import Pins, warm_up  # noqa: PLC0415
        except (ImportError, OSError) as error:  # OSError: no NVIDIA driver; AMD's GPUs are "cuda", too
            self._layout.problem = f"KV in GPU memory needs Triton and cuda-bindings: {error}"
            return
        try:
            self._pins = Pins(device)
            warm_up(device)
        except Exception as error:
            log.exception("KVCellar: this GPU's copies cannot be made ready")
            self._layout.problem = f"copies to and from this GPU: {error}"

    def _attach(self) -> WorkerClient:
        return WorkerClient(self._options.socket, self._options.session, self._rank, watcher=self._pins)

    def tensor_layout(self) -> TensorLayout:
        return self._layout

    def take(self, metadata: CellarMetadata) -> None:
        """Start this step's copies.

        What is stored was computed by an earlier step, and loads go to blocks that no step uses: so they may
        start before this step's forward.
        """
        if metadata.namespace and metadata.namespace != self._namespace:
            self._use(metadata.namespace)
        if self._copier is not None:
            self._copier.add(metadata.loads, metadata.stores)
            self._idle = metadata.idle

    def _use(self, encoded: bytes) -> None:
        """The engine's namespace is known, or another one: after an update of the weights."""
        assert self._client is not None
        left = None
        if self._copier is not None:
            self._copier.close()
            left = self._copier.take()  # vLLM waits for every answer
            self._copier = None  # and with it its staging memory: there may be no room for twice as much
        namespace = decode_namespace(encoded)
        self._client.register(namespace)
        mover: Mover
        try:
            mover = self._make_mover(namespace)
        except Exception as error:  # out of memory, say: the engine goes on without
            log.exception("KVCellar: no more copies by rank %d", self._rank)
            self._layout.problem = f"rank {self._rank} cannot copy: {error}"
            mover = NoMover(self._layout.problem)
        writes = namespace.parallel.is_writer(self._rank)
        self._copier, self._namespace = Copier(self._client, mover, left, writes=writes), encoded

    def _make_mover(self, namespace: Namespace) -> Mover:
        shard = namespace.parallel.kv_worker_id(self._rank)
        groups = [[self._tensors[name] for name in layers] for layers in self._layout.groups]
        if self._pins is not None:
            from kvcellar.transfer.cuda import CudaMover  # noqa: PLC0415 - see _prepare_gpu

            return CudaMover(
                namespace,
                shard,
                groups,
                self._num_blocks,
                staging_bytes=self._options.staging_bytes,
                pins=self._pins,
            )
        memory = [
            [block_memory(tensor.view(torch.uint8).numpy(), tensor.shape[0]) for tensor in layers]
            for layers in groups
        ]
        return HostMover(namespace, shard, memory)

    # -- reports ----------------------------------------------------------------------------------------

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose load is over, as far as this side has to tell, and those of them where it failed."""
        if self._copier is not None:
            # Engines of one MoE model take their steps together: those that compute would wait too.
            if self._idle and self._config.parallel_config.data_parallel_size == 1:
                self._copier.wait_for_a_load(_IDLE_S, _SOON_S, ahead=self._ahead)
            self._done = self._copier.take()
        loads, failed = (self._done.loads, self._done.failed) if self._done else (set(), set())
        if self._landed is not None and (loads or self._landed):
            loads = failed | self._landed.put(loads - failed)
        return loads, failed

    def take_stores(self, seconds: float) -> Counter[int]:
        """Those that the next steps would report. And those that the last one did: vLLM that schedules ahead
        may not have handled it.
        """
        reported = self._done.stores if self._done is not None else Counter()
        return reported + self._copier.take_stores(seconds) if self._copier is not None else reported

    def bad_blocks(self) -> set[int]:
        """Of the loads that were last reported."""
        return self._done.bad_blocks if self._done else set()

    def report(self) -> WorkerReport | None:
        """For the scheduler side, of the same moment. Always of an idle step: vLLM would not pass on one that
        has nothing to say, and the scheduler side asks for itself then, see near.py.
        """
        if self._done is None and not self._idle:
            return None
        done = self._done or Done()
        return WorkerReport(done.stores, done.failed, self._idle)

    def stats(self) -> CellarStats | None:
        return CellarStats(dict(self._done.counts)) if self._done and self._done.counts else None

    def close(self) -> None:
        if self._landed is not None:
            close_landed(self._options.session, self._landed)
        try:
            if self._copier is not None:
                self._copier.close()
        except DeadlineExceeded as error:
            # It does not say that it leaves: the server keeps what may be written until this process is gone.
            log.error("KVCellar: %s", error)
            return
        if self._client is not None:
            self._client.close()
        if self._pins is not None:
            self._pins.close()
