"""Token arithmetic: blocks of a run of tokens, hits with windows, what a request loads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import BadRequest
from kvcellar.identity import (
    Group,
    Layer,
    block_range,
    fold_windows,
    loadable_tokens,
    loaded_chunks,
    needed_chunks,
    window_chunks,
)

BLOCK_TOKENS = [256, 64, 64, 4, 8]  # a hybrid model's groups
CHUNK = 256
LAYERS = (Layer("layers.0", 4096),)

# -- blocks


def test_4096_tokens_are_this_many_blocks_per_group():
    counts = [len(block_range(0, 4096, tokens)) for tokens in BLOCK_TOKENS]
    assert counts == [16, 64, 64, 1024, 512]


def test_tokens_1024_to_2048_are_these_blocks_per_group():
    ranges = [block_range(1024, 2048, tokens) for tokens in BLOCK_TOKENS]
    assert ranges == [range(4, 8), range(16, 32), range(16, 32), range(256, 512), range(128, 256)]


def test_tokens_128_to_1024_are_not_aligned_to_the_256_token_group():
    with pytest.raises(BadRequest, match=r"tokens \[128, 1024\) are not aligned to blocks of 256"):
        block_range(128, 1024, 256)
    assert block_range(128, 1024, 64) == range(2, 16)


@pytest.mark.parametrize(("start", "stop"), [(0, 1000), (8, 16), (-16, 16), (32, 16), (0, -16)])
def test_a_run_that_is_no_whole_number_of_blocks_is_refused(start, stop):
    with pytest.raises(BadRequest, match="not aligned"):
        block_range(start, stop, 16)


def test_an_empty_run_has_no_blocks():
    assert list(block_range(1024, 1024, 256)) == []


# -- windows


@pytest.mark.parametrize(
    ("group", "chunks"),
    [
        (Group(16, LAYERS), None),
        (Group(16, LAYERS, "mla"), None),
        (Group(16, LAYERS, "recurrent"), 1),
        (Group(16, LAYERS, "sliding", 1), 1),
        (Group(16, LAYERS, "sliding", 256), 1),  # the hit's last token, computed again, and 255 before it
        (Group(16, LAYERS, "sliding", 257), 2),
        (Group(16, LAYERS, "sliding", 512), 2),
        (Group(16, LAYERS, "sliding", 513), 3),
        (Group(16, LAYERS, "sliding", 4096), 16),
    ],
    ids=lambda value: f"{value.kind}-{value.window_tokens}" if isinstance(value, Group) else str(value),
)
def test_a_hit_needs_this_many_of_a_groups_last_chunks(group, chunks):
    assert window_chunks(group, CHUNK) == chunks


ALL = None  # no window: the whole prefix is needed
WINDOW_TABLE = [
    # presence per group  windows    hit  pinned per group
    (["1111", "0011"], [ALL, 2], 4, ["1111", "0011"]),
    (["1111", "0001"], [ALL, 2], 0, ["0000", "0000"]),
    (["1111", "0001"], [ALL, 1], 4, ["1111", "0001"]),
    (["1110", "1111"], [ALL, 2], 3, ["1110", "0110"]),
    (["1111", "1010"], [ALL, 1], 3, ["1110", "0010"]),
    (["1101", "1111"], [ALL, ALL], 2, ["1100", "1100"]),
    # a short hit fits into the window; windows alone; windows that pull each other down
    (["1000", "1000"], [ALL, 2], 1, ["1000", "1000"]),
    (["0111"], [ALL], 0, ["0000"]),
    (["0110"], [2], 3, ["0110"]),
    (["1101", "1011"], [1, 1], 4, ["0001", "0001"]),
    (["1101", "1010"], [1, 1], 1, ["1000", "1000"]),
    (["1111", "1101", "1011"], [ALL, 2, 1], 1, ["1000", "1000", "1000"]),
    (["1111", "1111", "0111"], [ALL, 3, 4], 0, ["0000", "0000", "0000"]),
]


@pytest.mark.parametrize(("present", "windows", "hit", "pinned"), WINDOW_TABLE)
def test_presence_per_group_gives_the_hit(present, windows, hit, pinned):
    assert fold_windows(4, windows, lambda group, chunk: present[group][chunk] == "1") == hit


@pytest.mark.parametrize(("present", "windows", "hit", "pinned"), WINDOW_TABLE)
def test_a_hit_pins_only_what_it_reads(present, windows, hit, pinned):
    marked = [[chunk for chunk, mark in enumerate(row) if mark == "1"] for row in pinned]
    assert [list(needed_chunks(hit, window)) for window in windows] == marked


def test_only_the_chunks_asked_for_can_hit():
    assert fold_windows(0, [ALL, 1], lambda group, chunk: True) == 0
    assert fold_windows(3, [ALL, 1], lambda group, chunk: True) == 3


@st.composite
def lookups(draw):
    chunks = draw(st.integers(0, 8))
    windows = draw(st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=4))
    row = st.lists(st.sampled_from([True, True, True, False]), min_size=chunks, max_size=chunks)
    return chunks, windows, [draw(row) for _ in windows]


@settings(deadline=None, max_examples=500)
@given(lookups())
def test_the_hit_is_the_longest_that_every_group_can_serve(lookup):
    chunks, windows, present = lookup

    def served(hit: int) -> bool:
        return all(
            present[group][chunk]
            for group, window in enumerate(windows)
            for chunk in range(hit)
            if window is None or chunk >= hit - window
        )

    longest = max(hit for hit in range(chunks + 1) if served(hit))
    assert fold_windows(chunks, windows, lambda group, chunk: present[group][chunk]) == longest


@settings(deadline=None)
@given(lookups())
def test_presence_is_asked_only_for_chunks_of_the_lookup(lookup):
    chunks, windows, present = lookup
    asked = set()

    def noted(group, chunk):
        asked.add(chunk)
        return present[group][chunk]

    fold_windows(chunks, windows, noted)
    assert asked <= set(range(chunks))


@pytest.mark.parametrize(
    "windows", [[ALL], [1], [3], [100], [100, 100], [512, 512], [512, ALL], [ALL, 300, 7, 512]]
)
def test_a_group_is_asked_about_each_chunk_at_most_once(windows):
    """Also where the gaps of one move the end of the others' windows again and again."""
    asked = []

    def every_fourth_of_the_last_is_gone(group, chunk):
        asked.append((group, chunk))
        return group < len(windows) - 1 or chunk % 4 > 0

    fold_windows(512, windows, every_fourth_of_the_last_is_gone)
    assert len(asked) == len(set(asked))


