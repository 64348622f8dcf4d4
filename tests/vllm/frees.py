"""What vLLM hears when it asks, short of blocks, whether stores would free some: with its own pool, requests
and configuration. A program for vLLM's own interpreter; test_frees.py runs it.

Its arguments are the folder of a model, and a socket that nobody listens on: what is to be stored is held
until a server has said where to. Answers with a line of JSON: by moment, whether blocks would come free, and
whether any are held.
"""

# mypy: disable-error-code="import-not-found"

import json
import sys
from typing import Any

from tests.vllm.engine import set_environment, take_stdout
from tests.vllm.refusals import BLOCK, BLOCKS, full_attention, make_config, make_layers, make_transfer

TOKENS = 2 * 128  # two chunks


def main() -> None:
    answers = take_stdout()
    model, socket = sys.argv[1:]
    set_environment(ranks=1)
    told = Moments(model, socket).told
    answers.write(json.dumps(told) + "\n")
    answers.flush()


class Moments:
    def __init__(self, model: str, socket: str) -> None:
        # After the environment is set.
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: PLC0415
        from vllm.v1.core.block_pool import BlockPool  # noqa: PLC0415

        from kvcellar.vllm import KVCellarConnector  # noqa: PLC0415
        from kvcellar.vllm.identity import block_bytes  # noqa: PLC0415
        from kvcellar.vllm.metadata import TensorLayout  # noqa: PLC0415

        layers = make_layers([full_attention()])
        self.connector = KVCellarConnector(
            make_config(model, kv_transfer_config=make_transfer(socket)), KVConnectorRole.SCHEDULER, layers
        )
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): TensorLayout(block_bytes(layers))})
        self.pool = BlockPool(num_gpu_blocks=BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.connector.bind_gpu_block_pool(self.pool)
        self.told: dict[str, tuple[bool, bool]] = {}
        self.play()

    def play(self) -> None:
        self.note("nothing is stored")
        blocks = self.pool.get_new_blocks(TOKENS // BLOCK)
        one = self.runs("one", blocks)
        self.note("its request goes on")
        self.pool.touch(blocks)  # it has the same prompt
        other = self.runs("other", blocks)
        self.note("two requests go on")
        self.ends(one, blocks)
        self.note("one of two goes on")
        self.ends(other, blocks)
        self.note("no request goes on")
        self.connector.reset_cache()
        self.note("all is let go")

    def note(self, moment: str) -> None:
        self.told[moment] = (self.connector.has_pending_block_frees(), self.connector.has_pending_push_work())

    def runs(self, name: str, blocks: list[Any]) -> Any:
        """A request has been computed by the step that is planned, in these blocks."""
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.utils.hashing import sha256  # noqa: PLC0415
        from vllm.v1.core.kv_cache_manager import KVCacheBlocks  # noqa: PLC0415
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher  # noqa: PLC0415
        from vllm.v1.core.sched.output import SchedulerOutput  # noqa: PLC0415
        from vllm.v1.request import Request  # noqa: PLC0415

        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(name, [7] * TOKENS, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        assert self.connector.get_num_new_matched_tokens(request, 0) == (0, False)
        self.connector.update_state_after_alloc(request, KVCacheBlocks((blocks,)), 0)
        step = SchedulerOutput.make_empty()
        step.num_scheduled_tokens[name] = step.total_num_scheduled_tokens = TOKENS
        self.connector.build_connector_meta(step)
        return request

    def ends(self, request: Any, blocks: list[Any]) -> None:
        ids = [block.block_id for block in blocks]
        assert self.connector.request_finished_all_groups(request, (ids,)) == (False, None)
        self.pool.free_blocks(reversed(blocks))


if __name__ == "__main__":
    main()
