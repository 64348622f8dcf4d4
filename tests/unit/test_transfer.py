"""KV goes from host blocks to slots and back unchanged, or the row is reported as failed."""

import itertools
import json
import os
import threading
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.bench import copy as bench
from kvcellar.errors import BadRequest
from kvcellar.identity import (
    SKIP,
    BlockHash,
    ChunkKey,
    CopyPlan,
    Group,
    Layer,
    Namespace,
    ParallelStrategy,
    layout_of,
)
from kvcellar.slab import HEADER_MAGIC, OBJECT_HEADER, Bytes, Place, Slab, SlabShape, Slot
from kvcellar.transfer import CHECKSUMS, HostTransfer, block_memory, digest_maker
from tests.support import fragments

SLOTS, NUM_BLOCKS = 4, 24
KEYS = [ChunkKey(bytes([number]) * 16) for number in range(SLOTS)]


def space(sizes: list[int], blocks: int = 3, **changes: Any) -> Namespace:
    """Two equal groups with one layer per size, on two shards."""
    group = Group(16, tuple(Layer(f"layers.{number}", size) for number, size in enumerate(sizes)))
    fields = {"tenant": "", "checksum": "xxh3-64"} | changes
    return Namespace(
        engine="test",
        model="tiny",
        weights="r1",
        kv_dtype="uint8",
        kv_layout="NHD",
        groups=(group, group),
        parallel=ParallelStrategy(tp=2),
        chunk_tokens=16 * blocks,
        block_hash=BlockHash("none", 16, ""),
        **fields,
    )


class World:
    """An engine with random KV and a slab of junk."""

    def __init__(self, sizes: list[int], blocks: int = 3, gap: int = 0) -> None:
        self.namespace = space(sizes, blocks)
        self.layout = layout_of(self.namespace, 0, 0)
        random = np.random.default_rng(len(sizes))
        # Every other layer has gaps between its rows, which must never change.
        widths = [size + gap * (number % 2) for number, size in enumerate(sizes)]
        self.memory = [random.integers(0, 256, (NUM_BLOCKS, width), np.uint8) for width in widths]
        self.layers = [memory[:, :size] for memory, size in zip(self.memory, sizes, strict=True)]
        self.slab = memory_slab(SlabShape(SLOTS, self.layout.slot_bytes))
        self.transfer = HostTransfer(self.namespace, 0, 0, self.layers)

    def slot(self, _group: int, place: Place) -> Slot:
        return self.slab.at(place)

    def snapshot(self) -> list[bytes]:
        slots = [self.slab.slot(number).tobytes() for number in range(SLOTS)]
        return [memory.tobytes() for memory in self.memory] + slots + [self.slab.headers.tobytes()]


def memory_slab(shape: SlabShape) -> Slab:
    descriptor = os.memfd_create("slab")
    os.truncate(descriptor, shape.file_bytes)
    slab = Slab(descriptor, shape)
    os.close(descriptor)
    for number in range(shape.slots):
        slab.slot(number)[:] = 0xAA
    return slab


def plan(*rows: list[int], group: int = 0) -> CopyPlan:
    return CopyPlan(group, np.arange(len(rows), dtype=np.uint32), np.array(rows, np.int64))


@pytest.fixture
def world() -> World:
    """One stored object in slot 0, from blocks 3, 1, 2."""
    world = World([4096, 100, 5000], gap=32)
    world.transfer.store(plan([3, 1, 2]), KEYS[:1], world.slot)
    return world


def load(world: World, *rows: list[int]) -> list[int]:
    return world.transfer.load(plan(*rows), KEYS[: len(rows)], world.slot)


# Sizes on both sides of every threshold in steps.py: gathered hashes, shared runs, blocks larger than a step.
SIZES = st.sampled_from([1, 7, 64, 2047, 2048, 4096, 30_000, 65_536, 600_000])


