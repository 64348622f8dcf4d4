"""The sketch: what memory may hold, in a megabyte that engines read without asking anybody.

A counter for every key; many keys have the same. Zero says for sure that none of them is in memory: a new
prompt need not wait for the server to say so. Anything else says nothing, and the server is asked. Keys of
all namespaces and groups are counted alike, since a counter that is too high costs no more than the question.

Made by the server, which alone writes to it; it goes with the server. Engines cannot write to it, nor cut it
short under the server's hands.
"""

import fcntl
import logging
import mmap
import os

from kvcellar.errors import Corrupt
from kvcellar.identity import ChunkKey

log = logging.getLogger(__name__)

SKETCH_BYTES = 1 << 20
_FULL = 255  # not counted any further, so it can never be counted down: it stays


class Sketch:
    """An engine's: to be read."""

    def __init__(self, fd: int, access: int = mmap.ACCESS_READ) -> None:
        if os.fstat(fd).st_size != SKETCH_BYTES:
            raise Corrupt(f"a sketch has {SKETCH_BYTES} bytes")
        self._counters = memoryview(mmap.mmap(fd, SKETCH_BYTES, access=access))

    def may_have(self, key: ChunkKey) -> bool:
        return self._counters[_counter(key)] > 0


class OwnSketch(Sketch):
    """The server's, with a descriptor for engines."""

    def __init__(self) -> None:
        fd = os.memfd_create("kvcellar-sketch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, SKETCH_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            super().__init__(fd, mmap.ACCESS_WRITE)
            self.descriptor = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)

    def add(self, key: ChunkKey) -> None:
        at = _counter(key)
        if self._counters[at] < _FULL:
            self._counters[at] += 1

    def drop(self, key: ChunkKey) -> None:
        at = _counter(key)
        if self._counters[at] < _FULL:
            self._counters[at] -= 1

    def close(self) -> None:
        os.close(self.descriptor)


def make_sketch() -> OwnSketch | None:
    """None where the kernel has other rules for such memory: engines can do without."""
    try:
        return OwnSketch()
    except OSError as error:
        log.warning("no sketch, so that engines ask for every prompt: %s", error.strerror)
        return None


def _counter(key: ChunkKey) -> int:
    """Keys are hashes: any of their bits will do."""
    return int.from_bytes(key[:4], "little") & (SKETCH_BYTES - 1)
