"""How large everything is: on the GPU that is measured, and small enough to try the programs anywhere."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from bench.gpu.shapes import CONFIGS, WEIGHT_BYTES, stored_bytes

# Where engines take turns: tokens of a step, and tokens of all layers that the pool has room for. Of a long
# prompt it must hold all (layers with a window only some), and beside it 32 requests that decode; without
# these, no more than two of the prompts that are loaded, or the third would find some of itself still there.
# Half of it, which KVCellar lets stores hold, must be what five steps compute: a store is over some steps
# later. 8,192 is the default of `vllm serve`; with it, three engines of six groups would not fit the GPU.
_TURNS = {"llama8b": (8_192, 106_000), "mla": (8_192, 90_000), "hybrid": (4_096, 42_000)}
_BESIDE = 5_000_000_000  # bytes of the GPU that an engine takes beside weights and pool

# Steps in which all decode are one CUDA graph, as where vLLM is used in earnest: launched by Python, they
# would be as fast as the host is at the moment. For those 32 only; nothing is compiled, which takes minutes.
_GRAPH: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [32],
    },
}


class Scale(NamedTuple):
    configs: Mapping[str, dict[str, Any]]
    engine: Mapping[str, Any]  # arguments of vllm.LLM
    by_model: Mapping[str, dict[str, Any]]  # and of one model
    vocabulary: int  # prompts are drawn from so many tokens
    cache_gib: Mapping[str, int]  # of one mode; with loads and stores beside others
    lengths: tuple[int, ...]  # of prompts whose time to first token is measured
    chunk: int  # tokens
    long: int  # tokens of the longest prompt
    loaded: int  # of each prompt that is loaded beside requests that decode
    decoders: int
    decode: int  # tokens of each: more than it comes to
    rest_s: float  # after the first requests: memory is mapped and page-locked meanwhile
    seconds: Mapping[str, float]  # of each spell of interference
    in_turns: Mapping[str, dict[str, Any]]  # by model: arguments of vllm.LLM where engines take turns
    gpu: bool

    def config(self, model: str) -> dict[str, Any]:
        return self.configs[model]

    def options(self, model: str) -> dict[str, Any]:
        return {**self.engine, **self.by_model.get(model, {})}

    def turns_bytes(self, model: str) -> int:
        """What each of them takes of the GPU."""
        return WEIGHT_BYTES[model] + stored_bytes(model, _TURNS[model][1]) + _BESIDE

    def turns_options(self, model: str, part: str) -> dict[str, Any]:
        """Beyond those of `options`, where engines take turns."""
        graph = _GRAPH if self.gpu and part == "interference" else {}
        return {**self.in_turns.get(model, {}), **graph}

    def cache_of(self, model: str, *, beside: bool) -> tuple[int, int]:
        """GiB for each mode: what the longest prompt takes, and a bit; and what is better."""
        least = (stored_bytes(model, self.long) * 125 // 100 >> 30) + 1
        return least, max(least, self.cache_gib["beside" if beside else "one"])


def _in_turns(model: str) -> dict[str, Any]:
    """All modes' engines beside each other."""
    step, pool = _TURNS[model]
    return {
        "kv_cache_memory_bytes": stored_bytes(model, pool),
        "max_num_batched_tokens": step,
        "max_num_seqs": 40,  # those that decode, and some: sampling is not to take memory for a thousand
    }


_ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
}

FULL = Scale(
    configs=CONFIGS,
    # vLLM 0.26 refuses to start where less than its utilization is free, and others may have taken much by
    # then; with the pool's size given it looks no further, so engines may start at the same time.
    engine=_ENGINE
    | {
        "max_model_len": 66_000,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 24_000_000_000,
        "max_num_batched_tokens": 16_384,
    },
    by_model={},
    vocabulary=100_000,
    cache_gib={"one": 20, "beside": 29},
    lengths=(2_048, 8_192, 32_768, 64_000),
    chunk=128,
    long=64_000,
    loaded=64_000,
    decoders=32,
    decode=16_000,
    rest_s=8.0,
    seconds={"alone": 0.8, "loads": 1.0, "stores": 4.0},
    in_turns={model: _in_turns(model) for model in _TURNS},
    gpu=True,
)

_SMALL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}

SMALL = Scale(
    configs={
        "llama8b": CONFIGS["llama8b"] | _SMALL | {"num_hidden_layers": 4},
        "mla": CONFIGS["mla"]
        | _SMALL
        | {"num_hidden_layers": 3, "num_key_value_heads": 4, "first_k_dense_replace": 3},
        "hybrid": CONFIGS["hybrid"]
        | _SMALL
        | {
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 64,
            "sliding_window": 256,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    },
    engine=_ENGINE
    | {
        "dtype": "float32",
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 128 << 20,
    },
    by_model={
        # vLLM 0.32's CPU rope kernel is wrong for the strided query that MLA gives it.
        "mla": {
            "compilation_config": {"custom_ops": ["-rotary_embedding"]},
            "attention_config": {"backend": "CPU_MLA"},
        }
    },
    vocabulary=4000,
    cache_gib={"one": 1, "beside": 1},
    lengths=(512, 1024),
    chunk=128,
    long=1024,
    loaded=2304,
    decoders=2,
    decode=2_000,
    rest_s=0.5,
    seconds={"alone": 0.2, "loads": 0.6, "stores": 0.5},
    # As on the GPU: room for less than two of the prompts that are loaded. Its blocks have 128 tokens.
    in_turns={"llama8b": {"max_model_len": 2_560, "kv_cache_memory_bytes": 40 * 128 * 4096}},
    gpu=False,
)