@st.composite
def journeys(draw: st.DrawFn) -> tuple[World, CopyPlan, CopyPlan]:
    sizes = draw(st.lists(SIZES, min_size=1, max_size=4))
    blocks, rows = draw(st.integers(1, 5)), draw(st.integers(1, SLOTS))
    world = World(sizes, blocks, gap=draw(st.sampled_from([0, 5, 64])))
    order = np.array(draw(st.permutations(range(NUM_BLOCKS))))[: rows * blocks].reshape(rows, blocks)
    target = np.array(draw(st.permutations(range(NUM_BLOCKS))))[: rows * blocks].reshape(rows, blocks)
    skipped = np.array(draw(st.lists(st.booleans(), min_size=rows * blocks, max_size=rows * blocks)))
    places = np.array(draw(st.permutations(range(SLOTS)))[:rows], np.uint32)
    target[skipped.reshape(rows, blocks)] = SKIP
    return world, CopyPlan(0, places, order), CopyPlan(0, places, target)


@settings(max_examples=60, deadline=None)
@given(journeys())
def test_stored_blocks_come_back_into_the_wanted_blocks_and_nothing_else_changes(
    journey: tuple[World, CopyPlan, CopyPlan],
) -> None:
    world, stores, loads = journey
    expected = [memory.copy() for memory in world.memory]
    for source, target in zip(fragments(stores, world.layout), fragments(loads, world.layout), strict=True):
        if target.block != SKIP:
            kv = world.layers[source.layer][source.block]
            expected[target.layer][target.block, : target.length] = kv
    keys = KEYS[: len(stores.places)]
    world.transfer.store(stores, keys, world.slot)
    assert world.transfer.load(loads, keys, world.slot) == []
    assert [memory.tobytes() for memory in world.memory] == [memory.tobytes() for memory in expected]


@settings(max_examples=30, deadline=None)
@given(journeys())
def test_a_slot_holds_the_object_in_object_order_and_its_header(
    journey: tuple[World, CopyPlan, CopyPlan],
) -> None:
    world, stores, _ = journey
    keys = KEYS[: len(stores.places)]
    world.transfer.store(stores, keys, world.slot)
    for part in fragments(stores, world.layout):
        slot = world.slab.slot(part.place)
        assert (slot[part.offset : part.offset + part.length] == world.layers[part.layer][part.block]).all()
    for place, key in zip(stores.places.tolist(), keys, strict=True):
        checksum = xxhash.xxh3_64_intdigest(world.slab.slot(place)[: world.layout.object_bytes].tobytes())
        ids = [np.frombuffer(name, "<u8") for name in (key, world.namespace.id)]
        header = np.array([(HEADER_MAGIC, 0, 0, world.layout.object_bytes, checksum, *ids, 0)], OBJECT_HEADER)
        assert world.slab.headers[place].tobytes() == header.tobytes()


FLIPPED = World([4096, 100, 5000])
FLIPPED.transfer.store(plan([3, 1, 2]), KEYS[:1], FLIPPED.slot)


