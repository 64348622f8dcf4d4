"""Which of vLLM's blocks stores hold, and until when: with vLLM's own pool, requests and configuration, and
both sides of the connector in one process. A program for vLLM's own interpreter; test_held.py runs it.

Its arguments are the folder of a model, and a server's socket. Answers with a line of JSON: by moment,
whether any block would come free with what is held, and whether any is held.
"""

# mypy: disable-error-code="import-not-found"

import json
import sys
import time
from typing import Any

from tests.vllm.engine import set_environment, take_stdout
from tests.vllm.refusals import BLOCK, BLOCKS, full_attention, make_config, make_layers, make_transfer

TOKENS = 2 * 128  # two chunks
PATIENCE = 60.0


def main() -> None:
    answers = take_stdout()
    model, socket = sys.argv[1:]
    set_environment(ranks=1)
    told = {}
    for play in (short_of_blocks, reset_beside_a_step):
        engine = Engine(model, socket)
        play(engine)
        told[play.__name__] = engine.told
        engine.close()
    answers.write(json.dumps(told) + "\n")
    answers.flush()


class Engine:
    """What vLLM does with the connector, one call at a time."""

    def __init__(self, model: str, socket: str) -> None:
        # After the environment is set.
        import torch  # noqa: PLC0415
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: PLC0415
        from vllm.v1.core.block_pool import BlockPool  # noqa: PLC0415

        from kvcellar.vllm import KVCellarConnector  # noqa: PLC0415

        layers = make_layers([full_attention()])
        config = make_config(model, kv_transfer_config=make_transfer(socket))
        self.worker = KVCellarConnector(config, KVConnectorRole.WORKER, layers)
        self.worker.register_kv_caches({"layer 0": torch.zeros(BLOCKS, 2, BLOCK, 1, 16)})
        self.scheduler = KVCellarConnector(config, KVConnectorRole.SCHEDULER, layers)
        layout = self.worker.get_handshake_metadata()
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): layout})
        self.pool = BlockPool(num_gpu_blocks=BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.scheduler.bind_gpu_block_pool(self.pool)
        self.told: dict[str, tuple[bool, bool]] = {}

    def note(self, moment: str) -> None:
        self.told[moment] = (self.scheduler.has_pending_block_frees(), self.scheduler.has_pending_push_work())

    def runs(self, name: str, blocks: list[Any], token: int = 7) -> Any:
        """A request will have been computed by the step that is planned, in these blocks."""
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.utils.hashing import sha256  # noqa: PLC0415
        from vllm.v1.core.kv_cache_manager import KVCacheBlocks  # noqa: PLC0415
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher  # noqa: PLC0415
        from vllm.v1.request import Request  # noqa: PLC0415

        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(name, [token] * TOKENS, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        self.scheduler.update_state_after_alloc(request, KVCacheBlocks((blocks,)), 0)
        self.plans({name: TOKENS})
        return request

    def plans(self, tokens: dict[str, int]) -> Any:
        """A step; returns what the connector's worker side is to be told."""
        from vllm.v1.core.sched.output import SchedulerOutput  # noqa: PLC0415

        step = SchedulerOutput.make_empty()
        step.num_scheduled_tokens, step.total_num_scheduled_tokens = tokens, sum(tokens.values())
        return self.scheduler.build_connector_meta(step)

    def makes(self, metadata: Any) -> Any:
        """The worker's part of a step; returns its report."""
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        self.worker.get_transfer_results(set())
        return self.worker.build_connector_worker_meta()

    def handles(self, report: Any) -> None:
        from vllm.v1.outputs import KVConnectorOutput  # noqa: PLC0415

        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))

    def ends(self, request: Any, blocks: list[Any]) -> None:
        ids = [block.block_id for block in blocks]
        assert self.scheduler.request_finished_all_groups(request, (ids,)) == (False, None)
        self.pool.free_blocks(reversed(blocks))

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def short_of_blocks(engine: Engine) -> None:
    engine.note("nothing is stored")
    blocks = engine.pool.get_new_blocks(TOKENS // BLOCK)
    one = engine.runs("one", blocks)
    engine.note("its request goes on")
    engine.pool.touch(blocks)  # it has the same prompt
    other = engine.runs("other", blocks)
    engine.note("two requests go on")
    engine.ends(one, blocks)
    engine.note("one of two goes on")
    engine.ends(other, blocks)
    engine.note("no request goes on")
    engine.scheduler.reset_cache()
    engine.note("all is let go")


def reset_beside_a_step(engine: Engine) -> None:
    """vLLM that schedules ahead has made a step more when the last request ends, and handles it with the next
    request's.
    """
    blocks = engine.pool.get_new_blocks(TOKENS // BLOCK)
    engine.ends(engine.runs("one", blocks, token=8), blocks)
    deadline = time.monotonic() + PATIENCE
    while not (report := engine.makes(engine.plans({}))).stores:
        assert time.monotonic() < deadline, "nothing was stored"
        engine.handles(report)
    engine.note("stored, and no step is handled that tells of it")
    engine.scheduler.reset_cache()
    engine.note("reset")
    engine.handles(report)
    engine.note("the step is handled")


if __name__ == "__main__":
    main()
