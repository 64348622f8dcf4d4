"""Who holds which part of the KV: ranks, shards, writers and readers.

Knows how engines divide KV over their ranks. Knows nothing of bytes, sockets or leases.

Ranks are numbered as vLLM does it: tensor-parallel groups are runs of consecutive ranks, so with TP=4, PP=2
the TP groups are [0..3] and [4..7]. Ordinary attention gives every rank heads of its own: each rank is a
shard. With MLA the latent KV is equal on all tensor-parallel ranks, so tensor parallelism is left out of the
division and only decode-context parallelism (DCP), which splits the sequence inside a TP group, divides it
further.
"""

from typing import Annotated

import msgspec

from kvcellar.errors import BadRequest

MAX_WORLD_SIZE = 1024

Degree = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)]


class ParallelStrategy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    tp: Degree = 1
    pp: Degree = 1
    dcp: Degree = 1
    # KV that is the same on every tensor-parallel rank. False for MLA models that also carry recurrent state:
    # that state is divided like ordinary heads, so the whole model is.
    mla: bool = False

    def __post_init__(self) -> None:
        if self.dcp > self.tp:
            raise BadRequest(f"dcp={self.dcp} does not fit into tp={self.tp}")
        if self.world_size > MAX_WORLD_SIZE:
            raise BadRequest(f"a world of {self.world_size} ranks; at most {MAX_WORLD_SIZE} are allowed")

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    @property
    def shards_per_stage(self) -> int:
        return self.dcp if self.mla else self.tp

    @property
    def kv_world_size(self) -> int:
        return self.shards_per_stage * self.pp

    def kv_worker_id(self, rank: int) -> int:
        """The shard that a rank reads, and writes if it is a writer."""
        self._check(rank)
        stage, rank_in_group = divmod(rank, self.tp)
        return stage * self.shards_per_stage + rank_in_group % self.shards_per_stage

    def is_writer(self, rank: int) -> bool:
        """Exactly one rank writes each shard: the first that holds it."""
        self._check(rank)
        return rank % self.tp < self.shards_per_stage

    def stage_of(self, shard: int) -> int:
        """The pipeline stage, and so the layers, that a shard covers."""
        return shard // self.shards_per_stage

    @property
    def writer_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if self.is_writer(rank))

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise BadRequest(f"rank {rank} is not in a world of {self.world_size}")