@settings(max_examples=300, deadline=None)
@given(bit=st.integers(0, FLIPPED.layout.object_bytes * 8 - 1), skip=st.booleans())
def test_one_flipped_bit_of_the_payload_is_a_failed_row(bit: int, skip: bool) -> None:
    byte = FLIPPED.slab.slot(0)[bit // 8 : bit // 8 + 1]
    byte ^= 1 << bit % 8
    assert load(FLIPPED, [SKIP if skip else 7, 8, 9]) == [0]
    byte ^= 1 << bit % 8
    assert load(FLIPPED, [SKIP if skip else 7, 8, 9]) == []


@pytest.mark.parametrize("byte", range(OBJECT_HEADER.itemsize))
def test_one_flipped_bit_of_the_header_is_a_failed_row(world: World, byte: int) -> None:
    world.slab.headers[0, byte] ^= 0x10
    assert load(world, [7, 8, 9]) == [0]


def test_swapped_blocks_are_a_failed_row(world: World) -> None:
    first_layer = world.slab.slot(0)[: 3 * 4096].reshape(3, 4096)
    first_layer[[0, 1]] = first_layer[[1, 0]]
    assert load(world, [7, 8, 9]) == [0]


@pytest.mark.parametrize("skip_all", [False, True])
def test_a_slot_that_was_never_written_is_a_failed_row(world: World, skip_all: bool) -> None:
    wanted = [SKIP] * 3 if skip_all else [10, 11, 12]
    assert load(world, [7, 8, 9], wanted) == [1]


def test_only_the_failed_row_is_reported_and_the_others_are_loaded(world: World) -> None:
    world.transfer.store(plan([3, 1, 2], [4, 5, 6], [0, 1, 2]), KEYS[:3], world.slot)
    world.slab.slot(1)[0] ^= 1
    assert load(world, [10, 11, 12], [13, 14, 15], [16, 17, 18]) == [1]
    for layer in world.layers:
        assert (layer[[10, 11, 12, 16, 17, 18]] == layer[[3, 1, 2, 0, 1, 2]]).all()


def test_another_key_is_a_failed_row_and_changes_no_block(world: World) -> None:
    before = world.snapshot()
    assert world.transfer.load(plan([7, 8, 9]), KEYS[1:2], world.slot) == [0]
    assert world.snapshot() == before


@pytest.mark.parametrize(
    ("changes", "shard", "group"),
    [
        pytest.param({"tenant": "someone else"}, 0, 0, id="namespace"),
        pytest.param({}, 1, 0, id="shard"),
        pytest.param({}, 0, 1, id="group"),
    ],
)
def test_an_object_of_another_identity_is_a_failed_row_and_changes_no_block(
    world: World, changes: dict[str, Any], shard: int, group: int
) -> None:
    before = world.snapshot()
    reader = HostTransfer(space([4096, 100, 5000], **changes), shard, group, world.layers)
    assert reader.load(plan([7, 8, 9], group=group), KEYS[:1], world.slot) == [0]
    assert world.snapshot() == before


class Garbled(np.ndarray):
    """Memory in which nothing arrives as it was sent."""

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, np.zeros_like(value))


@pytest.mark.parametrize("size", [100, 5000, 600_000])
@pytest.mark.parametrize("blocks", [[7, 8, 9], [7, SKIP, 9]])
def test_bytes_are_checked_where_they_have_arrived(size: int, blocks: list[int]) -> None:
    world = World([size])
    world.transfer.store(plan([3, 1, 2]), KEYS[:1], world.slot)
    reader = HostTransfer(world.namespace, 0, 0, [world.layers[0].view(Garbled)])
    assert reader.load(plan(blocks), KEYS[:1], world.slot) == [0]


