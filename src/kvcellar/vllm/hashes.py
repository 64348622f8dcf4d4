"""Whether vLLM's block hashes cover all that a request's KV depends on. If not, it goes without the cache.

Knows vLLM's names and imports nothing of it.
"""

from typing import Any


def cover(request: Any, config: Any) -> bool:
    # A session whose prompt grows drops tokens that were hashed, and vLLM 0.26 keeps their hashes.
    if getattr(request, "resumable", False):
        return False
    # With both of its own caches off, vLLM does not look at images: each process numbers them from one, and
    # hashes the number.
    images = config.model_config.multimodal_config
    looks = images is None or images.mm_processor_cache_gb or config.cache_config.enable_prefix_caching
    return bool(looks or not request.mm_features)
