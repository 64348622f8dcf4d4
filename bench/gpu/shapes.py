"""Models whose KV is measured: real shapes, random weights, nothing to download."""

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """KV of one group: what a block of 16 tokens takes in each layer."""

    layers: int
    tensor: tuple[int, ...]  # of one block, elements of two bytes


# By model: the groups that vLLM makes of it.
KV_SHAPES: dict[str, list[Shape]] = {
    "llama8b": [Shape(32, (16, 8, 256))],
    "mla": [Shape(27, (16, 576))],
    "hybrid": [Shape(8, (16, 8, 512))] * 6,
}

WEIGHT_BYTES = {"llama8b": 16_100_000_000, "mla": 5_200_000_000, "hybrid": 25_500_000_000}

_COMMON: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    # Llama 3.1 8B
    "llama8b": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    # DeepSeek V2 Lite, all layers dense: what matters here is its latent KV
    "mla": _COMMON
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "vocab_size": 102400,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    # Gemma 3 12B: five sliding-window layers to one of full attention
    "hybrid": _COMMON
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
        "query_pre_attn_scalar": 256,
        "vocab_size": 262208,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        # With random weights that are also the embedding's, the likeliest next token would be the last one.
        "tie_word_embeddings": False,
    },
}


def kv_bytes(model: str, tokens: int) -> int:
    """What a reload of so many tokens moves at least: of windows, only their end."""
    if model == "hybrid":
        per_token = 8 * 8 * 512 * 2
        return per_token * tokens + 5 * per_token * min(tokens, 1024 + 128)
    return stored_bytes(model, tokens)


def stored_bytes(model: str, tokens: int) -> int:
    """What storing so many tokens takes: every layer, since any chunk may be the end of a later hit."""
    return sum(shape.layers * _elements(shape) * 2 // 16 for shape in KV_SHAPES[model]) * tokens


def _elements(shape: Shape) -> int:
    count = 1
    for size in shape.tensor:
        count *= size
    return count
