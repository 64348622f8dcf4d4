"""Lease: the right of one session's ranks to read, or to write, some stripes.

A lease covers `chunks` chunks in some groups. Each stripe is one bit, numbered group by group; `left[rank]`
holds the bits that the rank still answers for. That is all the state there is: giving back twice, or what was
never held, clears nothing.

    bit = position of the group * chunks + chunk
    left = {rank 0: 0b1111, rank 1: 0b0011}      rank 1 has given back chunks 2 and 3

Knows nothing of how stripes are pinned, published or freed: `settle` says which ones nobody holds any more.
"""

from collections.abc import Iterable, Iterator
from functools import reduce
from operator import or_
from typing import NewType, cast

from kvcellar.errors import BadRequest, WrongOwner
from kvcellar.ledger.room import Room
from kvcellar.ledger.stripe import Stripe

LeaseId = NewType("LeaseId", int)


class Lease:
    __slots__ = ("aborted", "chunks", "groups", "id", "left", "room", "stripes", "writing")

    def __init__(
        self,
        lease_id: LeaseId,
        room: Room,
        groups: tuple[int, ...],
        chunks: int,
        stripes: list[Stripe | None],
        ranks: Iterable[int],
        *,
        writing: bool,
    ) -> None:
        assert len(stripes) == len(groups) * chunks, (
            "one place per group and chunk, None where nothing is held"
        )
        self.id = lease_id
        self.room = room
        self.groups = groups
        self.chunks = chunks
        self.stripes = stripes
        self.writing = writing
        held = (1 << len(stripes)) - 1
        if (writing or room.has_windows) and None in stripes:  # else nothing leaves a gap
            # By way of text: one bit at a time takes the square of their number.
            held = int("".join("0" if stripe is None else "1" for stripe in reversed(stripes)), 2)
        self.left = dict.fromkeys(ranks, held)
        self.aborted = 0

    def __repr__(self) -> str:
        kind = "write" if self.writing else "read"
        return f"<{kind} lease {self.id:#x}: {self.chunks} chunks, ranks {sorted(self.left)}>"

    def mask(self, first: int, stop: int) -> int:
        """The bits of chunks [first, stop) in every group."""
        if not 0 <= first <= stop <= self.chunks:
            raise BadRequest(f"chunks [{first}, {stop}) of a lease on {self.chunks}")
        run = ((1 << (stop - first)) - 1) << first
        return reduce(or_, (run << (position * self.chunks) for position in range(len(self.groups))), 0)

    def bit(self, group: int, chunk: int) -> int:
        if group not in self.groups or not 0 <= chunk < self.chunks:
            raise BadRequest(f"group {group}, chunk {chunk} is not in this lease")
        return self.groups.index(group) * self.chunks + chunk

    def held(self, ranks: Iterable[int] | None = None) -> int:
        """The bits that these ranks, or any, still answer for; a rank that never had a share has no say."""
        chosen = self.left if ranks is None else ranks
        if intruders := [rank for rank in chosen if rank not in self.left]:
            raise WrongOwner(f"rank {intruders[0]} has no share in {self}")
        return reduce(or_, (self.left[rank] for rank in chosen), 0)

    def settle(self, ranks: Iterable[int], mask: int, *, abort: bool) -> int:
        """These ranks are done with these bits. Returns the bits that nobody answers for any more."""
        gone = 0
        for rank in ranks:
            gone |= self.left[rank] & mask
            self.left[rank] &= ~mask
        if abort:
            self.aborted |= gone
        return gone & ~self.held()

    def pick(self, mask: int, position: int) -> list[Stripe]:
        """The stripes of these bits in one group, later chunks first."""
        run = mask >> position * self.chunks & (1 << self.chunks) - 1
        if not run:
            return []
        # From the lowest bit to the highest: a commit of one chunk must not look at a prompt of thousands.
        first = (run & -run).bit_length() - 1
        run >>= first
        start = position * self.chunks + first
        row = self.stripes[start : start + run.bit_length()]
        chosen = row if run.bit_count() == len(row) else [row[chunk] for chunk in bits(run)]
        return cast(list[Stripe], chosen[::-1])

    @property
    def held_bytes(self) -> int:
        """Of the stripes that anybody still answers for."""
        held = self.held()
        return sum(
            len(self.pick(held, position)) * self.room.shelves[group].stripe_bytes
            for position, group in enumerate(self.groups)
        )

    @property
    def is_over(self) -> bool:
        return not any(self.left.values())


def bits(mask: int) -> Iterator[int]:
    return (bit for bit, digit in enumerate(f"{mask:b}"[::-1]) if digit == "1")
