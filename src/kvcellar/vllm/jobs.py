"""What is to be copied: places and block ids, never token ids. Knows nothing of vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcellar.identity import ChunkKey, Namespace


@dataclass
class GroupCopy:
    """The part of a job in one group: row i is one chunk's slot and blocks (SKIP where nothing is copied)."""

    group: int
    places: npt.NDArray[np.uint32]
    blocks: npt.NDArray[np.int64]
    chunks: list[int]  # of the lease, one per row
    keys: list[ChunkKey]


def group_copy(
    namespace: Namespace,
    group: int,
    places: dict[int, int],
    rows: list[list[int]],
    keys: Sequence[ChunkKey],
) -> GroupCopy:
    """`places` by chunk, with the rows of block ids in the same order; `keys` of all chunks."""
    return GroupCopy(
        group,
        np.fromiter(places.values(), dtype=np.uint32, count=len(places)),
        np.asarray(rows, dtype=np.int64).reshape(len(rows), namespace.blocks_per_chunk[group]),
        list(places),
        [keys[chunk] for chunk in places],
    )


@dataclass
class Job:
    id: int
    request_id: str
    lease: int
    first: int  # chunks of the lease that this job answers for
    stop: int
    copies: list[GroupCopy]
