"""What differs between the vLLM versions that this connector knows, found by looking, not by number."""

import logging
from typing import Any

from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvcellar.config import fix_hash_seed

log = logging.getLogger(__name__)

TESTED = ("0.26", "0.32")

# With this class a worker can say that the load of a request failed. Without it, it can only name bad blocks,
# which vLLM understands for models with one KV cache group and dies of with several.
TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)


def warn_if_untested() -> None:
    if not vllm_version.startswith(tuple(f"{version}." for version in TESTED)):
        log.warning("KVCellar was tested with vLLM %s, not with %s", " and ".join(TESTED), vllm_version)


def warn_if_open(config: VllmConfig) -> None:
    """vLLM 0.32 takes whoever loads KV for one that is sent that of images, with their embeddings or without.
    One that is sent embeddings takes them in any case.
    """
    images, sent = config.model_config.multimodal_config, getattr(config, "ec_transfer_config", None)
    if getattr(images, "allow_missing_mm_embeddings", False) and not (sent and sent.is_ec_consumer):
        log.warning(
            "KVCellar: with a KV connector, this vLLM takes embeddings in place of images, as with "
            "--enable-mm-embeds, and wrong ones may end it: let only those send requests whom you trust"
        )


def derive_hash_seed(config: VllmConfig) -> bool:
    """Whether kv_cache_utils.NONE_HASH, where every chain of hashes starts, now is what vLLM will derive.

    vLLM does it after it has built the connector. With sha256 it is the same in every engine, before 0.32
    only because we choose the seed, which vLLM would draw. Other hashes have a secret seed: it shows later.
    """
    name = config.cache_config.prefix_caching_hash_algo
    if not name.startswith("sha256"):
        return False
    fix_hash_seed()
    kv_cache_utils.init_none_hash(get_hash_fn_by_name(name))
    first = kv_cache_utils.NONE_HASH
    kv_cache_utils.init_none_hash(get_hash_fn_by_name(name))
    return bool(first == kv_cache_utils.NONE_HASH)


def hash_block_tokens(config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """How many tokens one of request.block_hashes stands for."""
    known = getattr(kv_cache_config, "hash_block_size", None)
    if known:
        return int(known)
    _, tokens = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, config)
    return int(tokens)


def attention_backend(config: VllmConfig, layer: str) -> str:
    """Whose code writes a layer's KV, as vLLM calls it. Shape and strides do not tell K from V: of two heads,
    those of K may come first, or both kinds of one head.
    """
    found: Any = getattr(config.compilation_config, "static_forward_context", {}).get(layer)
    try:
        return str(found.get_attn_backend().get_name())
    except Exception:  # noqa: BLE001 - it is other people's code, and one more text among those of the layer
        return "a backend without a name"
