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
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest
from kvcellar.vllm.adapters import Adapters
from kvcellar.vllm.tracked import Tracked

adapters = Adapters(LoRAConfig())

def keys(lora, adapters=adapters):
    request = SimpleNamespace(block_hashes=[bytes([n]) * 32 for n in range(4)], num_preemptions=0)
    tracked = Tracked(request, 2, adapters.digest(lora))
    return [tracked.hashed_chunks(), [key.hex() for key in tracked.keys]]

def of(name, number=1, **more):
    return keys(LoRARequest("same-name", number, str(folder / name), **more))

def under(**settings):
    return keys(LoRARequest("same-name", 1, str(folder / "one")), Adapters(LoRAConfig(**settings)))

folder = Path(sys.argv[1])
answer = {one.name: of(one.name) for one in folder.iterdir()}
answer |= {"plain": keys(None), "missing": of("missing"), "in place": of("one", load_inplace=True)}
answer["read otherwise"] = of("one", is_3d_lora_weight=True)
answer["other modules"] = under(target_modules=["o_proj"])
answer["as many as that"] = under(max_loras=3, max_lora_rank=64)
# Of vLLM 0.26, where a request may say that the files are in another place.
elsewhere = LoRARequest("same-name", 1, str(folder / "one"))
about = {name: getattr(elsewhere, name) for name in elsewhere.__struct_fields__}
answer["elsewhere"] = keys(SimpleNamespace(**about, tensorizer_config_dict={"tensorizer_dir": "/"}))
(folder / "one" / "adapter_model.safetensors").write_bytes(b"WEIGHTS")
answer |= {"changed": of("one"), "loaded again": of("one", number=2)}
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


def fake_adapter(folder: Path, weights: str, **more: str) -> Path:
    """`more`: files beside, by name, with two underscores for a dot."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_text(weights)
    for name, text in more.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By adapter: how many chunks have keys, and which."""
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("one", "copy"):
        fake_adapter(folder / name, "weights")
    fake_adapter(folder / "other", "Weights")
    fake_adapter(folder / "other config", "weights", adapter_config__json='{"r": 4}')
    fake_adapter(folder / "bin beside", "weights", adapter_model__bin="weights")
    fake_adapter(folder / "pt beside", "weights", adapter_model__pt="weights")
    fake_adapter(folder / "embeddings", "weights", new_embeddings__safetensors="more")
    trained = fake_adapter(folder / "trained", "weights", optimizer__pt="state", README__md="# Trained")
    (trained / "checkpoint-100").mkdir()
    for name, gone in (("no config", "adapter_config.json"), ("no weights", "adapter_model.safetensors")):
        (fake_adapter(folder / name, "weights") / gone).unlink()
    found: dict[str, Any] = json.loads(run(KEYS, folder))
    return found


def test_keys_cover_the_bytes_of_an_adapter_that_vllm_reads(keys: dict[str, Any]) -> None:
    assert keys["plain"] == [2, ["01" * 16, "03" * 16]]
    same = ("one", "copy", "trained", "as many as that")
    others = ("plain", "other", "other config", "loaded again", "other modules")
    beside = ("bin beside", "pt beside", "embeddings", "read otherwise")
    assert len({keys[name][1][0] for name in same}) == 1
    assert len({keys[name][1][0] for name in ("one", *others, *beside)}) == 1 + len(others) + len(beside)


@pytest.mark.parametrize("name", ["missing", "no config", "no weights", "in place", "elsewhere", "changed"])
def test_an_adapter_of_which_the_bytes_are_uncertain_has_no_keys(name: str, keys: dict[str, Any]) -> None:
    assert keys[name] == [0, []]


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
    # Of the modules that this one applies adapters to, these have none: they do nothing.
    lora["lora_target_modules"] = ["o_proj"]
    with VllmEngine("gqa", tmp_path / "log 3", connector=connector, **lora) as third:
        nothing = third.round(prompts, adapter=adapter)
        assert nothing.tokens == plain.tokens
        assert sum(nothing.cached) == 0, "KV of an adapter that was applied was loaded"
