"""Memory as a slab gives it to an engine, and values to put there."""

import mmap
import random

from kvcellar.tiers import Buffer

PAGE = 4096
HEADER = 64


class Arena:
    """Some megabytes in one piece, as an engine that registers memory wants them; buffers are cut from it."""

    def __init__(self, size: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, size))
        self._used = 0

    def buffer(self, size: int) -> Buffer:
        """Full of rubbish, so that nothing is right by chance."""
        start = self._used
        self._used += PAGE + -(-size // PAGE) * PAGE
        assert self._used <= len(self.memory), "arena too small for this test"
        header = self.memory[start : start + HEADER]
        header[:] = b"\xee" * HEADER
        slot = self.memory[start + PAGE : self._used]
        slot[: min(size, 64)] = b"\xee" * min(size, 64)
        return Buffer(header, slot, size)

    def value(self, size: int, seed: int = 0) -> Buffer:
        """The same seed and size are the same value."""
        source = random.Random(f"{seed}/{size}")
        made = self.buffer(size)
        made.header[:] = source.randbytes(HEADER)
        made.payload[:] = source.randbytes(size)
        return made


def same(one: Buffer, other: Buffer) -> bool:
    return one.header == other.header and one.payload == other.payload
