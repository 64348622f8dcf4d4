"""Requests that are aborted, at every step of their lives: others go on undisturbed, and nothing stays held.

vLLM is short of everything: prompts are computed in pieces, and blocks run out, so that requests are
preempted. The soak does the same at random.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import ServerProcess
from tests.server.engine import eventually
from tests.vllm.harness import VllmEngine
from tests.vllm.models import VOCAB

pytestmark = pytest.mark.timeout(600)

CHUNK = 128
LENGTH, TOKENS = 4 * CHUNK - 8, 24
STEPS = 16  # the last of them are in the middle of decoding
# Five requests that begin with four blocks and end with five, or three in a window. There is room for three
# to begin.
SHORT: dict[str, Any] = {"max_num_batched_tokens": 96, "max_num_seqs": 5, "max_model_len": 1024}
BLOCKS = {"gqa": 14, "hybrid": 23}


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_abort_at_every_step(kind: str, ahead: bool, stopped_server: ServerProcess, tmp_path: Path) -> None:
    serve = stopped_server.start(memory="256MiB")
    connector = {"socket": str(serve.socket), "lookup_timeout_ms": 5000}
    draw = random.Random(30)
    prompts = [[draw.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(5)]
    stages: dict[str, set[str]] = {"computes": set(), "loads": set()}
    preemptions = 0.0
    with VllmEngine(
        kind,
        tmp_path / "engine",
        connector=connector,
        ahead=ahead,
        num_gpu_blocks_override=BLOCKS[kind],
        **SHORT,
    ) as engine:
        truth = [engine.round([p], TOKENS, salt=f"alone {n}").tokens[0] for n, p in enumerate(prompts)]
        assert engine.round(prompts, TOKENS).tokens == truth
        for step in range(STEPS):
            for how, salt in (("computes", f"never seen {step}"), ("loads", "")):
                # The first gets all it needs; the last has to wait for blocks, holding what was found for it.
                answer = engine.round(
                    prompts, TOKENS, together=True, salt=salt, abort_at={"0": step, "4": step}
                )
                for number, output in enumerate(answer.outputs):
                    expected = truth[number][: len(output.tokens) if number in (0, 4) else TOKENS]
                    assert output.tokens == expected, (how, step, number)
                    stages[how] |= set(output.stage.split(" and "))
                assert answer.settled
                preemptions += answer.counters.get("vllm:num_preemptions", 0)
                eventually(lambda: not serve.leases())
        assert engine.round(prompts, TOKENS).tokens == truth
    assert stages["computes"] >= {"waiting", "computing", "storing", "decoding"}
    assert stages["loads"] >= {"waiting", "waiting_for_remote_kvs", "decoding"}
    assert preemptions > 0, (preemptions, stages)
    eventually(lambda: not serve.status().sessions)
    assert serve.status().counts.get("corrupt", 0) == 0
