"""Epochs: one life of a server each, and the numbers that carry theirs.

A lease id, and the ticket of a lookup that waits for tiers, is the epoch in its high bits and a count in its
low ones. So what an earlier server gave out is never mistaken for something of this one, and an engine sees
by the number alone whose it is. Knows nothing of what is numbered.
"""

import itertools
import secrets
from collections.abc import Iterator

_EPOCH_BITS, _COUNT_BITS = 22, 40  # 22 tell servers apart, 40 last for centuries


def new_epoch() -> int:
    return secrets.randbelow((1 << _EPOCH_BITS) - 1) + 1


def numbers(epoch: int) -> Iterator[int]:
    assert 0 < epoch < 1 << _EPOCH_BITS
    return itertools.count(epoch << _COUNT_BITS | 1)


def epoch_of(number: int) -> int:
    return number >> _COUNT_BITS