@pytest.mark.parametrize("size", [100, 5000, 600_000])
def test_bytes_are_hashed_where_they_come_from(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Somebody else who writes to the slot while it is stored does not get a checksum for that."""
    world = World([size])

    class Intruder(Meddler):
        def update(self, data: Any) -> None:
            self._slot[self._change] = 0
            super().update(data)

    with monkeypatch.context() as patch:
        patch.setattr(world.transfer, "_new_digest", lambda: Intruder(world.slab.slot(0), slice(0, 50)))
        world.transfer.store(plan([3, 1, 2]), KEYS[:1], world.slot)
    failed = load(world, [7, 8, 9])
    assert failed == [0] or (world.layers[0][[7, 8, 9]] == world.layers[0][[3, 1, 2]]).all()


class Meddler:
    """A digest that changes a slot as soon as it has seen the first bytes of it."""

    def __init__(self, slot: Bytes, change: slice) -> None:
        self._digest, self._slot, self._change = xxhash.xxh3_64(), slot, change

    def update(self, data: Any) -> None:
        self._digest.update(data)
        self._slot[self._change] = 0

    def intdigest(self) -> int:
        return self._digest.intdigest()


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        pytest.param(slice(0, 1000), [], id="already-copied"),
        pytest.param(slice(1_000_000, 1_000_001), [0], id="ahead"),
    ],
)
def test_a_slot_that_changes_while_it_is_read_fails_exactly_when_the_change_was_copied(
    monkeypatch: pytest.MonkeyPatch, change: slice, failed: list[int]
) -> None:
    world = World([400_000])
    world.transfer.store(plan([3, 1, 2]), KEYS[:1], world.slot)
    monkeypatch.setattr(world.transfer, "_new_digest", lambda: Meddler(world.slab.slot(0), change))
    assert load(world, [7, 8, 9]) == failed
    assert (world.layers[0][7] == world.layers[0][3]).all()


def test_a_load_that_succeeds_never_gave_other_bytes_than_were_stored() -> None:
    world = World([2000, 20_000, 100_000], blocks=2)
    world.transfer.store(plan([0, 1]), KEYS[:1], world.slot)
    original, over = world.slab.slot(0).copy(), threading.Event()

    def scribble() -> None:
        while not over.is_set():
            world.slab.slot(0)[:] = 0
            world.slab.slot(0)[:] = original

    writer = threading.Thread(target=scribble)
    writer.start()
    outcomes = [
        load(world, [2, 3]) or [(layer[[2, 3]] == layer[[0, 1]]).all() for layer in world.layers]
        for _ in range(300)
    ]
    over.set()
    writer.join()
    assert all(outcome in ([0], [True] * 3) for outcome in outcomes)


GOOD = plan([3, 1, 2], [4, 5, 6])
BAD_PLANS = [
    pytest.param(plan([3, 1, 2], [4, 5, NUM_BLOCKS]), KEYS[:2], "no block 24, expected 0 to 23", id="beyond"),
    pytest.param(plan([3, 1, 2], [4, 5, -2]), KEYS[:2], "no block -2, expected 0 to 23", id="below"),
    pytest.param(
        plan([3, 1], [4, 5]), KEYS[:2], r"shape \(2, 2\), expected int64 of shape \(2, 3\)", id="short"
    ),
    pytest.param(GOOD._replace(blocks=GOOD.blocks.astype(np.int32)), KEYS[:2], "int32", id="type"),
    pytest.param(GOOD._replace(group=1), KEYS[:2], "group 1, expected 0", id="group"),
    pytest.param(GOOD._replace(places=np.zeros(2, np.uint32)), KEYS[:2], "a slot twice", id="one-slot"),
    pytest.param(GOOD, KEYS[:3], r"3 keys of \[16\] bytes, expected 2 of 16", id="keys"),
    pytest.param(GOOD, [KEYS[0], ChunkKey(b"short")], r"2 keys of \[5, 16\] bytes", id="short-key"),
]


@pytest.mark.parametrize(("bad", "keys", "message"), BAD_PLANS)
def test_a_plan_that_does_not_fit_is_refused_and_nothing_changes(
    world: World, bad: CopyPlan, keys: list[ChunkKey], message: str
) -> None:
    before = world.snapshot()
    for copy in (world.transfer.store, world.transfer.load):
        with pytest.raises(BadRequest, match=message):
            copy(bad, keys, world.slot)
    assert world.snapshot() == before


def test_an_object_is_never_stored_in_part(world: World) -> None:
    before = world.snapshot()
    with pytest.raises(BadRequest, match="skips a block"):
        world.transfer.store(plan([3, 1, 2], [4, SKIP, 6]), KEYS[:2], world.slot)
    assert world.snapshot() == before


def test_a_load_that_writes_a_block_twice_is_refused(world: World) -> None:
    before = world.snapshot()
    with pytest.raises(BadRequest, match="a block twice"):
        load(world, [7, 8, 9], [10, 11, 7])
    assert world.snapshot() == before


def test_a_slot_that_is_too_small_is_refused(world: World) -> None:
    def small(group: int, place: Place) -> Slot:
        slot = world.slot(group, place)
        return slot._replace(payload=slot.payload[: world.layout.object_bytes - 1])

    with pytest.raises(BadRequest, match="expected contiguous uint8, 27588 or more"):
        world.transfer.load(plan([7, 8, 9]), KEYS[:1], small)


def test_an_empty_plan_copies_nothing(world: World) -> None:
    nothing = CopyPlan(0, np.empty(0, np.uint32), np.empty((0, 3), np.int64))
    world.transfer.store(nothing, [], world.slot)
    assert world.transfer.load(nothing, [], world.slot) == []


WIDE = np.zeros((NUM_BLOCKS, 128), np.uint8)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        pytest.param([WIDE[:, :64]], "memory for 1 layers, expected 2", id="count"),
        pytest.param(
            [WIDE[:, :64], WIDE[:, :65]], r"\(24, 65\), expected uint8 of shape \(24, 64\)", id="width"
        ),
        pytest.param(
            [WIDE[:, :64], WIDE[:9, :64]], r"\(9, 64\), expected uint8 of shape \(24, 64\)", id="blocks"
        ),
        pytest.param([WIDE[:, :64], WIDE[:, :64].view(np.int8)], "layers.1: int8", id="type"),
        pytest.param([WIDE[:, :64], WIDE[:, ::2]], r"strides \(128, 2\)", id="scattered-rows"),
        pytest.param([WIDE[:, :64], WIDE[::-1, :64]], r"strides \(-128, 1\)", id="backwards"),
        pytest.param(
            [WIDE[:, :64], np.broadcast_to(WIDE[0, :64], (24, 64))], r"strides \(0, 1\)", id="one-row"
        ),
    ],
)
def test_memory_that_does_not_fit_the_layout_is_refused(layers: list[Bytes], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        HostTransfer(space([64, 64]), 0, 0, layers)


def test_read_only_memory_is_refused() -> None:
    memory = np.frombuffer(bytes(NUM_BLOCKS * 64), np.uint8).reshape(NUM_BLOCKS, 64)
    with pytest.raises(BadRequest, match="read-only"):
        HostTransfer(space([64]), 0, 0, [memory])


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param(bytearray(6 * 32), id="bytearray"),
        pytest.param(memoryview(bytearray(6 * 32)).cast("f", (6, 8)), id="shaped-buffer"),
        pytest.param(np.zeros(6 * 16, np.float16), id="flat"),
        pytest.param(np.zeros((6, 4, 2, 2), np.float16), id="many-axes"),
        pytest.param(np.zeros((6, 3, 16), np.float16)[:, 1], id="strided-rows"),
        pytest.param(np.zeros((12, 4, 4), np.float16)[::2], id="every-other-block"),
    ],
)
def test_block_memory_is_a_view_of_what_it_was_given(memory: Any) -> None:
    blocks = block_memory(memory, 6)
    blocks[5] = 1
    assert blocks.shape == (6, 32)
    assert blocks.dtype == np.uint8
    assert np.asarray(memory).tobytes().count(1) == 32


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        pytest.param(bytearray(100), r"\(100,\), expected 6 blocks along the first axis", id="remainder"),
        pytest.param(np.zeros((5, 8)), r"\(5, 8\), expected 6 blocks", id="other-count"),
        pytest.param(np.zeros((6, 0)), "expected 6 blocks", id="nothing"),
        pytest.param(np.zeros((6, 4, 4)).swapaxes(1, 2), "expected contiguous", id="transposed"),
    ],
)
def test_memory_without_contiguous_blocks_is_refused(memory: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        block_memory(memory, 6)


def test_an_unknown_checksum_is_refused_with_the_known_names() -> None:
    assert CHECKSUMS == ("xxh3-64", "sum64")
    with pytest.raises(BadRequest, match="unknown checksum 'crc7'; known: xxh3-64, sum64"):
        HostTransfer(space([64], checksum="crc7"), 0, 0, [WIDE[:, :64]])


@pytest.mark.parametrize("name", CHECKSUMS)
@given(data=st.binary(max_size=2000), cuts=st.lists(st.integers(0, 2000)))
def test_a_checksum_does_not_depend_on_where_its_pieces_are_cut(
    name: str, data: bytes, cuts: list[int]
) -> None:
    whole, pieces = digest_maker(name)(), digest_maker(name)()
    whole.update(data)
    edges = [0, *sorted(cuts), len(data)]
    for start, stop in itertools.pairwise(edges):
        pieces.update(np.frombuffer(data, np.uint8)[start:stop])
    assert pieces.intdigest() == whole.intdigest() < 1 << 64


def test_the_copy_benchmark_gives_a_row_for_each_object_and_fragment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "WORKING_SET", 1 << 20)
    result = bench.run_copy([1 << 16, 1 << 18])
    assert [(row["object_bytes"], row["fragment_bytes"]) for row in result["rows"]] == [
        (1 << 16, 1 << 13),
        (1 << 18, 1 << 15),
        (1 << 16, 1 << 12),
        (1 << 18, 1 << 12),
    ]
    assert all(row["load_ratio"] > 0 for row in json.loads(json.dumps(result))["rows"])
    assert bench.copy_table(result).row_count == 4
