"""LoRA adapters of one name share nothing unless they are the same bytes: with real engines, and by keys."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import ServerProcess
from tests.vllm.harness import VllmEngine, prompts_around_borders, vllm_python
from tests.vllm.models import KINDS

pytestmark = pytest.mark.timeout(300)

CHUNK = 128
NAME = "same-name"

KEYS = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from vllm.lora.request import LoRARequest
from kvcellar.vllm.adapters import Adapters
from kvcellar.vllm.tracked import Tracked

adapters = Adapters()

def keys(path, number=1, **more):
    lora = LoRARequest("same-name", number, path, **more) if path else None
    request = SimpleNamespace(block_hashes=[bytes([n]) * 32 for n in range(4)], num_preemptions=0)
    tracked = Tracked(request, 2, adapters.digest(lora))
    return [tracked.hashed_chunks(), [key.hex() for key in tracked.keys]]

one, copy, other, missing = sys.argv[1:]
answer = {"plain": keys(""), "one": keys(one), "copy": keys(copy), "other": keys(other)}
answer |= {"missing": keys(missing), "in place": keys(one, load_inplace=True)}
(Path(one) / "adapter_model.safetensors").write_bytes(b"WEIGHTS")
answer |= {"changed": keys(one), "loaded again": keys(one, number=2)}
print(json.dumps(answer))
"""

# Low ranks, but loud: the tokens are not those of the model alone.
WEIGHTS = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file

folder, seed, layers, hidden, sizes = sys.argv[1], *map(json.loads, sys.argv[2:])
draw, rank = torch.Generator().manual_seed(seed), 8
tensors = {}
for layer in range(layers):
    for name, size in sizes.items():
        where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{where}.lora_A.weight"] = torch.randn(rank, hidden, generator=draw) / hidden**0.5
        tensors[f"{where}.lora_B.weight"] = torch.randn(size, rank, generator=draw)
Path(folder).mkdir()
save_file(tensors, f"{folder}/adapter_model.safetensors")
config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": list(sizes)}
Path(folder, "adapter_config.json").write_text(json.dumps(config))
"""


def run(script: str, *arguments: object) -> str:
    """What it printed last, in vLLM's interpreter."""
    command = [str(vllm_python()), "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=240)
    return (done.stdout.splitlines() or [b""])[-1].decode()


def fake_adapter(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def test_keys_cover_the_bytes_of_an_adapter(tmp_path: Path) -> None:
    one = fake_adapter(tmp_path / "one", b"weights")
    copy, other = fake_adapter(tmp_path / "copy", b"weights"), fake_adapter(tmp_path / "other", b"Weights")
    keys = json.loads(run(KEYS, one, copy, other, tmp_path / "missing"))
    assert keys["plain"] == [2, ["01" * 16, "03" * 16]]
    assert keys["one"] == keys["copy"]
    assert len({keys[name][1][0] for name in ("plain", "one", "other", "loaded again")}) == 4
    for uncertain in ("missing", "in place", "changed"):
        assert keys[uncertain] == [0, []]


def make_adapter(folder: Path, seed: int) -> Path:
    config = KINDS["gqa"].config
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    sizes = {name: count * config["head_dim"] for name, count in heads.items()}
    run(WEIGHTS, folder, seed, config["num_hidden_layers"], config["hidden_size"], json.dumps(sizes))
    return folder


def test_tokens_with_adapters_of_one_name_and_path(stopped_server: ServerProcess, tmp_path: Path) -> None:
    serve = stopped_server.start(memory="256MiB")
    one, other, used = (
        make_adapter(tmp_path / "one", 1),
        make_adapter(tmp_path / "other", 2),
        tmp_path / "used",
    )
    prompts = prompts_around_borders(KINDS["gqa"].block, CHUNK, seed=5)[-2:]  # with nothing in common
    adapter = [NAME, 1, str(used)]
    connector = {"socket": str(serve.socket), "lookup_timeout_ms": 5000}
    lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    with (
        VllmEngine("gqa", tmp_path / "log 1", connector=connector, **lora) as first,
        VllmEngine("gqa", tmp_path / "log 2", connector=connector, **lora) as second,
    ):
        plain = first.round(prompts)
        one.rename(used)
        with_one = first.round(prompts, adapter=adapter)
        assert sum(with_one.cached) == 0
        used.rename(one)
        other.rename(used)
        with_other = second.round(prompts, adapter=adapter)
        assert sum(with_other.cached) == 0, "another adapter's KV was loaded"
        assert len({tuple(answer.tokens) for answer in (plain, with_one, with_other)}) == 3
        again = second.round(prompts, adapter=adapter)
        assert again.tokens == with_other.tokens
        assert all(again.cached)
        # The first engine has the weights of before, whatever is in the folder now.
        doubtful = first.round(prompts, adapter=adapter)
        assert doubtful.tokens == with_one.tokens
        assert sum(doubtful.cached) == 0
        used.rename(other)
        one.rename(used)
        certain = first.round(prompts, adapter=adapter)
        assert certain.tokens == with_one.tokens
        assert all(certain.cached)
        assert second.round(prompts).tokens == plain.tokens
