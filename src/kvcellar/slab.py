"""The slab file: memory for objects, which the server and its engines' ranks map.

    | object headers: 64 bytes per slot, padded to a page | slot 0 | slot 1 | ... | slot n-1 |

The engine that writes an object also writes its header, before it commits: key, size and checksum lie beside
the bytes and never cross a socket. A reader that finds another key or checksum than it expects treats the
object as a miss, so even a slot that was reused under its eyes cannot give it wrong bytes. Whether a slot
holds anything at all is not said here but in the server's own stripe table, which engines cannot map.

Knows the file's shape. Knows nothing of namespaces, leases or who may map it.
"""

import mmap
import os
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt

from kvcellar.errors import Corrupt

PAGE = 4096
HEADER_MAGIC = 0x314C4C43  # "CLL1": the format of header and object; bump the digit when either changes

OBJECT_HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("group", "<u2"),
        ("shard", "<u2"),
        ("object_bytes", "<u8"),
        ("checksum", "<u8"),
        ("key", "<u8", (2,)),
        ("namespace", "<u8", (2,)),
        ("unused", "<u8"),
    ]
)
assert OBJECT_HEADER.itemsize == 64

# A place is one u32 on the wire: the number of a rack in its group, and of a slot in each of the rack's
# slabs.
Place = NewType("Place", int)
SLOT_BITS = 18
MAX_SLOTS_PER_RACK = 1 << SLOT_BITS
MAX_RACKS = (1 << (32 - SLOT_BITS)) - 1
NO_PLACE = 0xFFFF_FFFF

Bytes = npt.NDArray[np.uint8]


def whole_pages(size: int) -> int:
    """The bytes of the pages that so many bytes need."""
    return -(-size // PAGE) * PAGE


def place_of(rack: int, slot: int) -> Place:
    return Place(rack << SLOT_BITS | slot)


def rack_of(place: Place) -> int:
    return place >> SLOT_BITS


def slot_of(place: Place) -> int:
    return place & (MAX_SLOTS_PER_RACK - 1)


class SlabShape(NamedTuple):
    slots: int
    slot_bytes: int

    @property
    def header_bytes(self) -> int:
        return whole_pages(self.slots * OBJECT_HEADER.itemsize)

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.slots * self.slot_bytes


class Slot(NamedTuple):
    """Views of shared memory: a slot's bytes, where they begin, and its row of the slab's headers."""

    payload: Bytes
    address: int
    header: Bytes


class Slab:
    """A mapped slab. Views it hands out stay valid as long as somebody holds them, also after close()."""

    def __init__(self, fd: int, shape: SlabShape) -> None:
        size = os.fstat(fd).st_size
        if size != shape.file_bytes:
            # Mapping past the end of a file turns into SIGBUS on first touch.
            raise Corrupt(f"slab of {size} bytes where {shape.file_bytes} were announced")
        self.shape = shape
        self._bytes: Bytes = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
        headers = self._bytes[: shape.slots * OBJECT_HEADER.itemsize]
        self.headers: Bytes = headers.reshape(shape.slots, OBJECT_HEADER.itemsize)
        self._slots: Bytes = self._bytes[shape.header_bytes :].reshape(shape.slots, shape.slot_bytes)
        self._first = self._slots.ctypes.data

    @property
    def memory(self) -> memoryview:
        """All of it."""
        return self._bytes.data

    def slot(self, number: int) -> Bytes:
        view: Bytes = self._slots[number]
        return view

    def address(self, number: int) -> int:
        """Where a slot begins; to ask its view takes 20 times as long."""
        return self._first + number * self.shape.slot_bytes

    def at(self, number: int) -> Slot:
        return Slot(self._slots[number], self.address(number), self.headers[number])

    @property
    def extent(self) -> tuple[int, int]:
        """Address and bytes of the mapping."""
        return self._bytes.ctypes.data, self._bytes.nbytes
