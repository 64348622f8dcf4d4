"""vLLM's settings, as digests of text that is the same in every process and for every engine that has them.

Knows vLLM's names and imports nothing of it.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcellar.errors import BadRequest

# Settings of images that do not decide what KV is. Any other does, also one that only a newer vLLM has.
_SAME_KV = {
    "interleave_mm_strings",  # how chats become tokens, which are hashed
    "mm_encoder_fp8_scale_save_margin",  # of scales that this engine only writes down
    "mm_encoder_fp8_scale_save_path",
    "mm_hasher_algorithm",  # names images, and so keys
    "mm_ipc_gpu_memory_gb",  # room outside the engine
    "mm_processor_cache_gb",  # keeps what images were made into; see also hashes.py
    "mm_processor_cache_type",
    "mm_shm_cache_max_object_size_mb",
    "mm_tensor_ipc",  # how they travel between processes
    "skip_mm_profiling",  # how much memory the engine expects to need
}
_FILE = "mm_encoder_fp8_scale_path"  # what is in it counts, not where it is
# Settings of LoRA that do not decide what an adapter does. Any other does: which modules it is applied to.
_SAME_ADAPTER = {
    "default_mm_loras",  # which adapter a request has
    "fully_sharded_loras",  # where it is computed
    "max_cpu_loras",  # how many there may be, and how large; others are refused
    "max_lora_cls_labels",
    "max_lora_rank",
    "max_loras",
    "specialize_active_lora",  # by which kernels
}


# Environment variables of vLLM that decide what is computed. Not those that choose among kernels of the same
# precision, which differ in rounding alone; nor those of what is known otherwise (VLLM_MODEL_REDIRECT_PATH by
# the model's path, VLLM_MLA_DISABLE by the kind of layers) or refused (K_SCALE_CONSTANT: calculate_kv_scales,
# VLLM_ROCM_... and VLLM_XPU_...: the kind of GPU).
_ENVIRONMENT = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",  # activations of experts, in 16 bits or in 4
    "VLLM_BATCH_INVARIANT",  # and with it which kernels, also of other precision
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",  # activations in 4 bits on their way to experts
    "VLLM_DISABLED_KERNELS",  # what is chosen instead may quantize activations in another way, or not
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MEDIA_CONNECTOR",  # reads images and videos, which have the same name whatever it makes of them
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_MOE_USE_DEEP_GEMM",  # these three: whether scales are rounded to powers of two
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_TEST_FORCE_FP8_MARLIN",  # activations in 16 bits
    "VLLM_VIDEO_LOADER_BACKEND",  # which frames of a video, and how they are decoded
)


def of_images(config: Any) -> dict[str, Any]:
    """What an engine makes of images and videos: vLLM 0.26 hashes only what a request says of that. `config`:
    vLLM's MultiModalConfig, None for a model that takes none.
    """
    found = _all_but(_SAME_KV, config)
    if file := found.get(_FILE):
        found[_FILE] = _contents(file)
    return found


def of_adapters(config: Any) -> dict[str, Any]:
    """What an engine makes of LoRA adapters. `config`: vLLM's LoRAConfig, None without any."""
    return _all_but(_SAME_ADAPTER, config)


def of_environment(envs: Any) -> dict[str, Any]:
    """`envs`: vLLM's module of them, which has each with its default; None for those of other versions."""
    try:
        return {name: getattr(envs, name, None) for name in _ENVIRONMENT}
    except (OSError, ValueError) as error:  # vLLM has not looked, or will say it too
        raise BadRequest(f"an environment variable of vLLM cannot be read: {error}") from error


def of_code(model: Any) -> list[Any]:
    """Whose code computes the model: a plugin may have registered its own under an architecture's name.
    `model`: vLLM's ModelConfig.
    """
    known = model.registry.models.get(model.architecture)
    found = getattr(known, "model_cls", None)  # or it has only a name, until it is needed
    module = found.__module__ if found else getattr(known, "module_name", "")
    name = found.__qualname__ if found else getattr(known, "class_name", "")
    # What vLLM brings along is of its version.
    file = "" if not module or module.startswith("vllm.") else _file_of(module)
    overrides = getattr(model, "model_class_overrides", {})
    return [model.architecture, overrides, model.code_revision, module, name, file and _contents(file)]


def _file_of(module: str) -> str:
    """Empty if it has none. Imports the packages that it is in, and not the module."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None) or ""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return ""  # vLLM will not find it either
    return spec.origin or "" if spec is not None and spec.has_location else ""


def _all_but(names: set[str], config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in names
    }


@functools.cache  # the engine reads it once, too
def _contents(file: str) -> str:
    try:
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise BadRequest(f"{file} cannot be read: {error.strerror}") from error


def digest(described: Mapping[str, Any]) -> str:
    text = json.dumps(described, sort_keys=True, default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    """For what JSON has no word for."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))  # it has another order in every process
    text = str(value)
    if " at 0x" in text:  # where it is in this process
        raise BadRequest(f"{text} among the settings has no name that other engines would know")
    return text
