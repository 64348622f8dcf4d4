"""Identity: what KV means, how it is divided and laid out. Pure; imports nothing of the server."""

from kvcellar.identity.layout import (
    SKIP,
    CopyPlan,
    LayoutDesc,
    layout_of,
    slot_bytes,
    stripe_bytes,
)
from kvcellar.identity.namespace import (
    ID_BYTES,
    KEY_BYTES,
    BlockHash,
    ChunkKey,
    Group,
    Layer,
    Namespace,
    NamespaceId,
    decode_namespace,
    default_chunk_tokens,
)
from kvcellar.identity.parallel import ParallelStrategy
from kvcellar.identity.tokens import (
    block_range,
    fold_windows,
    loadable_tokens,
    loaded_chunks,
    needed_chunks,
    window_chunks,
)

__all__ = [
    "ID_BYTES",
    "KEY_BYTES",
    "SKIP",
    "BlockHash",
    "ChunkKey",
    "CopyPlan",
    "Group",
    "Layer",
    "LayoutDesc",
    "Namespace",
    "NamespaceId",
    "ParallelStrategy",
    "block_range",
    "decode_namespace",
    "default_chunk_tokens",
    "fold_windows",
    "layout_of",
    "loadable_tokens",
    "loaded_chunks",
    "needed_chunks",
    "slot_bytes",
    "stripe_bytes",
    "window_chunks",
]
