"""How an object is laid out, and the plan of a copy between engine blocks and slots.

An object holds one group's blocks of one chunk on one shard, layer after layer, and within a layer block
after block:

    | layer 0: block 0, block 1, ... | layer 1: block 0, block 1, ... | ...   | padding to the slot size |

Derived from the namespace alone, so that server and engines agree without talking about it. Knows no memory:
a plan names places, a transfer engine moves the bytes.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcellar.errors import BadRequest
from kvcellar.identity.namespace import Layer, Namespace
from kvcellar.slab import whole_pages

# In a plan's block table: the chunk has this block, the engine neither gives nor takes it.
SKIP = -1


class LayoutDesc(NamedTuple):
    """The layout of one (shard, group)'s objects."""

    layers: tuple[Layer, ...]
    blocks_per_chunk: int

    @property
    def object_bytes(self) -> int:
        return self.blocks_per_chunk * sum(layer.block_bytes for layer in self.layers)

    @property
    def slot_bytes(self) -> int:
        return whole_pages(self.object_bytes)

    def layer_offsets(self) -> list[int]:
        """Where each layer's run of blocks starts inside the object."""
        offsets, at = [], 0
        for layer in self.layers:
            offsets.append(at)
            at += layer.block_bytes * self.blocks_per_chunk
        return offsets


def layout_of(namespace: Namespace, shard: int, group: int) -> LayoutDesc:
    if not 0 <= shard < namespace.parallel.kv_world_size or not 0 <= group < len(namespace.groups):
        raise BadRequest(f"no shard {shard} or group {group} in this namespace")
    stage = namespace.parallel.stage_of(shard)
    layers = tuple(layer for layer in namespace.groups[group].layers if layer.stage == stage)
    return LayoutDesc(layers, namespace.blocks_per_chunk[group])


def slot_bytes(namespace: Namespace, group: int) -> tuple[int, ...]:
    """By shard: the slots of one stripe. They start on pages: what O_DIRECT and GPU copies want."""
    if not 0 <= group < len(namespace.groups):
        raise BadRequest(f"no group {group} in this namespace")
    per_stage = namespace.parallel.shards_per_stage
    return tuple(whole_pages(size) for size in namespace.object_bytes[group] for _ in range(per_stage))


def stripe_bytes(namespace: Namespace, group: int) -> int:
    """Memory that one chunk takes in one group, over all shards."""
    return sum(slot_bytes(namespace, group))


class CopyPlan(NamedTuple):
    """Which blocks of one group go to, or come from, which slots. Row i: the blocks of the chunk at
    places[i].
    """

    group: int
    places: npt.NDArray[np.uint32]
    blocks: npt.NDArray[np.int64]  # (len(places), blocks_per_chunk); SKIP where nothing is copied
