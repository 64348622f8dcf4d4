"""The world of a fault run: who stores what, and the true bytes of every object. The same in every process.

Knows no sockets and no processes.
"""

import hashlib
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcellar.identity import (
    BlockHash,
    ChunkKey,
    Group,
    Layer,
    Namespace,
    ParallelStrategy,
    layout_of,
)
from kvcellar.slab import Bytes

CHUNK_TOKENS, BLOCK_TOKENS = 256, 64
ROOTS, BRANCHES = 12, 8
ROOT_CHUNKS, BRANCH_CHUNKS = 6, 6
PROMPTS = ROOTS * BRANCHES

# Everything of all namespaces takes about 83 MiB: half of it fits, and there is always something to evict.
MEMORY = 40 << 20
DISK = 60 << 20  # the disk has to evict too


class Plan(NamedTuple):
    """One engine of the run."""

    name: str
    space: str  # its namespace
    one_process: bool  # scheduler and worker in one, as vLLM has it without tensor parallelism


PLANS = (
    Plan("solo", "gqa", one_process=True),
    Plan("twin", "gqa", one_process=True),
    Plan("pair", "gqa", one_process=False),
    Plan("tp2", "tp2", one_process=False),
    Plan("mla", "mla", one_process=False),
)


def _namespace(name: str, groups: tuple[Group, ...], parallel: ParallelStrategy) -> Namespace:
    return Namespace(
        engine="chaos/1",
        model=name,
        weights="sha256:ab",
        kv_dtype="bfloat16",
        kv_layout="NHD",
        groups=groups,
        parallel=parallel,
        chunk_tokens=CHUNK_TOKENS,
        block_hash=BlockHash("blake2b", BLOCK_TOKENS, "00"),
        checksum="xxh3-64",
    )


def _layers(count: int, block_bytes: int) -> tuple[Layer, ...]:
    return tuple(Layer(f"layers.{number}", block_bytes) for number in range(count))


SPACES = {
    # 32 KiB an object
    "gqa": _namespace("gqa", (Group(BLOCK_TOKENS, _layers(2, 4096)),), ParallelStrategy()),
    # 16 KiB and 8 KiB on each of two shards, the latter with a sliding window of two chunks
    "tp2": _namespace(
        "tp2",
        (
            Group(BLOCK_TOKENS, _layers(2, 2048)),
            Group(BLOCK_TOKENS, _layers(1, 2048), kind="sliding", window_tokens=2 * CHUNK_TOKENS),
        ),
        ParallelStrategy(tp=2),
    ),
    # 48 KiB, the same on both ranks: one writes, both read
    "mla": _namespace(
        "mla", (Group(BLOCK_TOKENS, _layers(3, 4096), kind="mla"),), ParallelStrategy(tp=2, mla=True)
    ),
}


@cache
def prompt(number: int) -> tuple[ChunkKey, ...]:
    """The chunk keys of one prompt; every BRANCHES prompts begin alike."""
    root = number // BRANCHES
    names = [f"root/{root}/{at}" for at in range(ROOT_CHUNKS)]
    names += [f"branch/{number}/{at}" for at in range(BRANCH_CHUNKS)]
    return tuple(ChunkKey(hashlib.blake2b(name.encode(), digest_size=16).digest()) for name in names)


_WORDS = np.random.Generator(np.random.PCG64(7)).integers(0, 2**64, 48 << 7, np.uint64)


def truth(space: str, shard: int, group: int, key: ChunkKey) -> Bytes:
    """The bytes of one object. No two objects agree in more than a word here and there."""
    seed = hashlib.blake2b(key, digest_size=16, person=f"{space}/{shard}/{group}".encode()).digest()
    factor, addend = (np.uint64(int.from_bytes(seed[at : at + 8], "little")) for at in (0, 8))
    words: npt.NDArray[np.uint64] = _WORDS[: object_bytes(space, shard, group) // 8]
    return (words * (factor | np.uint64(1)) + addend).view(np.uint8)


@cache
def object_bytes(space: str, shard: int, group: int) -> int:
    return layout_of(SPACES[space], shard, group).object_bytes
