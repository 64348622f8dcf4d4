"""What the two sides of the connector tell each other, inside vLLM's own metadata.

Places and block ids, never token ids. Scheduler to workers: load and store jobs. Workers to scheduler: which
stores are over, and which loads failed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

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
    per_chunk = namespace.chunk_tokens // namespace.groups[group].block_tokens
    return GroupCopy(
        group,
        np.fromiter(places.values(), dtype=np.uint32, count=len(places)),
        np.asarray(rows, dtype=np.int64).reshape(len(rows), per_chunk),
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


@dataclass
class CellarMetadata(KVConnectorMetadata):
    namespace: bytes = b""  # encoded; empty while the scheduler has none
    loads: list[Job] = field(default_factory=list)
    stores: list[Job] = field(default_factory=list)
    idle: bool = False  # the step has no forward


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What ranks tell the scheduler side beyond what vLLM asks them."""

    stores: Counter[int] = field(default_factory=Counter)  # ranks that are done with a job, well or not
    failed: set[str] = field(default_factory=set)  # requests whose load failed

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.stores + other.stores, self.failed | other.failed)


@dataclass
class TensorLayout(KVConnectorHandshakeMetadata):
    """The KV that one rank has: the layers of its pipeline stage, and how they lie in memory."""

    groups: list[dict[str, int]]  # by group: bytes of a block, by layer
    layers: dict[str, str] = field(default_factory=dict)  # what one block is made of
    problem: str = ""  # why this rank cannot take part
