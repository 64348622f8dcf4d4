"""The namespace of a vLLM engine: from its configuration, its KV cache groups and its workers' tensors.

Everything that decides what a byte means is in here. Specs are taken by exact type: a subclass that we do not
know may keep state that we would not restore, and then there is no namespace and no cache, rather than a
wrong one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub import constants as hub
from vllm import __version__ as vllm_version
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvcellar.errors import BadRequest
from kvcellar.identity import BlockHash, Group, Layer, Namespace, ParallelStrategy, default_chunk_tokens
from kvcellar.vllm.compat import hash_block_tokens
from kvcellar.vllm.metadata import TensorLayout
from kvcellar.vllm.settings import digest, of_code, of_environment, of_images
from kvcellar.vllm.weights import only_commit, weights_digest

_LAYOUT_VERSION = 1
# Any other may have KV that depends on more than the tokens before it.
_DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")


# Ways of loading that read what the hub gave; others may read something else under the model's name.
_FROM_THE_HUB = ("auto", "hf", "safetensors", "pt", "mistral", "bitsandbytes")


class Unsupported(BadRequest):
    """This engine's KV cannot be cached exactly; the message says why."""


def parallel_strategy(config: VllmConfig, kv_cache_config: KVCacheConfig) -> ParallelStrategy:
    parallel = config.parallel_config
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in _layer_specs(group).values()]
    return ParallelStrategy(
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        dcp=getattr(parallel, "decode_context_parallel_size", 1),
        mla=all(type(spec) is MLAAttentionSpec for spec in specs),
    )


