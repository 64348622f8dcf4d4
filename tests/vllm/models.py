"""Tiny models with random weights, one per kind of KV cache that the connector must carry, and the demo's.

A model is a folder of a config and float32 safetensors, 10 to 20 MB, the same on every run. The weights are
drawn so that every layer's attention picks a few tokens out of hundreds (see SHARP): the next token then
depends on far context, and a wrong block of KV shows as wrong tokens. There is no tokenizer: prompts are
token ids.

Making a model needs torch and transformers, so this file is also a program for vLLM's interpreter:
    python models.py KIND CACHE_DIR      prints the model's folder
"""

# mypy: disable-error-code="import-not-found"

import hashlib
import inspect
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

VOCAB = 4096
SEED = 20
# How large queries and keys are. Attention scores then spread by about its square, 2.25, so that a head
# listens to some ten of a thousand tokens.
SHARP = 1.5
_SHARPENED = ("q_proj", "k_proj", "kv_a_proj")


class Kind(NamedTuple):
    """A model of one kind: what transformers builds it from, and what vLLM needs to run it right."""

    family: str  # transformers' model_type
    config: dict[str, Any]
    options: dict[str, Any]  # keyword arguments of vllm.LLM
    block: int  # tokens of a block that vLLM settles on
    window: int | None = None  # tokens, of the layers that have one
    embedding: float = 1.0  # spread of the embedding, before the model scales it
    sharp: float = SHARP


_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

KINDS = {
    "gqa": Kind("llama", _SMALL | {"num_hidden_layers": 4}, {}, block=128),
    # One KV head: with more ranks than that, each has a copy of it.
    "mqa": Kind("llama", _SMALL | {"num_hidden_layers": 2, "num_key_value_heads": 1}, {}, block=128),
    "mla": Kind(
        "deepseek_v3",
        _SMALL
        | {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "head_dim": None,
            "kv_lora_rank": 512,  # with the 64 of rope the only MLA head that vLLM's CPU kernel has
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 128,
            "topk_method": "noaux_tc",
        },
        {
            # vLLM 0.32's CPU rope kernel is wrong for the strided query that MLA gives it.
            "compilation_config": {"custom_ops": ["-rotary_embedding"]},
            # Where the CPU has AMX, vLLM would take another backend, with blocks of 128 tokens.
            "attention_config": {"backend": "CPU_MLA"},
        },
        block=16,
    ),
    "hybrid": Kind(
        "gemma3_text",
        _SMALL
        | {
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 64,
            "sliding_window": 256,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
        {},
        block=128,
        window=256,
        embedding=256**-0.5,  # Gemma multiplies it by the root of hidden_size
    ),
    # All layers have a window, in one group; of no round number of blocks or chunks.
    "sliding": Kind(
        "mistral",
        _SMALL | {"num_hidden_layers": 4, "sliding_window": 200},
        {"block_size": 32},
        block=32,
        window=200,
    ),
    "moe": Kind(
        "mixtral",
        _SMALL | {"num_hidden_layers": 3, "intermediate_size": 256, "num_local_experts": 4},
        {},
        block=128,
    ),
    # For `make demo`: 600 MB, wide and shallow, so that two cores need seconds for a prompt of thousands of
    # tokens whose KV is only 4 KiB a token. In float32: bfloat16 rounds differently for a whole prompt than
    # for its end, which may turn a token. So many tokens need a sharper ear.
    "demo": Kind(
        "llama",
        _SMALL
        | {
            "num_hidden_layers": 4,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_attention_heads": 24,
            "max_position_embeddings": 16384,
        },
        {},
        block=128,
        sharp=2.0,
    ),
}


def model_folder(kind: str, cache: Path) -> Path:
    """Where the model is or will be. A kind that changes, or is built otherwise, gets another folder."""
    recipe = f"{KINDS[kind]} {SEED} {_SHARPENED} {inspect.getsource(_build)} {inspect.getsource(_spread)}"
    return cache / f"{kind}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def make_model(kind: str, cache: Path) -> Path:
    """The folder of a model of that kind, made under `cache` unless it is there. Safe to call from many
    processes.
    """
    folder = model_folder(kind, cache)
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=cache, prefix=f".{kind}-"))
    try:
        _build(KINDS[kind], temporary)
        os.rename(temporary, folder)
    except OSError:  # somebody else was faster
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _build(kind: Kind, folder: Path) -> None:
    import torch  # noqa: PLC0415 -- the project's own interpreter has none
    import transformers  # noqa: PLC0415

    config = transformers.AutoConfig.for_model(kind.family, **kind.config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(kind.sharp - 1)  # Gemma adds 1
            elif weight.dim() > 1:
                spread = kind.embedding if "embed" in name else _spread(kind, name, weight.shape[-1])
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    model.save_pretrained(folder, safe_serialization=True)


def _spread(kind: Kind, name: str, inputs: int) -> float:
    """Keeps activations near 1, queries and keys near `sharp`, and makes up for what a mean of values
    loses.
    """
    factor = 3.0 if "o_proj" in name else 1.0
    if any(part in name for part in _SHARPENED):
        factor = kind.sharp
    return factor / math.sqrt(inputs)


if __name__ == "__main__":
    print(make_model(sys.argv[1], Path(sys.argv[2])))
