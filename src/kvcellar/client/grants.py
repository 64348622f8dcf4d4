"""What a scheduler asks and what it is granted, in words of an engine and in those of the wire."""

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcellar.errors import BadRequest
from kvcellar.identity import KEY_BYTES, ChunkKey
from kvcellar.wire import MAX_FRAME
from kvcellar.wire import messages as m

_MAX_KEY_BYTES = MAX_FRAME // 2  # in one message; what else is in it takes far less


class Grant(NamedTuple):
    """The answer to a lookup or a reserve: `places` by group (of those asked for) and chunk, NO_PLACE where
    there is nothing to read or write.
    """

    lease: int
    chunks: int
    places: list[npt.NDArray[np.uint32]]
    reason: str
    ticket: int = 0  # more may come from tiers: ask `brought`
    lead_s: float = 0.0  # until the first chunk from there may be expected
    chunk_s: float = 0.0  # and for each after that; 0 if not known


def miss(reason: str) -> Grant:
    return Grant(0, 0, [], reason)


class Expected:
    """A request in the engine's queue, as the server was told of it, or will be at a flush."""

    def __init__(self, op: m.Expect) -> None:
        self.op = op
        self.is_told = False
        self.ticket = 0
        self.over = False


class Asked:
    """The tag of a lookup under way."""

    def __init__(self, *, abandoned: bool = False) -> None:
        self.grant: Grant | None = None
        self.abandoned = abandoned  # nobody waits any more: if it grants something, give it back


def fitting(queue: Sequence[tuple[m.Operation, Hashable]]) -> int:
    """How many of these one message can have; at least one, since none has more than MAX_KEYS."""
    keys = itertools.accumulate(len(getattr(op, "keys", b"")) for op, _ in queue[: m.MAX_OPS])
    return sum(size <= _MAX_KEY_BYTES for size in keys)


def packed(keys: Sequence[ChunkKey]) -> bytes:
    """As many as one operation may name: a prefix of a prefix is a prefix."""
    joined = b"".join(keys[: m.MAX_KEYS])
    if len(joined) != KEY_BYTES * len(keys[: m.MAX_KEYS]):
        raise BadRequest(f"a chunk key has {KEY_BYTES} bytes")
    return joined


def granted(result: m.Result | m.Brought) -> Grant:
    if isinstance(result, m.Granted | m.Brought):
        places = [np.frombuffer(row, dtype="<u4") for row in result.places]
        if isinstance(result, m.Brought):
            return Grant(result.lease, result.chunks, places, "")
        outlook = result.lead_us / 1e6, result.chunk_us / 1e6
        return Grant(result.lease, result.chunks, places, result.reason, result.ticket, *outlook)
    return miss(result.code if isinstance(result, m.Failure) else "")
