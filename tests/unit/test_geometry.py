"""Where a block's bytes are, for the shapes and orders that attention backends use."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import BadRequest
from kvcellar.transfer.geometry import block_shape, describe

BLOCKS = 5


def elements(strides):
    return [stride // 2 for stride in strides]


@pytest.mark.parametrize(
    ("shape", "order", "pieces", "run"),
    [
        ((BLOCKS, 16, 8, 256), (0, 1, 2, 3), 1, 65536),  # tokens, heads, K and V of a head
        ((BLOCKS, 8, 16, 256), (0, 2, 1, 3), 1, 65536),  # heads first in name, tokens first in memory
        ((BLOCKS, 2, 16, 8, 128), (0, 1, 2, 3, 4), 1, 65536),  # K, then V, of a block
        ((2, BLOCKS, 16, 8, 128), (0, 1, 2, 3, 4), 2, 32768),  # K of all blocks, then V
        ((BLOCKS, 16, 576), (0, 1, 2), 1, 18432),  # MLA
        ((BLOCKS * 4, 16, 8, 128), (0, 1, 2, 3), 1, 131072),  # the backend's blocks are a quarter of ours
    ],
)
def test_known_layouts(shape, order, pieces, run):
    memory = np.zeros([shape[axis] for axis in order], np.int16)
    view = memory.transpose(np.argsort(order))
    assert view.shape == shape
    found = block_shape(shape, elements(view.strides), 2, BLOCKS)
    assert (len(found.pieces), found.run) == (pieces, run)
    assert found.block_bytes * BLOCKS == memory.nbytes


def test_layers_that_share_a_block_are_found_apart():
    whole = np.zeros((BLOCKS, 3, 16, 8, 64), np.int16)
    found = block_shape(whole[:, 1].shape, elements(whole[:, 1].strides), 2, BLOCKS)
    assert found.stride == 3 * found.run == 3 * 16 * 8 * 64 * 2


@given(st.permutations(range(4)), st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)))
def test_pieces_hold_every_byte_of_a_block_once(order, sizes):
    logical = (BLOCKS, *sizes)
    memory = np.arange(np.prod(logical), dtype=np.int16).reshape([logical[axis] for axis in order])
    view = memory.transpose(np.argsort(order))
    found = block_shape(view.shape, elements(view.strides), 2, BLOCKS)
    raw = memory.reshape(-1).view(np.uint8)
    for block in range(BLOCKS):
        starts = [block * found.stride + piece for piece in found.pieces]
        mine = np.concatenate([raw[start : start + found.run] for start in starts]).view(np.int16)
        assert sorted(mine.tolist()) == sorted(view[block].reshape(-1).tolist())


def test_a_description_is_the_same_whatever_the_number_of_blocks():
    for split, other in itertools.pairwise((5, 50, 500)):
        few, many = (np.zeros((2, blocks, 16, 8), np.int16) for blocks in (split, other))
        assert describe(few.shape, elements(few.strides), split) == describe(
            many.shape, elements(many.strides), other
        )
    heads_first = np.zeros((9, 8, 16), np.int16).transpose(0, 2, 1)
    tokens_first = np.zeros((9, 16, 8), np.int16)
    texts = [describe(one.shape, elements(one.strides), 9) for one in (heads_first, tokens_first)]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("shape", "strides", "blocks", "why"),
    [
        ((7, 16), (16, 1), 5, "expected 5 blocks along an outer axis"),
        ((2, 16), (16, 1), 2, "may be that of K and V"),
        ((5, 16), (8, 1), 5, "overlaps itself"),
        ((5, 4, 16), (64, 0, 1), 5, "overlaps itself"),
        ((5, 5000, 2), (20000, 4, 1), 5, "5000 pieces"),
    ],
)
def test_what_cannot_be_copied_is_refused(shape, strides, blocks, why):
    with pytest.raises(BadRequest, match=why):
        block_shape(shape, strides, 2, blocks)
