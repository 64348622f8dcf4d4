"""The stripe table: what a rack's slots hold, in a file of 64 bytes per slot that survives the server.

    | header: magic, format, boot id, namespace, group, rack, slots | entry 0 | entry 1 | ...
    entry: state, crc32 of (key, parent), key, parent

The file is mapped, so what was written is there after kill -9, in the order it was written. The state byte
comes last when an entry becomes READY and first when it is freed: a half-written entry is never READY.
Engines cannot map this file.
"""

import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvcellar.errors import Corrupt
from kvcellar.identity import ChunkKey, NamespaceId
from kvcellar.slab import whole_pages

FREE, WRITING, READY = 0, 1, 2

_MAGIC = b"KVCELLAR"
_FORMAT = 1
_HEADER = struct.Struct("<8sII36s16sII")
_HEADER_BYTES = 128
_ENTRY = struct.Struct("<B3xI16s16s")
_ENTRY_BYTES = 64
_NO_PARENT = bytes(16)
_SCAN = np.dtype(
    [("state", "u1"), ("pad", "V3"), ("crc", "<u4"), ("key", "V16"), ("parent", "V16"), ("rest", "V24")]
)
assert _SCAN.itemsize == _ENTRY_BYTES


class TableId(NamedTuple):
    """Which rack a table belongs to. A table that says anything else is not adopted."""

    boot: str
    namespace: NamespaceId
    group: int
    rack: int


class Scan(NamedTuple):
    ready: list[tuple[int, ChunkKey, ChunkKey | None]]  # slot, key, parent
    limbo: list[int]  # being written when the server stopped, or torn


class StripeTable:
    def __init__(self, memory: mmap.mmap, slots: int) -> None:
        self.slots = slots
        self._memory = memory

    @classmethod
    def create(cls, path: Path, table_id: TableId, slots: int) -> "StripeTable":
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            size = table_bytes(slots)
            os.posix_fallocate(fd, 0, size)
            table = cls(mmap.mmap(fd, size), slots)
        finally:
            os.close(fd)
        header = _HEADER.pack(
            _MAGIC, _FORMAT, slots, table_id.boot.encode(), table_id.namespace, table_id.group, table_id.rack
        )
        table._memory[: _HEADER.size] = header
        return table

    @classmethod
    def open(cls, path: Path, table_id: TableId) -> "StripeTable":
        """Open an earlier server's table, or raise Corrupt and say why it cannot be believed."""
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise Corrupt(
                    f"{path} is not ours alone (uid {status.st_uid}, mode {status.st_mode & 0o777:o})"
                )
            if status.st_size < _HEADER_BYTES:
                raise Corrupt(f"{path} is cut short")
            memory = mmap.mmap(fd, status.st_size)
        finally:
            os.close(fd)
        magic, version, slots, boot, namespace, group, rack = _HEADER.unpack_from(memory)
        if magic != _MAGIC or version != _FORMAT:
            raise Corrupt(f"{path} has another format")
        if TableId(boot.rstrip(b"\0").decode("ascii", "replace"), namespace, group, rack) != table_id:
            raise Corrupt(f"{path} belongs to another boot, namespace or rack")
        if status.st_size != table_bytes(slots):
            raise Corrupt(f"{path} has {status.st_size} bytes for {slots} slots")
        return cls(memory, slots)

    def write(self, slot: int, key: ChunkKey, parent: ChunkKey | None) -> None:
        parent_key = parent or _NO_PARENT
        crc = zlib.crc32(parent_key, zlib.crc32(key))
        _ENTRY.pack_into(self._memory, _HEADER_BYTES + slot * _ENTRY_BYTES, WRITING, crc, key, parent_key)

    def publish(self, slot: int) -> None:
        self._memory[_HEADER_BYTES + slot * _ENTRY_BYTES] = READY

    def free(self, slot: int) -> None:
        self._memory[_HEADER_BYTES + slot * _ENTRY_BYTES] = FREE

    def withdraw(self, slot: int) -> None:
        """As if it were being written: a successor will not find it, and not reuse it while somebody may read
        it.
        """
        self._memory[_HEADER_BYTES + slot * _ENTRY_BYTES] = WRITING

    def state(self, slot: int) -> int:
        return self._memory[_HEADER_BYTES + slot * _ENTRY_BYTES]

    def scan(self) -> Scan:
        entries = np.frombuffer(self._memory, _SCAN, count=self.slots, offset=_HEADER_BYTES)
        ready, limbo = [], np.flatnonzero((entries["state"] != FREE) & (entries["state"] != READY)).tolist()
        slots = np.flatnonzero(entries["state"] == READY)
        chosen = entries[slots]
        for slot, crc, key, parent in zip(
            slots.tolist(),
            chosen["crc"].tolist(),
            chosen["key"].tolist(),
            chosen["parent"].tolist(),
            strict=True,
        ):
            if zlib.crc32(parent, zlib.crc32(key)) != crc:
                limbo.append(slot)
            else:
                ready.append((slot, ChunkKey(key), ChunkKey(parent) if parent != _NO_PARENT else None))
        return Scan(ready, limbo)


def table_bytes(slots: int) -> int:
    """Whole pages: that is what the file takes, and what the limit counts."""
    return whole_pages(_HEADER_BYTES + slots * _ENTRY_BYTES)
