"""Stripe: the objects of one (chunk, group) over all shards, and the place they share.

A chunk's shards are always reserved, committed and evicted together, so they are kept at the same slot number
of sibling slabs and the ledger counts them once: a hit of 512 chunks is 512 records at TP=1 and at TP=8
alike.
"""

import msgspec

from kvcellar.identity import ChunkKey
from kvcellar.slab import Place


class Stripe(msgspec.Struct, gc=False, eq=False):
    """gc=False: the cyclic collector must not walk a million of these, and they refer to no other objects."""

    key: ChunkKey
    place: Place
    parent: ChunkKey | None = None  # the chunk before it, here or not
    pins: int = 0  # read leases that hold it
    ready: bool = False  # every shard is committed
    indexed: bool = True  # False once it has left, or was hidden: nobody finds it
    temporary: bool = False  # to be freed when its last reader is done
    visited: bool = False  # used since the eviction policy last looked
