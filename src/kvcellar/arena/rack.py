"""Rack: the slabs of one group, one per shard and all with the same number of slots, and their stripe table.

A rack is the unit in which the arena grows and shrinks: made whole or not at all, with every page allocated
(a full tmpfs must be a refusal here, not a SIGBUS in an engine), and removed whole. A slab that was handed
out is never truncated or punched; removing unlinks it, and the pages go when the last process unmaps them.

Making and removing racks is file work and runs outside the event loop. Knows nothing of keys.
"""

import contextlib
import errno
import os
import resource
from pathlib import Path
from typing import NamedTuple

from kvcellar.arena.table import StripeTable, TableId, table_bytes
from kvcellar.errors import Corrupt
from kvcellar.slab import Slab, SlabShape

# Descriptors that are left for connections and tiers, however much memory there is to be had.
_SPARE = 128


class RackSpec(NamedTuple):
    folder: Path
    table_id: TableId
    slot_bytes: tuple[int, ...]  # by shard
    slots: int

    @property
    def shapes(self) -> list[SlabShape]:
        return [SlabShape(self.slots, size) for size in self.slot_bytes]

    @property
    def file_bytes(self) -> int:
        return sum(shape.file_bytes for shape in self.shapes) + table_bytes(self.slots)

    @property
    def table_path(self) -> Path:
        return self.folder / f"g{self.table_id.group}-r{self.table_id.rack}.table"

    def slab_path(self, shard: int) -> Path:
        return self.folder / f"g{self.table_id.group}-r{self.table_id.rack}-s{shard}.slab"


class Rack:
    """Open descriptors of the slabs, to be handed to engines, and the mapped table."""

    def __init__(self, spec: RackSpec, table: StripeTable, descriptors: list[int]) -> None:
        self.spec = spec
        self.table = table
        self.descriptors = descriptors

    @classmethod
    def create(cls, spec: RackSpec) -> "Rack":
        """Make the files and all their pages. On any error nothing is left behind."""
        descriptors: list[int] = []
        try:
            for shard, shape in enumerate(spec.shapes):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptors.append(os.open(spec.slab_path(shard), flags, 0o600))
                _check_descriptors(descriptors[-1])
                os.posix_fallocate(descriptors[-1], 0, shape.file_bytes)
            # The table last: a rack without one was never finished.
            return cls(spec, StripeTable.create(spec.table_path, spec.table_id, spec.slots), descriptors)
        except OSError:
            _unlink(spec)
            _close(descriptors)
            raise

    @classmethod
    def adopt(cls, spec: RackSpec, table: StripeTable) -> "Rack":
        """Take over the slabs of an earlier server, or raise Corrupt."""
        descriptors: list[int] = []
        try:
            for shard, shape in enumerate(spec.shapes):
                descriptors.append(os.open(spec.slab_path(shard), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
                status = os.fstat(descriptors[-1])
                if (
                    status.st_size != shape.file_bytes
                    or status.st_uid != os.geteuid()
                    or status.st_mode & 0o077
                ):
                    raise Corrupt(f"{spec.slab_path(shard)} has another size or owner than it should")
        except OSError as error:
            _close(descriptors)
            raise Corrupt(f"{spec.table_path}: {error}") from None
        except Corrupt:
            _close(descriptors)
            raise
        return cls(spec, table, descriptors)

    def map(self, shard: int) -> Slab:
        """For the server itself. As long as it is mapped it takes one more descriptor: Python's mmap keeps a
        duplicate.
        """
        lowest = os.dup(self.descriptors[shard])
        os.close(lowest)
        _check_descriptors(lowest)
        return Slab(self.descriptors[shard], self.spec.shapes[shard])

    def remove(self) -> None:
        _unlink(self.spec)
        self.close()

    def close(self) -> None:
        _close(self.descriptors)
        self.descriptors = []


def _check_descriptors(newest: int) -> None:
    """A server that has none left for a connection is lost to everybody. The kernel gives the lowest that is
    free: all below the newest are taken.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if newest + _SPARE >= most:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _unlink(spec: RackSpec) -> None:
    # The table first: without it the slabs are nobody's.
    for path in (spec.table_path, *(spec.slab_path(shard) for shard in range(len(spec.slot_bytes)))):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
