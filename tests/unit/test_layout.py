"""How an object is laid out, and that a copy plan covers it exactly once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import BadRequest
from kvcellar.identity import (
    SKIP,
    BlockHash,
    Group,
    Layer,
    LayoutDesc,
    Namespace,
    ParallelStrategy,
    layout_of,
    slot_bytes,
    stripe_bytes,
)
from tests.support import fragments, plan_of


def namespace(parallel: ParallelStrategy, *groups: Group) -> Namespace:
    hashing = BlockHash("sha256_cbor", 16, "00")
    return Namespace(
        engine="vllm/1",
        model="tiny",
        weights="r1",
        kv_dtype="bfloat16",
        kv_layout="NHD",
        groups=groups,
        parallel=parallel,
        chunk_tokens=256,
        block_hash=hashing,
        checksum="linear64",
    )


def layers(*block_bytes: int, stage: int = 0) -> tuple[Layer, ...]:
    return tuple(Layer(f"layers.{stage}.{number}", size, stage) for number, size in enumerate(block_bytes))


# Stage 0 holds three layers, stage 1 two larger ones. A chunk is 16 blocks of attention and 4 of the window.
TWO_STAGES = layers(1000, 1000, 1000) + layers(2000, 4000, stage=1)
ATTENTION, WINDOW = Group(16, TWO_STAGES), Group(64, TWO_STAGES, "sliding", 512)

HEADS_TP2 = namespace(ParallelStrategy(tp=2), Group(16, layers(4096, 4096)))
MLA_TP8 = namespace(ParallelStrategy(tp=8, mla=True), Group(16, layers(1152)))
MLA_TP8_DCP2 = namespace(ParallelStrategy(tp=8, dcp=2, mla=True), Group(16, layers(1152)))
HEADS_TP2_PP2 = namespace(ParallelStrategy(tp=2, pp=2), ATTENTION, WINDOW)
MLA_TP4_PP2 = namespace(ParallelStrategy(tp=4, pp=2, mla=True), ATTENTION, WINDOW)


@pytest.mark.parametrize(
    ("space", "group", "object_bytes"),  # one size per shard
    [
        pytest.param(HEADS_TP2, 0, [131072, 131072], id="heads-tp2"),
        pytest.param(MLA_TP8, 0, [18432], id="mla-tp8"),
        pytest.param(MLA_TP8_DCP2, 0, [18432, 18432], id="mla-tp8-dcp2"),
        pytest.param(HEADS_TP2_PP2, 0, [48000, 48000, 96000, 96000], id="heads-tp2-pp2-attention"),
        pytest.param(HEADS_TP2_PP2, 1, [12000, 12000, 24000, 24000], id="heads-tp2-pp2-window"),
        pytest.param(MLA_TP4_PP2, 0, [48000, 96000], id="mla-tp4-pp2-attention"),
        pytest.param(MLA_TP4_PP2, 1, [12000, 24000], id="mla-tp4-pp2-window"),
    ],
)
def test_objects_have_these_sizes(space, group, object_bytes):
    shards = range(space.parallel.kv_world_size)
    assert [layout_of(space, shard, group).object_bytes for shard in shards] == object_bytes


@pytest.mark.parametrize(
    ("space", "group", "slot_bytes"),  # the object rounded up to pages
    [
        pytest.param(HEADS_TP2, 0, [131072, 131072], id="heads-tp2"),
        pytest.param(MLA_TP8, 0, [20480], id="mla-tp8"),
        pytest.param(HEADS_TP2_PP2, 1, [12288, 12288, 24576, 24576], id="heads-tp2-pp2-window"),
        pytest.param(MLA_TP4_PP2, 0, [49152, 98304], id="mla-tp4-pp2-attention"),
    ],
)
def test_slots_have_these_sizes_and_a_chunk_takes_their_sum(space, group, slot_bytes):
    shards = range(space.parallel.kv_world_size)
    assert [layout_of(space, shard, group).slot_bytes for shard in shards] == slot_bytes
    assert stripe_bytes(space, group) == sum(slot_bytes)


def test_layers_are_added_up_once_however_many_stages_and_shards_there_are():
    walks = 0

    class Layers(tuple[Layer, ...]):
        def __iter__(self):
            nonlocal walks
            walks += 1
            return super().__iter__()

    group = Group(16, Layers(Layer(f"layers.{stage}", 256, stage) for stage in range(64)))
    space = namespace(ParallelStrategy(tp=4, pp=64), group)
    walks = 0
    for _ in range(3):
        assert slot_bytes(space, 0) == (4096,) * 256
        assert stripe_bytes(space, 0) == 4096 * 256
    assert walks == 1


@pytest.mark.parametrize(
    ("object_bytes", "slot_bytes"), [(1, 4096), (4095, 4096), (4096, 4096), (4097, 8192), (1 << 30, 1 << 30)]
)
def test_a_slot_is_the_object_rounded_up_to_pages(object_bytes, slot_bytes):
    assert LayoutDesc(layers(object_bytes), 1).slot_bytes == slot_bytes


def test_a_stage_holds_its_own_layers_in_registered_order():
    mixed = (Layer("c", 1, 1), Layer("b", 2, 0), Layer("a", 3, 1))
    space = namespace(ParallelStrategy(tp=2, pp=2, mla=True), Group(16, mixed))
    names = [[layer.name for layer in layout_of(space, shard, 0).layers] for shard in (0, 1)]
    assert names == [["b"], ["c", "a"]]


def test_layers_follow_each_other_without_gaps():
    assert layout_of(MLA_TP4_PP2, 0, 0).layer_offsets() == [0, 16000, 32000]
    assert layout_of(MLA_TP4_PP2, 1, 1).layer_offsets() == [0, 8000]


def test_two_groups_of_equal_spec_have_layouts_of_their_own():
    space = namespace(ParallelStrategy(), Group(16, layers(64)), Group(16, layers(64)))
    assert layout_of(space, 0, 0) == layout_of(space, 0, 1)
    with pytest.raises(BadRequest):
        layout_of(space, 0, 2)


@pytest.mark.parametrize(("shard", "group"), [(-1, 0), (2, 0), (8, 0), (0, -1), (0, 2)])
def test_a_shard_or_group_that_does_not_exist_is_refused(shard, group):
    with pytest.raises(BadRequest, match=f"no shard {shard} or group {group} in this namespace"):
        layout_of(MLA_TP4_PP2, shard, group)


# -- plans

SMALL = LayoutDesc(layers(10, 30), blocks_per_chunk=2)


def test_fragments_go_layer_by_layer_and_block_by_block():
    plan = plan_of(0, [7, 3], [[11, 12], [13, 14]])
    #  slot, offset, layer, block, length
    assert list(fragments(plan, SMALL)) == [
        (7, 0, 0, 11, 10),
        (7, 10, 0, 12, 10),
        (7, 20, 1, 11, 30),
        (7, 50, 1, 12, 30),
        (3, 0, 0, 13, 10),
        (3, 10, 0, 14, 10),
        (3, 20, 1, 13, 30),
        (3, 50, 1, 14, 30),
    ]


def test_a_skipped_block_keeps_its_place_in_the_object():
    plan = plan_of(0, [7], [[SKIP, 12]])
    skipped = [fragment for fragment in fragments(plan, SMALL) if fragment.block == SKIP]
    assert skipped == [(7, 0, 0, SKIP, 10), (7, 20, 1, SKIP, 30)]


@st.composite
def plans(draw):
    sizes = draw(st.lists(st.integers(1, 100), min_size=1, max_size=5))
    layout = LayoutDesc(layers(*sizes), draw(st.integers(1, 6)))
    places = draw(st.lists(st.integers(0, (1 << 32) - 2), max_size=4, unique=True))
    row = st.lists(
        st.integers(SKIP, 1 << 40), min_size=layout.blocks_per_chunk, max_size=layout.blocks_per_chunk
    )
    return layout, places, [draw(row) for _ in places]


@settings(deadline=None)
@given(plans())
def test_fragments_tile_each_object_exactly_once(made):
    layout, places, blocks = made
    covered: dict[int, int] = dict.fromkeys(places, 0)
    for fragment in fragments(plan_of(0, places, blocks), layout):
        assert fragment.offset == covered[fragment.place]  # no gap, no overlap, in order
        covered[fragment.place] += fragment.length
    assert covered == dict.fromkeys(places, layout.object_bytes)
