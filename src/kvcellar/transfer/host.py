"""Moves KV between an engine's blocks in host memory and slots, with a checksum over every byte.

    engine   layer 0: (num_blocks, block_bytes)   layer 1: ...       one row per block id
    slot     | layer 0: block, block, ... | layer 1: block, ... |    object order, see identity/layout.py

Store hashes the bytes in the slot, load hashes them in the engine's blocks: each checks what it has produced,
so a slot that changes while it is read is a failed row and never wrong KV.

Knows no leases: the caller holds slots and blocks as long as a call runs. Loads and
stores may run side by side, since they never share a block.
"""

from collections.abc import Sequence

from kvcellar.errors import BadRequest
from kvcellar.identity import SKIP, ChunkKey, CopyPlan, Namespace, layout_of
from kvcellar.slab import Bytes, Slot
from kvcellar.transfer.checksum import digest_maker
from kvcellar.transfer.slots import Slots, Stamp, check_keys, check_places, find_slots
from kvcellar.transfer.steps import BlockIds, check_blocks, check_layers, check_targets, make_steps


class HostTransfer:
    """The copies of one shard and group."""

    def __init__(self, namespace: Namespace, shard: int, group: int, layers: Sequence[Bytes]) -> None:
        self.layout = layout_of(namespace, shard, group)
        self.group = group
        self.num_blocks = check_layers(layers, self.layout)
        self._new_digest = digest_maker(namespace.checksum)
        self._stamp = Stamp(namespace, shard, group)
        self._steps = list(make_steps(layers, self.layout))

    def store(self, plan: CopyPlan, keys: Sequence[ChunkKey], slots: Slots) -> None:
        """Copy each row's blocks into its slot, then write the slot's header.

        A plan that does not fit, or skips a block, is refused before a byte is copied.
        """
        found = self._check(plan, keys, slots)
        if (plan.blocks == SKIP).any():
            raise BadRequest("a store that skips a block: an object is never stored in part")
        for blocks, key, slot in zip(plan.blocks, keys, found, strict=True):
            self._store_row(blocks, key, slot)

    def load(self, plan: CopyPlan, keys: Sequence[ChunkKey], slots: Slots) -> list[int]:
        """Copy each row's slot into its blocks, except where they are SKIP; return the rows that failed.

        A row fails when its slot holds another object, and then nothing is copied; or bytes that do not match
        their checksum, and then its blocks hold garbage. Raises only for a plan that does not fit, before a
        byte is copied.
        """
        found = self._check(plan, keys, slots)
        check_targets(plan.blocks)
        rows = enumerate(zip(plan.blocks, keys, found, strict=True))
        return [row for row, (blocks, key, slot) in rows if not self._load_row(blocks, key, slot)]

    def _check(self, plan: CopyPlan, keys: Sequence[ChunkKey], slots: Slots) -> list[Slot]:
        places = plan.places.tolist()
        if plan.group != self.group:
            raise BadRequest(f"a plan for group {plan.group}, expected {self.group}")
        check_blocks(plan.blocks, len(places), self.layout, self.num_blocks)
        check_keys(keys, len(places))
        check_places(places)
        return find_slots(slots, self.group, places, self.layout.object_bytes)

    def _store_row(self, blocks: BlockIds, key: ChunkKey, slot: Slot) -> None:
        digest = self._new_digest()
        for step in self._steps:
            step.store(blocks[step.positions], step.within(slot.payload), digest)
        self._stamp.write(slot.header.data, key, digest.intdigest())

    def _load_row(self, blocks: BlockIds, key: ChunkKey, slot: Slot) -> bool:
        promised = self._stamp.promised(slot.header, key)
        if promised is None:
            return False
        digest = self._new_digest()
        skips = bool((blocks == SKIP).any())
        for step in self._steps:
            scatter = step.scatter_some if skips else step.scatter
            scatter(step.within(slot.payload), blocks[step.positions], digest)
        return digest.intdigest() == promised
