"""sum64 against its definition, and what makes it a checksum: any one word, and any place, counts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.transfer import sum64

MASK = (1 << 64) - 1


def by_definition(data: bytes) -> int:
    """Word by word, with Python's own integers."""
    padded = data + b"\0" * (-len(data) % 8)
    rows = sum64.row_weights(max(1, sum64.rows_of(len(padded))))
    total = 0
    for index in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * index : 8 * index + 8], "little")
        total += word * int(rows[index // 512]) * int(sum64.COLUMN[index % 512])
    return int(sum64.finish(np.array([total & MASK], dtype=np.uint64), len(data))[0])


def digest(*pieces: bytes) -> int:
    made = sum64.Sum64()
    for piece in pieces:
        made.update(piece)
    return made.intdigest()


@given(st.binary(max_size=20_000))
def test_the_sum_is_the_one_defined(data):
    assert digest(data) == by_definition(data)


def test_the_sum_is_the_one_defined_over_rows():
    data = np.random.default_rng(1).bytes(3 * 4096 + 24)
    assert digest(data[:4000], data[4000:9001], data[9001:]) == by_definition(data)


@given(st.integers(0, 2047), st.integers(0, 63))
def test_any_flipped_bit_shows(word, bit):
    words = np.arange(2048, dtype=np.uint64)
    before = digest(words.tobytes())
    words[word] ^= np.uint64(1 << bit)
    assert digest(words.tobytes()) != before


@given(st.integers(0, 2047), st.integers(0, 2047))
def test_words_that_change_places_show(one, other):
    words = np.arange(2048, dtype=np.uint64) + np.uint64(1)
    before = digest(words.tobytes())
    words[[one, other]] = words[[other, one]]
    assert (digest(words.tobytes()) != before) == (one != other)


def test_length_counts_though_padding_is_zero():
    assert len({digest(b"\0" * size) for size in range(20)}) == 20


def test_weights_are_odd_so_that_no_word_is_lost():
    assert (sum64.COLUMN % 2).all()
    assert (sum64.row_weights(1000) % 2).all()