def make_namespace(
    config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    stages: Sequence[TensorLayout],
    generation: int,
    tenant: str,
) -> Namespace:
    """`stages`: what a rank of each pipeline stage has. Call only once NONE_HASH is known: see
    compat.derive_hash_seed; at the first request it always is.
    """
    check_supported(config, kv_cache_config)
    model = config.model_config
    groups = tuple(
        _group(group, [layout.groups[number] for layout in stages])
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    return Namespace(
        engine=f"vllm {vllm_version} on {_device()}, layout {_LAYOUT_VERSION}",
        model=model.model,
        weights=_weights(config),
        kv_dtype=config.cache_config.cache_dtype,
        kv_layout=_describe({name: text for layout in stages for name, text in layout.layers.items()}),
        groups=groups,
        parallel=parallel_strategy(config, kv_cache_config),
        chunk_tokens=default_chunk_tokens(
            [group.block_tokens for group in groups] + [hash_block_tokens(config, kv_cache_config)]
        ),
        block_hash=BlockHash(
            config.cache_config.prefix_caching_hash_algo,
            hash_block_tokens(config, kv_cache_config),
            kv_cache_utils.NONE_HASH.hex(),
        ),
        # What a GPU can add up in any order, or what a host does fastest.
        checksum="sum64" if current_platform.device_type == "cuda" else "xxh3-64",
        quantization=str(model.quantization or ""),
        draft_model=_draft_model(config),
        weights_generation=generation,
        tenant=tenant,
    )


def _weights(config: VllmConfig) -> str:
    """The configuration covers overrides and rope settings. Not which files or which commit of the model it
    is, nor that weights are drawn, come from elsewhere, or are quantized as they come; nor how long a prompt
    may be, which decides the rope (LongRoPE) or the attention (Llama 4) of some models; nor what the engine
    makes of images; nor whose code computes the model: transformers' has the rotated part of MLA's keys in
    another order than vLLM's; nor what vLLM's environment has it compute in other precision.
    """
    model, load = config.model_config, config.load_config
    read = _read_weights(config)
    more = {"images": of_images(model.multimodal_config), "loader": load.model_loader_extra_config}
    more |= {"weights": model.model_weights, "quantization": model.quantization_config}
    more |= {"code": of_code(model), "environment": of_environment(envs)}
    return (
        f"{model.revision or ''} {read} {load.load_format} {model.dtype} up to {model.max_model_len} "
        f"tokens {digest(model.hf_config.to_dict())} {digest(more)}"
    )


def _read_weights(config: VllmConfig) -> str:
    """Samples of their files, or the commit of a model that has a name. Empty if the revision has to do."""
    model, load = config.model_config, config.load_config
    if load.load_format == "dummy":
        _check_drawn(config)
        return ""
    cached = ""
    try:
        if read := weights_digest(model.model):
            return read
        problem = f"nobody knows of which commit the weights of {model.model} are"
        if load.load_format in _FROM_THE_HUB and not envs.VLLM_USE_MODELSCOPE:
            cached = only_commit(model.model, load.download_dir or hub.HF_HUB_CACHE)
    except OSError as error:
        problem = (
            f"the weights in {model.model} cannot be read: {error.strerror}; if they come from elsewhere"
        )
    # vLLM 0.32 knows the commit of what it got from the hub; before, transformers did, up to some version.
    commit = getattr(model.revision, "resolved", None) or getattr(model.hf_config, "_commit_hash", None)
    commit = commit or cached
    if commit or model.revision:
        return str(commit or "")
    raise Unsupported(f"{problem}, say which they are with --revision, and another one whenever they change")


def _check_drawn(config: VllmConfig) -> None:
    """Drawn weights are the same everywhere, until a trainer puts others in their place."""
    trainer = getattr(config, "weight_transfer_config", None) or config.parallel_config.worker_extension_cls
    revision = config.model_config.revision
    # What nobody asked for is called "main" by vLLM 0.32.
    if trainer and not getattr(revision, "initial", revision):
        raise Unsupported(
            "nobody knows which weights will take the place of dummy ones, say which they are with "
            "--revision, another one for each run, and reset with reset_connector=True after each update"
        )


def _device() -> str:
    """On CPUs, kernels pack keys as the instructions want them that they were chosen for, in tensors of the
    same shape.
    """
    if current_platform.device_type != "cpu":
        return str(current_platform.device_name)
    amx = " with AMX" if torch.cpu._is_amx_tile_supported() else ""
    return f"{current_platform.device_name} {current_platform.get_cpu_architecture().name}{amx}"


def check_supported(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    _check_layers(kv_cache_config)
    if not config.model_config.is_prefix_caching_supported:
        raise Unsupported("vLLM does not support prefix caching for this model, or its way of pooling")
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in _DRAFTS_WITHOUT_KV:
        raise Unsupported(
            f"speculative decoding by {speculative.method!r}, whose drafts have KV of their own, is not "
            "supported yet"
        )
    if config.parallel_config.distributed_executor_backend == "external_launcher":
        raise Unsupported("external_launcher has a scheduler for each rank")
    for what in ("decode", "prefill"):
        if getattr(config.parallel_config, f"{what}_context_parallel_size", 1) > 1:
            raise Unsupported(f"{what} context parallelism is not supported yet")
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise Unsupported("calculate_kv_scales makes KV that depends on what the engine saw before")
    beside = getattr(config, "aux_output_config", None)
    if beside is not None and beside.enabled:  # of loaded ones it finds nothing, and the engine dies
        raise Unsupported("enable_return_routed_experts is about tokens that are computed here")
    encoders = getattr(config, "ec_transfer_config", None)
    if encoders is not None and encoders.is_ec_consumer:
        raise Unsupported(
            "ec_transfer_config has images encoded elsewhere, by settings that are not known here"
        )
    _read_weights(config)


def _check_layers(kv_cache_config: KVCacheConfig) -> None:
    for group in kv_cache_config.kv_cache_groups:
        for name, spec in _layer_specs(group).items():
            if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
                raise Unsupported(
                    f"layer {name} has a {type(spec).__name__}, whose state cannot be restored yet"
                )
            if getattr(spec, "non_causal", False):
                raise Unsupported(f"layer {name} lets tokens see later ones, on which its KV then depends")


def has_window(kv_cache_config: KVCacheConfig) -> bool:
    return any(
        isinstance(spec, SlidingWindowSpec)
        for group in kv_cache_config.kv_cache_groups
        for spec in _layer_specs(group).values()
    )


def block_bytes(kv_cache_config: KVCacheConfig) -> list[dict[str, int]]:
    """By group and layer, in the order in which objects hold them. A rank's configuration has the layers of
    its pipeline stage, each with its size; the scheduler's has those of the first, with one size for all.
    """
    groups = kv_cache_config.kv_cache_groups
    specs = [(group.layer_names, _layer_specs(group)) for group in groups]
    return [{name: found[name].page_size_bytes for name in names} for names, found in specs]


def _group(group: Any, stages: list[dict[str, int]]) -> Group:
    first: Any = next(iter(_layer_specs(group).values()), group.kv_cache_spec)
    sliding = type(first) is SlidingWindowSpec
    return Group(
        block_tokens=group.kv_cache_spec.block_size,
        layers=tuple(
            Layer(name, size, stage) for stage, layers in enumerate(stages) for name, size in layers.items()
        ),
        kind="sliding" if sliding else "mla" if type(first) is MLAAttentionSpec else "full",
        window_tokens=first.sliding_window + getattr(first, "extra_retained_tokens", 0) if sliding else None,
    )


def _layer_specs(group: Any) -> dict[str, KVCacheSpec]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return dict(spec.kv_cache_specs)
    return dict.fromkeys(group.layer_names, spec)


def _draft_model(config: VllmConfig) -> str:
    speculative = config.speculative_config
    return f"{speculative.method} {speculative.model}" if speculative is not None else ""


def _describe(layouts: dict[str, str]) -> str:
    """The layouts that there are, for people, and which layer has which, as a digest."""
    kinds = "; ".join(sorted(set(layouts.values())))
    return f"{kinds} {digest(layouts)}"
