"""Identity: what KV means, how it is divided and laid out. Pure; imports nothing of the server."""

from kvcellar.identity.layout import (
    SKIP,
    CopyPlan,
    LayoutDesc,
    layout_of,
    make_plan,
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
    LoadSpan,
    block_range,
    fold_windows,
    needed_chunks,
    plan_load,
    storable_chunks,
    store_start,
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
    "LoadSpan",
    "Namespace",
    "NamespaceId",
    "ParallelStrategy",
    "block_range",
    "decode_namespace",
    "default_chunk_tokens",
    "fold_windows",
    "layout_of",
    "make_plan",
    "needed_chunks",
    "plan_load",
    "slot_bytes",
    "storable_chunks",
    "store_start",
    "stripe_bytes",
    "window_chunks",
]
