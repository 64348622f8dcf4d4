"""Stripes as tiers see them: named objects, one per shard, with their bytes in slabs that the server maps.

The server maps a slab only when a tier reads or writes in it. Whoever asks for a buffer holds the stripe (a
pin, or the place it is being written to), so the rack cannot be taken back meanwhile. When it is, the server
unmaps it like everybody else, or its memory would go to nobody.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

from kvcellar.arena import Arena, RackKey
from kvcellar.errors import BadRequest
from kvcellar.identity import ChunkKey, NamespaceId
from kvcellar.ledger import Room
from kvcellar.slab import Place, Slab, rack_of, slot_of
from kvcellar.tiers.engine import Buffer, object_name
from kvcellar.tiers.seal import Seal

log = logging.getLogger(__name__)

_MAX_GOODS = 64


class StoredObject(NamedTuple):
    name: str
    buffer: Buffer
    seal: Seal


class Goods:
    """What is the same for all objects of one namespace."""

    def __init__(self, room: Room) -> None:
        namespace = room.namespace
        self.room = room
        self.namespace_id: NamespaceId = namespace.id
        self.shards = namespace.parallel.kv_world_size
        self.seals = [
            [Seal(namespace, shard, group) for shard in range(self.shards)]
            for group in range(len(namespace.groups))
        ]

    def probe_name(self, group: int, key: ChunkKey) -> str:
        """The object whose presence speaks for the stripe. If it lies, reading the others will show."""
        return object_name(self.namespace_id, key, group, self.shards - 1)


class Objects:
    def __init__(self, arena: Arena, unmapped: Callable[[memoryview], None] = lambda _: None) -> None:
        self._arena = arena
        self._unmapped = unmapped  # is told of memory that no buffer will be cut from again
        self._goods: dict[Room, Goods | None] = {}
        self._slabs: dict[tuple[RackKey, int], Slab] = {}

    def goods(self, room: Room) -> Goods | None:
        """None: objects of this namespace cannot be verified here, so they do not leave memory."""
        if room not in self._goods:
            if len(self._goods) >= _MAX_GOODS:
                self._goods.clear()  # most are of engines long gone; the others are made again
            try:
                self._goods[room] = Goods(room)
            except BadRequest as error:
                log.warning("%r stays in memory, no tier can check it: %s", room.namespace.model, error)
                self._goods[room] = None
        return self._goods[room]

    def of_stripe(self, goods: Goods, group: int, key: ChunkKey, place: Place) -> list[StoredObject]:
        return [
            StoredObject(
                object_name(goods.namespace_id, key, group, shard),
                self._buffer(goods, group, shard, place),
                goods.seals[group][shard],
            )
            for shard in range(goods.shards)
        ]

    def _buffer(self, goods: Goods, group: int, shard: int, place: Place) -> Buffer:
        """Raises OSError or Corrupt where the slab cannot be mapped."""
        key, slot = RackKey(goods.namespace_id, group, rack_of(place)), slot_of(place)
        slab = self._slabs.get((key, shard))
        if slab is None:
            slab = self._slabs[key, shard] = self._arena.racks[key].map(shard)
        size = goods.seals[group][shard].size
        return Buffer(slab.headers[slot].data, slab.slot(slot).data, size, slab.memory)

    def forget(self, key: RackKey) -> None:
        """The rack is being returned; its number may come again."""
        for at in [at for at in self._slabs if at[0] == key]:
            self._unmapped(self._slabs.pop(at).memory)
