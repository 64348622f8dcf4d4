"""Where an object lies in shared memory, and the header that says which object it is.

Common to all transfers, whatever memory the engine has. Knows nothing of how bytes are moved.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvcellar.errors import BadRequest
from kvcellar.identity import KEY_BYTES, ChunkKey, Namespace, layout_of
from kvcellar.slab import HEADER_MAGIC, OBJECT_HEADER, Bytes

Header = npt.NDArray[np.void]

# OBJECT_HEADER once more, as a struct: 0.3 us to write it, against 4.5 us field by field (EPYC Zen 4,
# 2026-08).
_FIELDS = struct.Struct("<IHHQQ16s16sQ")
assert _FIELDS.size == OBJECT_HEADER.itemsize


class Place(NamedTuple):
    """A slot as it is mapped: its bytes and, beside them, its record of slab.OBJECT_HEADER. Views, not
    copies.
    """

    payload: Bytes
    header: Header  # one record: slab.headers[n:n+1] or slab.headers[n, ...]


class Slots(Protocol):
    """Finds slots. What it raises (a slab that is not mapped, say) reaches whoever asked for the copy."""

    def __call__(self, group: int, stripe: int, /) -> Place: ...


class Stamp:
    """Writes and reads the headers of one namespace, shard and group."""

    def __init__(self, namespace: Namespace, shard: int, group: int) -> None:
        self._what = (HEADER_MAGIC, group, shard, layout_of(namespace, shard, group).object_bytes)
        self._namespace = namespace.id

    def write(self, header: Header, key: ChunkKey, checksum: int) -> None:
        """To be called after the last byte: it is the header that makes the bytes an object."""
        _FIELDS.pack_into(header.data, 0, *self._what, checksum, key, self._namespace, 0)

    def promised(self, header: Header, key: ChunkKey) -> int | None:
        """The checksum of the object in this slot; None when another object lies there, or none."""
        *what, checksum, found, namespace, unused = _FIELDS.unpack(header.tobytes())
        same = (*what, found, namespace, unused) == (*self._what, key, self._namespace, 0)
        return checksum if same else None


def find_places(slots: Slots, group: int, stripes: Sequence[int], object_bytes: int) -> list[Place]:
    """Each stripe's place, checked to have room: a copy never runs over the end of a mapping."""
    if len(set(stripes)) < len(stripes):
        raise BadRequest("a plan that names a slot twice")
    places = [slots(group, stripe) for stripe in stripes]
    for stripe, place in zip(stripes, places, strict=True):
        payload = place.payload
        if (
            payload.dtype != np.uint8
            or payload.ndim != 1
            or payload.size < object_bytes
            or not payload.flags.c_contiguous
        ):
            got = f"{payload.dtype} of shape {payload.shape}"
            raise BadRequest(f"slot {stripe}: {got}, expected uint8, {object_bytes} or more")
        if place.header.dtype != OBJECT_HEADER or place.header.size != 1:
            raise BadRequest(
                f"slot {stripe}: a header of shape {place.header.shape}, expected one OBJECT_HEADER"
            )
    return places


def check_keys(keys: Sequence[ChunkKey], rows: int) -> None:
    if len(keys) != rows or any(len(key) != KEY_BYTES for key in keys):
        lengths = sorted({len(key) for key in keys})
        raise BadRequest(f"{len(keys)} keys of {lengths} bytes, expected {rows} of {KEY_BYTES}")
