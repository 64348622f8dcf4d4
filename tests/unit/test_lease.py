"""Lease: which stripes some bits stand for, at the cost of those and not of the whole lease."""

from hypothesis import given
from hypothesis import strategies as st

from kvcellar.identity import ChunkKey
from kvcellar.ledger.lease import Lease, LeaseId
from kvcellar.ledger.room import Room
from kvcellar.ledger.stripe import Stripe
from kvcellar.slab import place_of
from tests.support import full_group, namespace

ROOM = Room(namespace(groups=(full_group(), full_group())))


class Watched(list):
    """Counts what is taken out of it."""

    taken = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        self.taken += len(found) if isinstance(at, slice) else 1
        return found


def lease_of(chunks: int) -> tuple[Lease, Watched]:
    stripes = Watched(Stripe(ChunkKey(b"%016d" % n), place_of(0, n)) for n in range(2 * chunks))
    return Lease(LeaseId(1), ROOM, (0, 1), chunks, stripes, [0], writing=True), stripes


@given(st.integers(1, 12).flatmap(lambda chunks: st.tuples(st.just(chunks), st.integers(0, 4**chunks - 1))))
def test_bits_stand_for_stripes_of_their_group_later_chunks_first(asked):
    chunks, mask = asked
    lease, _ = lease_of(chunks)
    for position in (0, 1):
        numbers = range(position * chunks, (position + 1) * chunks)
        wanted = [number for number in reversed(numbers) if mask >> number & 1]
        assert [stripe.place for stripe in lease.pick(mask, position)] == wanted


def test_a_part_of_a_long_lease_is_found_without_looking_at_the_rest():
    lease, stripes = lease_of(10_000)
    assert [len(lease.pick(lease.mask(7000, 7003), position)) for position in (0, 1)] == [3, 3]
    assert lease.pick(0, 0) == []
    assert stripes.taken == 6
