"""sum64: a position-weighted 64-bit sum over an object, made so that a GPU can add it up in any order.

An object is a row of 64-bit words, the last one padded with zeros. Word i counts with weight
ROW[i // 512] * COLUMN[i % 512], all weights odd:

    sum = SUM_i weight(i) * word(i)  mod 2**64,    checksum = mix(sum + length in bytes)

Odd weights have inverses, so a change in any one word always changes the sum; the weights differ by position,
so moved bytes do too. Linear, so the parts of an object can be added up by whoever moves them, in any order:
that is why kernels use it and xxh3 is for hosts.
"""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

COLUMNS = 512
_MASK = (1 << 64) - 1


def _scramble(numbers: Words) -> Words:
    """splitmix64's last steps: every bit of the result depends on every bit of the number."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _weights(first: int, count: int) -> Words:
    steps = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _scramble(steps) | np.uint64(1)


COLUMN: Words = _weights(1, COLUMNS)


@functools.lru_cache(maxsize=64)
def row_weights(rows: int) -> Words:
    """The weights of the first so many rows of 512 words."""
    weights = _weights(1 << 32, rows)
    weights.flags.writeable = False
    return weights


def rows_of(size: int) -> int:
    """How many rows of words an object of so many bytes has."""
    return -(-size // (8 * COLUMNS))


def finish(sums: Words, size: int) -> Words:
    """Checksums from sums of objects of `size` bytes."""
    return _scramble(sums + np.uint64(size))


class Sum64:
    """The sum of one object, in pieces cut anywhere."""

    def __init__(self) -> None:
        self._sum = 0
        self._size = 0
        self._rest = b""  # the bytes of a word that is not complete

    def update(self, data: Any, /) -> None:
        fresh = np.frombuffer(data, dtype=np.uint8) if not isinstance(data, np.ndarray) else data
        piece = np.ascontiguousarray(fresh).reshape(-1).view(np.uint8)
        at = (self._size - len(self._rest)) // 8
        self._size += piece.size
        if self._rest:
            missing = min(8 - len(self._rest), piece.size)
            self._rest += piece[:missing].tobytes()
            piece = piece[missing:]
            if len(self._rest) < 8:
                return
            self._add(np.frombuffer(self._rest, dtype="<u8"), at)
            self._rest, at = b"", at + 1
        whole = piece.size // 8 * 8
        self._rest = piece[whole:].tobytes()
        self._add(np.frombuffer(piece[:whole], dtype="<u8"), at)

    def intdigest(self) -> int:
        padded = np.frombuffer(self._rest.ljust(8, b"\0"), dtype="<u8")
        last = _weighted(padded, (self._size - len(self._rest)) // 8) if self._rest else 0
        total = np.array([(self._sum + last) & _MASK], dtype=np.uint64)
        return int(finish(total, self._size)[0])

    def _add(self, words: Words, at: int) -> None:
        self._sum = (self._sum + _weighted(words, at)) & _MASK


def _weighted(words: Words, at: int) -> int:
    """The sum of words that start at index `at` of their object."""
    first, stop = at // COLUMNS, -(-(at + words.size) // COLUMNS)
    rows = row_weights(_rounded(stop))
    head = min(-at % COLUMNS, words.size)
    body = (words.size - head) // COLUMNS * COLUMNS
    total = _dot(words[:head], COLUMN[at % COLUMNS :][:head]) * int(rows[first]) if head else 0
    if body:
        begin = (at + head) // COLUMNS
        in_rows = words[head : head + body].reshape(-1, COLUMNS) @ COLUMN
        total += _dot(in_rows, rows[begin : begin + len(in_rows)])
    tail = words[head + body :]
    if tail.size:
        total += _dot(tail, COLUMN[: tail.size]) * int(rows[stop - 1])
    return total & _MASK


def _dot(words: Words, weights: Words) -> int:
    return int(words @ weights)


def _rounded(rows: int) -> int:
    """The next power of two, so that few tables are kept."""
    return 1 << max(0, rows - 1).bit_length()
