"""Who writes, who reads: every rank, for every way to divide the KV."""

from collections import Counter
from typing import NamedTuple

import pytest

from kvcellar.errors import BadRequest
from kvcellar.identity import ParallelStrategy


class Row(NamedTuple):
    mla: bool
    tp: int
    pp: int
    dcp: int
    worker_ids: list[int]  # kv_worker_id per rank
    readers: list[int]  # per shard, so its length is kv_world_size
    writers: list[int]

    @property
    def strategy(self) -> ParallelStrategy:
        return ParallelStrategy(tp=self.tp, pp=self.pp, dcp=self.dcp, mla=self.mla)

    def __str__(self) -> str:
        return f"{'mla' if self.mla else 'heads'}-tp{self.tp}-pp{self.pp}-dcp{self.dcp}"


NO, YES, ALL = False, True, list(range(8))
TABLE = [
    # mla TP PP DCP  kv_worker_id per rank     readers per shard  writer ranks
    Row(NO, 1, 1, 1, [0], [1], [0]),
    Row(NO, 8, 1, 1, ALL, [1] * 8, ALL),
    Row(NO, 4, 2, 1, ALL, [1] * 8, ALL),
    Row(NO, 8, 1, 2, ALL, [1] * 8, ALL),
    Row(YES, 2, 1, 1, [0, 0], [2], [0]),
    Row(YES, 8, 1, 1, [0] * 8, [8], [0]),
    Row(YES, 4, 2, 1, [0, 0, 0, 0, 1, 1, 1, 1], [4, 4], [0, 4]),
    Row(YES, 8, 1, 4, [0, 1, 2, 3, 0, 1, 2, 3], [2, 2, 2, 2], [0, 1, 2, 3]),
    Row(YES, 4, 2, 2, [0, 1, 0, 1, 2, 3, 2, 3], [2, 2, 2, 2], [0, 1, 4, 5]),
    Row(YES, 6, 1, 4, [0, 1, 2, 3, 0, 1], [2, 2, 1, 1], [0, 1, 2, 3]),
]
each_row = pytest.mark.parametrize("row", TABLE, ids=str)
mla_rows_without_dcp = [row for row in TABLE if row.mla and row.dcp == 1]


def readers(strategy: ParallelStrategy) -> list[int]:
    """By shard."""
    found = Counter(map(strategy.kv_worker_id, range(strategy.world_size)))
    return [found[shard] for shard in range(strategy.kv_world_size)]


@each_row
def test_kv_is_divided_over_this_many_shards(row):
    assert row.strategy.kv_world_size == len(row.readers)


@each_row
def test_each_rank_holds_this_shard(row):
    strategy = row.strategy
    assert [strategy.kv_worker_id(rank) for rank in range(strategy.world_size)] == row.worker_ids


@each_row
def test_each_object_has_this_many_readers(row):
    assert readers(row.strategy) == row.readers


@each_row
def test_these_ranks_write(row):
    strategy = row.strategy
    assert list(strategy.writer_ranks) == row.writers
    assert [rank for rank in range(strategy.world_size) if strategy.is_writer(rank)] == row.writers


@each_row
def test_every_shard_has_exactly_one_writer(row):
    written = [row.strategy.kv_worker_id(rank) for rank in row.strategy.writer_ranks]
    assert sorted(written) == list(range(row.strategy.kv_world_size))


@each_row
def test_a_rank_and_its_shard_are_in_the_same_pipeline_stage(row):
    strategy = row.strategy
    stages = [strategy.stage_of(strategy.kv_worker_id(rank)) for rank in range(strategy.world_size)]
    assert stages == [rank // row.tp for rank in range(strategy.world_size)]


@pytest.mark.parametrize("row", mla_rows_without_dcp, ids=str)
def test_mla_leaves_tensor_parallelism_out_of_the_division(row):
    strategy = row.strategy
    assert strategy.kv_world_size == strategy.world_size // row.tp
    assert all(strategy.kv_worker_id(rank) == rank // row.tp for rank in range(strategy.world_size))
    assert list(strategy.writer_ranks) == [rank for rank in range(strategy.world_size) if rank % row.tp == 0]


def test_tp4_pp2_makes_pp_groups_of_ranks_four_apart():
    strategy = ParallelStrategy(tp=4, pp=2)
    pp_groups = [[0, 4], [1, 5], [2, 6], [3, 7]]
    stages = [[strategy.stage_of(strategy.kv_worker_id(rank)) for rank in group] for group in pp_groups]
    assert stages == [[0, 1]] * 4


@pytest.mark.parametrize(
    ("strategy", "objects", "stores", "reader_shares"),
    [
        (ParallelStrategy(tp=8, mla=True), 1, 1, 8),
        (ParallelStrategy(tp=4, pp=2, mla=True), 2, 2, 8),
        (ParallelStrategy(tp=8), 8, 8, 8),
    ],
    ids=str,
)
def test_one_chunk_costs(strategy, objects, stores, reader_shares):
    shards = range(strategy.kv_world_size)
    assert len(shards) == objects
    assert len(strategy.writer_ranks) == stores
    assert sum(readers(strategy)) == reader_shares


def test_mla_with_recurrent_state_is_divided_like_ordinary_attention():
    # Such a model registers mla=False; its ranks hold state of their own.
    assert ParallelStrategy(tp=4, mla=False).kv_world_size == 4


@pytest.mark.parametrize("method", ["kv_worker_id", "is_writer"])
@pytest.mark.parametrize("rank", [-1, 8, 1 << 40])
def test_a_rank_outside_the_world_is_refused(method, rank):
    with pytest.raises(BadRequest, match=f"rank {rank} is not in a world of 8"):
        getattr(ParallelStrategy(tp=4, pp=2), method)(rank)


def test_dcp_must_fit_into_the_tp_group():
    with pytest.raises(BadRequest, match="dcp=4 does not fit into tp=2"):
        ParallelStrategy(tp=2, dcp=4)
    assert ParallelStrategy(tp=4, dcp=4, mla=True).kv_world_size == 4