@settings(deadline=None)
@given(lookups())
def test_so_it_is_whatever_is_there(lookup):
    chunks, windows, present = lookup
    asked = []

    def noted(group, chunk):
        asked.append((group, chunk))
        return present[group][chunk]

    fold_windows(chunks, windows, noted)
    assert len(asked) == len(set(asked))


# -- one request


@pytest.mark.parametrize(
    ("engine_hit", "cache_hit", "prompt", "block", "tokens", "chunks"),
    [
        # chunks 0 and 1 given back, 2 and 3 loaded but for the 192 tokens up to 704 that the engine has
        (704, 1024, 2000, 16, 320, range(2, 4)),
        (704, 1024, 1024, 16, 319, range(2, 4)),
        # one token is left to compute, and no more
        (0, 1024, 1024, 16, 1023, range(4)),
        (0, 1024, 1024, 256, 1023, range(4)),
        (0, 1024, 1025, 16, 1024, range(4)),
        # the engine ends on a chunk, or has nothing
        (512, 1024, 2000, 16, 512, range(2, 4)),
        (0, 256, 2000, 16, 256, range(1)),
        (1008, 1024, 2000, 16, 16, range(3, 4)),
    ],
)
def test_a_request_loads_what_the_engine_lacks(engine_hit, cache_hit, prompt, block, tokens, chunks):
    assert loadable_tokens(engine_hit, cache_hit, prompt, block) == tokens
    assert loaded_chunks(engine_hit, tokens, CHUNK) == chunks


@pytest.mark.parametrize(
    ("engine_hit", "cache_hit", "prompt", "block"),
    [
        (0, 0, 2000, 16),
        (704, 512, 2000, 16),
        (1024, 1024, 2000, 16),
        (1008, 1024, 1024, 16),  # all but the last block, which has a token to compute in any case
        (768, 1024, 1024, 256),
        (0, 0, 0, 16),
        (0, 256, 1, 16),
    ],
)
def test_a_request_with_nothing_to_gain_loads_nothing(engine_hit, cache_hit, prompt, block):
    assert loadable_tokens(engine_hit, cache_hit, prompt, block) == 0


def test_an_engine_that_takes_less_than_it_was_offered_loads_fewer_chunks():
    assert loaded_chunks(704, 320 - 256, CHUNK) == range(2, 3)


@settings(deadline=None)
@given(
    engine_blocks=st.integers(0, 100),
    cache_chunks=st.integers(0, 8),
    prompt=st.integers(1, 2500),
    block=st.sampled_from([16, 64, 256]),
)
def test_a_load_starts_where_the_engine_ends_and_leaves_a_token(engine_blocks, cache_chunks, prompt, block):
    engine_hit, cache_hit = min(engine_blocks * block, prompt // block * block), cache_chunks * CHUNK
    if tokens := loadable_tokens(engine_hit, cache_hit, prompt, block):
        stop, chunks = engine_hit + tokens, loaded_chunks(engine_hit, tokens, CHUNK)
        assert chunks.start * CHUNK <= engine_hit < (chunks.start + 1) * CHUNK
        assert (chunks.stop - 1) * CHUNK < stop <= chunks.stop * CHUNK <= cache_hit
        assert stop < prompt
        assert stop == prompt - 1 or stop == cache_hit
        assert tokens >= block - 1
