"""What an engine registers: everything that decides what a byte of its KV means.

Two engines share KV exactly when their namespaces encode to the same bytes. There are no flags that have to
match on both sides: whatever must match is a field here, and a mismatch is simply another namespace. Knows
nothing of memory or of the server.
"""

import functools
import hashlib
import math
from typing import Annotated, Literal, NewType

import msgspec

from kvcellar.errors import BadRequest
from kvcellar.identity.parallel import ParallelStrategy

NamespaceId = NewType("NamespaceId", bytes)
ChunkKey = NewType("ChunkKey", bytes)

ID_BYTES = 16
KEY_BYTES = 16

# From 128 tokens on, one copy per object runs at 99 % of PCIe on an H200 (Llama-8B shapes).
MIN_CHUNK_TOKENS = 128

Name = Annotated[str, msgspec.Meta(max_length=4096)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
LayerBytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
Generation = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]  # another for each update of weights in place
Kind = Literal["full", "sliding", "mla", "recurrent"]


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Arrays, not maps: the field order is the canonical encoding."""


class Layer(_Record, frozen=True):
    name: Name
    block_bytes: LayerBytes  # one block of this layer on one shard
    stage: Annotated[int, msgspec.Meta(ge=0, lt=1024)] = 0  # pipeline stage that holds the layer


class Group(_Record, frozen=True):
    """One engine KV cache group. Two groups of equal spec stay two groups: their block ids are disjoint."""

    block_tokens: Tokens
    layers: Annotated[tuple[Layer, ...], msgspec.Meta(min_length=1, max_length=4096)]
    kind: Kind = "full"
    window_tokens: Tokens | None = None

    def __post_init__(self) -> None:
        if (self.kind == "sliding") != (self.window_tokens is not None):
            raise BadRequest(f"a {self.kind} group with window_tokens={self.window_tokens}")


class BlockHash(_Record, frozen=True):
    """How the engine made the hashes that become chunk keys."""

    algorithm: Name
    block_tokens: Tokens
    seed: Name  # vLLM's NONE_HASH, in hex


class Namespace(_Record, frozen=True, dict=True):  # dict: room for what is worked out once
    engine: Name  # engine kind and the version of its KV layout
    model: Name
    weights: Name  # revision or digest of the weights
    kv_dtype: Name
    kv_layout: Name  # order of heads, tokens, K and V inside a block: what sizes alone do not tell
    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1, max_length=64)]
    parallel: ParallelStrategy
    chunk_tokens: Tokens
    block_hash: BlockHash
    checksum: Name
    quantization: Name = ""
    draft_model: Name = ""
    weights_generation: Generation = 0
    tenant: Name = ""

    def __post_init__(self) -> None:
        for number, group in enumerate(self.groups):
            if self.chunk_tokens % group.block_tokens:
                size = group.block_tokens
                raise BadRequest(
                    f"chunk_tokens={self.chunk_tokens} is no multiple of group {number}'s block of {size}"
                )
            stages = {layer.stage for layer in group.layers}
            if max(stages) >= self.parallel.pp:
                raise BadRequest(f"group {number} has a layer in stage {max(stages)} of {self.parallel.pp}")
            if len(stages) < self.parallel.pp:
                # A shard without a byte of the group would never be written, and the chunk never complete.
                raise BadRequest(
                    f"group {number} has layers in {len(stages)} of {self.parallel.pp} pipeline stages"
                )

    @functools.cached_property
    def encoded(self) -> bytes:
        """Canonical: equal namespaces give equal bytes."""
        return msgspec.msgpack.encode(self)

    @functools.cached_property
    def blocks_per_chunk(self) -> tuple[int, ...]:
        """By group."""
        return tuple(self.chunk_tokens // group.block_tokens for group in self.groups)

    @functools.cached_property
    def object_bytes(self) -> tuple[tuple[int, ...], ...]:
        """By group and pipeline stage: the shards of one stage are alike. Added up once, since there may be
        thousands of layers and a thousand shards.
        """
        return tuple(map(self._stage_bytes, self.groups, self.blocks_per_chunk))

    def _stage_bytes(self, group: Group, blocks: int) -> tuple[int, ...]:
        sizes = [0] * self.parallel.pp
        for layer in group.layers:
            sizes[layer.stage] += blocks * layer.block_bytes
        return tuple(sizes)

    @functools.cached_property
    def id(self) -> NamespaceId:
        return NamespaceId(
            hashlib.blake2b(self.encoded, digest_size=ID_BYTES, person=b"kvcellar-ns").digest()
        )


def decode_namespace(encoded: bytes) -> Namespace:
    try:
        return msgspec.msgpack.decode(encoded, type=Namespace)
    except (msgspec.MsgspecError, BadRequest, UnicodeDecodeError) as error:
        raise BadRequest(f"not a namespace: {error}") from None


def default_chunk_tokens(block_tokens: list[int]) -> int:
    """The smallest multiple of every group's block size that is at least MIN_CHUNK_TOKENS."""
    unit = math.lcm(*block_tokens)
    return unit * math.ceil(MIN_CHUNK_TOKENS / unit)
