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
