"""Room: what is evicted and what never, what an operator can do, and what a restart leaves alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import BadRequest, UnknownNamespace, WrongOwner
from kvcellar.identity import ParallelStrategy, needed_chunks
from kvcellar.ledger import NO_LEASE, SCHEDULER, Ledger
from kvcellar.ledger.room import Room
from kvcellar.slab import place_of, rack_of
from tests.support import (
    FREE,
    READY,
    WRITING,
    Engine,
    MemoryTable,
    clear,
    end_grace,
    full_group,
    keys,
    namespace,
    window_group,
)

TP2 = namespace(parallel=ParallelStrategy(tp=2))
HYBRID = namespace(groups=(full_group(), window_group(2)))
PAGE = 4096
A, B, C, D, E, F, G = keys(7)
X, Y, Z = keys(3, seed="other prompt")


@pytest.fixture
def small(ledger):
    """An engine of one rank with memory for four chunks."""
    return Engine(ledger, namespace(), slots=4)


def there(engine: Engine, *asked) -> list[bool]:
    return [pins >= 0 for pins in engine.pins(asked)]


# -- eviction ------------------------------------------------------------------------------------------------


def test_later_chunks_of_a_prefix_are_evicted_before_earlier_ones(small):
    small.store([A, B, C, D])
    for key, left in zip([X, Y, Z], [3, 2, 1], strict=True):
        small.store([key])
        assert there(small, A, B, C, D) == [True] * left + [False] * (4 - left)
    assert small.room.shelves[0].left_by == {"evicted": 3}


def test_later_chunks_go_first_when_each_was_stored_by_itself(small):
    for key, parent in ((A, None), (B, A), (C, B), (D, C)):
        small.store([key], parent)
    small.store([X, Y])
    assert there(small, A, B, C, D) == [True, True, False, False]


def test_later_chunks_go_first_after_the_earlier_ones_were_long_unused(small):
    small.store([A, B, C])
    small.store([D])
    read = small.lookup([A, B, C])
    small.release(read)
    small.store([X, Y])
    assert there(small, A, B, C, D) == [True, True, False, False]


def test_what_was_used_outlives_what_was_not(small):
    for key in (A, B, C, D):
        small.store([key])
    small.hit([A])
    small.store([X, Y, Z])
    assert there(small, A, B, C, D) == [True, False, False, False]


def test_room_is_made_even_when_everything_was_used_lately(small):
    small.store([A, B, C, D])
    small.hit([A, B, C, D])
    assert small.reserve([X]).chunks == 1


def test_what_left_by_another_way_is_not_evicted_once_more(small):
    for key in (A, B, C, D):
        small.store([key])
    read = small.lookup([A])
    small.ledger.condemn(small.session, 0, read.lease, 0, 0)
    small.release(read)
    for key in keys(8, "more"):
        assert small.store([key]).chunks == 1


def test_pinned_stripe_is_never_evicted(small):
    small.store([A, B, C, D])
    read = small.lookup([A, B, C, D])
    assert small.reserve([X]) == (NO_LEASE, 0, [[]], "no_room")
    small.release(read, 0, 2, 4)
    assert small.reserve([X, Y, Z]).chunks == 2
    assert small.pins([A, B, C, D]) == [1, 1, -1, -1]


def test_stripe_in_writing_is_never_evicted(small):
    write = small.reserve([A, B, C, D])
    assert small.reserve([X]).chunks == 0
    assert small.commit(write) == 4


def test_reserve_never_evicts_the_prefix_that_it_continues(small):
    small.store([A, B, C])
    granted = small.reserve([D, X, Y], C)
    assert (granted.chunks, granted.reason) == (1, "no_room")
    assert small.hit([A, B, C]) == 3


def test_what_follows_an_evicted_chunk_gets_no_place(small):
    small.store([A, B])
    small.store(keys(4, "more"))
    assert there(small, A, B) == [False, False]
    assert small.reserve([C, D], B) == (NO_LEASE, 0, [[]], "orphan")
    assert small.room.shelves[0].left_by == {"evicted": 2}, "nothing went for what nobody could find"
    assert small.store([A, B, C]).chunks == 3


def test_what_follows_a_chunk_in_writing_gets_its_place(small):
    write = small.reserve([A, B])
    assert small.reserve([C], B).chunks == 1
    small.abort(write)
    assert small.reserve([D], B).reason == "orphan"


def test_what_follows_a_condemned_chunk_gets_no_place(small):
    small.store([A, B])
    read = small.lookup([A, B])
    small.ledger.condemn(small.session, 0, read.lease, 0, 1)
    assert small.reserve([C], B).reason == "orphan"
    small.release(read)


def test_where_there_are_tiers_they_may_have_what_was_evicted(small):
    small.ledger.published = lambda room, group, stripes: None
    small.store([A])
    small.store(keys(4, "more"))
    assert small.reserve([B], A).chunks == 1


def test_a_chunk_that_only_windows_lack_is_not_lost(ledger):
    engine = Engine(ledger, HYBRID)
    engine.store([A], groups=[0])
    assert engine.reserve([B], A).chunks == 1
    engine.store([X], groups=[1])
    assert engine.reserve([Y], X).reason == "orphan"


def test_reserve_never_evicts_the_present_part_of_its_own_keys(small):
    small.store([A, B, C, D])
    granted = small.reserve([A, B, C, D, X])
    assert (granted.chunks, granted.lease) == (4, NO_LEASE)
    assert small.hit([A, B, C, D]) == 4


def test_chunk_that_was_stored_again_is_not_evicted_before_those_that_follow_it(small):
    small.store([A, B, C])
    read = small.lookup([A])
    small.ledger.condemn(small.session, 0, read.lease, 0, 0)
    small.release(read)
    small.store([A])
    small.store([X, Y])
    assert there(small, A, B, C) == [True, True, False]


def test_reserve_never_evicts_a_chunk_before_it_that_was_stored_after_it(small):
    small.store([B], A)
    small.store([A])
    small.lookup(small.store([X, Y]) and [X, Y])
    assert small.reserve([A, B, C]).chunks == 2
    assert there(small, A, B) == [True, True]


def test_chunks_that_are_said_to_follow_each_other_in_a_circle_can_still_be_evicted(small):
    for first, second in ((A, B), (C, D)):
        small.store([first, second], parent=second)
    more = keys(4, "more")
    assert small.store(more).chunks == 4
    assert small.hit(more) == 4


def test_a_circle_closed_by_what_was_missing_from_it_can_still_be_evicted(small):
    small.store([A], parent=D)
    small.store([B, C], parent=A)
    small.store([D], parent=C)
    more = keys(4, "more")
    assert small.store(more).chunks == 4


def test_parent_that_got_no_child_after_all_can_still_be_evicted(small):
    small.store([A])
    small.store([B, C, D])
    small.lookup([B, C, D])
    read = small.lookup([A])
    assert small.reserve([X], A).chunks == 0
    small.release(read)
    assert small.reserve([Y]).chunks == 1


def test_reserve_gets_the_longest_prefix_for_which_there_is_room(small):
    small.store([A, B])
    small.lookup([A, B])
    granted = small.reserve([X, Y, Z])
    assert (granted.chunks, granted.reason) == (2, "no_room")
    assert len(granted.places[0]) == 2
    assert there(small, X, Y, Z) == [True, True, False]


def test_reserve_takes_a_chunk_in_all_groups_or_in_none(ledger):
    engine = Engine(ledger, HYBRID, slots=4)
    engine.store([X, Y, Z], groups=[1])
    ledger.set_pinned(HYBRID.id, True)
    granted = engine.reserve([A, B])
    assert (granted.chunks, granted.reason) == (1, "no_room")
    assert (engine.free_slots(0), engine.free_slots(1)) == (3, 0)
    assert engine.session.held_bytes == 2 * PAGE


def test_aborted_stripe_makes_room_again(small):
    small.abort(small.reserve([A, B, C, D]))
    assert (small.free_slots(), small.room.shelves[0].left_by) == (4, {"aborted": 4})
    assert small.reserve([X, Y, Z]).chunks == 3


def test_tables_say_free_writing_and_ready_before_anybody_is_told(small):
    table = small.room.shelves[0].tables[0]
    write = small.reserve([A, B])
    assert table.states == [WRITING, WRITING, FREE, FREE]
    assert table.entries[:2] == [(A, None), (B, A)]
    small.commit(write, 0, 0, 1)
    small.abort(write, 0, 1, 2)
    assert table.states == [READY, FREE, FREE, FREE]


def test_rack_in_which_somebody_writes_is_not_idle(small):
    write = small.reserve([A])
    assert small.room.shelves[0].idle_racks() == set()
    small.commit(write)
    assert small.room.shelves[0].idle_racks() == {0}


def test_places_of_a_second_rack_carry_its_number(small):
    small.room.shelves[0].add_rack(3, MemoryTable(2))
    places = small.reserve([A, B, C, D, E]).places[0]
    assert places == [*(place_of(0, slot) for slot in range(4)), place_of(3, 0)]  # the oldest rack first


def test_retired_rack_takes_its_stripes_with_it_and_leaves_the_others(small):
    shelf = small.room.shelves[0]
    small.store([A, E, F, G])
    shelf.add_rack(1, MemoryTable(2))
    small.store([B, C], A)
    read = small.lookup([A, B])
    assert shelf.idle_racks() == set()
    small.release(read, 0, 1, 2)
    assert shelf.idle_racks() == {1}
    shelf.retire(1)
    assert (there(small, A, B, C), shelf.slots, shelf.free_slots) == ([True, False, False], 4, 0)


# -- how much one session may hold ---------------------------------------------------------------------------


def test_session_cannot_pin_more_than_the_hold_limit():
    engine = Engine(Ledger(7, hold_limit=3 * PAGE), namespace())
    engine.store([A, B])
    engine.store([C, D], B)
    read = engine.lookup([A, B, C, D])
    assert (read.chunks, read.reason) == (3, "hold_limit")
    assert engine.lookup([A]) == (NO_LEASE, 0, [], "hold_limit")
    engine.release(read, 0, 0, 1)
    assert engine.lookup([A]).chunks == 1


def test_session_cannot_reserve_more_than_the_hold_limit():
    engine = Engine(Ledger(7, hold_limit=3 * PAGE), namespace())
    write = engine.reserve([A, B, C, D])
    assert (write.chunks, engine.free_slots()) == (3, 5)
    engine.commit(write)
    assert engine.reserve([D]).chunks == 1


def test_hold_limit_counts_every_shard_and_group():
    pair = namespace(groups=(full_group(), full_group()), parallel=ParallelStrategy(tp=2))
    engine = Engine(Ledger(7, hold_limit=8 * PAGE - 1), pair)
    assert engine.reserve([A, B]).chunks == 1
    assert engine.session.held_bytes == 4 * PAGE


def test_hold_limit_counts_of_a_window_what_a_hit_holds_of_it():
    engine = Engine(Ledger(7, hold_limit=6 * PAGE), HYBRID)
    chain = [A, B, C, D, E, F]
    for first in range(0, 6, 2):
        engine.store(chain[first : first + 2], chain[first - 1] if first else None)
    read = engine.lookup(chain)
    assert (read.chunks, read.reason, engine.session.held_bytes) == (4, "hold_limit", 6 * PAGE)


@given(
    windows=st.lists(st.none() | st.integers(1, 6), min_size=1, max_size=4),
    size=st.integers(-2, 40),
    most=st.integers(0, 12),
)
def test_longest_hit_within_the_hold_limit_is_what_counting_finds(windows, size, most):
    groups = tuple(full_group() if window is None else window_group(window) for window in windows)
    room = Room(namespace(groups=groups))
    taken = [sum(len(needed_chunks(hit, window)) for window in windows) for hit in range(most + 1)]
    longest = max((hit for hit, pages in enumerate(taken) if pages <= size), default=0)
    assert room.chunks_within(size * PAGE, most) == longest


def test_a_lease_that_is_given_back_for_another_does_not_count_as_far_as_it_still_holds():
    engine = Engine(Ledger(7, hold_limit=6 * PAGE), HYBRID)
    chain = [A, B, C, D]
    engine.store(chain[:2])
    engine.store(chain[2:], B)
    find, session = engine.ledger.find, engine.session
    read = engine.lookup(chain)
    assert session.held_bytes == 6 * PAGE
    assert find(session, HYBRID.id, chain).chunks == 0
    again = find(session, HYBRID.id, chain, read.lease)
    assert (again.chunks, session.held_bytes) == (4, 12 * PAGE)
    engine.release(read, 0, 0, 1)
    assert engine.ledger.may_hold(session, read.lease) == 0
    engine.release(again)
    engine.release(read)
    assert engine.ledger.may_hold(session, read.lease) == 6 * PAGE


def test_hold_limit_is_each_sessions_own():
    ledger = Ledger(7, hold_limit=PAGE)
    first, second = Engine(ledger, namespace(), "first"), Engine(ledger, namespace(), "second")
    first.store([A])
    assert [first.lookup([A]).chunks, second.lookup([A]).chunks] == [1, 1]


def test_hit_that_ends_before_the_hold_limit_gives_no_reason():
    engine = Engine(Ledger(7, hold_limit=2 * PAGE), namespace())
    engine.store([A])
    assert engine.lookup([A, B, C]).reason == ""


# -- clear, condemn, pin -------------------------------------------------------------------------------------


def test_clear_forgets_everything_and_says_how_much(small):
    small.store([A, B])
    assert clear(small.ledger) == 2
    assert (small.hit([A]), small.free_slots(), small.room.shelves[0].left_by) == (0, 4, {"cleared": 2})


def test_clear_forgets_every_group(ledger):
    engine = Engine(ledger, HYBRID)
    engine.store([A, B])
    assert clear(ledger) == 4
    assert (engine.free_slots(0), engine.free_slots(1)) == (8, 8)


def test_clear_of_one_namespace_leaves_the_others(ledger, small):
    other = Engine(ledger, TP2, "other")
    small.store([A])
    other.store([A])
    assert clear(ledger, TP2.id) == 1
    assert (small.hit([A]), other.hit([A])) == (1, 0)


def test_clear_while_pinned_hides_at_once_and_frees_at_the_last_release(ledger):
    engine = Engine(ledger, TP2, slots=4)
    engine.store([A])
    read = engine.lookup([A])
    clear(ledger)
    assert (engine.hit([A]), engine.free_slots()) == (0, 3)
    engine.release(read, 0)
    assert engine.free_slots() == 3
    engine.release(read, 1)
    assert engine.free_slots() == 4


def test_clear_while_writing_hides_at_once_and_the_commit_comes_too_late(small):
    write = small.reserve([A])
    assert clear(small.ledger) == 1
    assert small.free_slots() == 3
    assert small.commit(write) == 1
    assert (small.hit([A]), small.free_slots()) == (0, 4)
    assert small.room.shelves[0].left_by == {"cleared": 1}


def test_cleared_key_can_be_stored_again_while_the_old_bytes_are_still_read(small):
    (old,) = small.store([A]).places
    read = small.lookup([A])
    clear(small.ledger)
    (new,) = small.store([A]).places
    assert old != new
    small.release(read)
    assert small.lookup([A]).places == [new]


def test_second_clear_finds_nothing(small):
    small.store([A])
    small.lookup([A])
    assert [clear(small.ledger), clear(small.ledger)] == [1, 0]


def test_rack_with_a_hidden_stripe_is_not_idle_but_others_are(small):
    """Or one stalled reader would keep all memory of the group from others."""
    shelf = small.room.shelves[0]
    shelf.add_rack(1, MemoryTable(4))
    (place,) = small.store([A]).places[0]
    read = small.lookup([A])
    clear(small.ledger)
    assert shelf.idle_racks() == {0, 1} - {rack_of(place)}
    small.release(read)
    assert shelf.idle_racks() == {0, 1}


@pytest.mark.parametrize("act", [Ledger.clear, lambda ledger, name: ledger.set_pinned(name, True)])
def test_operator_is_told_of_a_namespace_that_is_not_there(ledger, act):
    with pytest.raises(UnknownNamespace):
        act(ledger, TP2.id)


def test_condemned_stripe_is_found_by_nobody_and_freed_when_all_have_read_it(ledger):
    engine = Engine(ledger, TP2, slots=4)
    engine.store([A, B])
    read = engine.lookup([A, B])
    ledger.condemn(engine.session, 1, read.lease, 0, 0)
    assert (engine.hit([A]), engine.free_slots(), ledger.counts["corrupt"]) == (0, 2, 1)
    engine.release(read, 0)
    engine.release(read, 1)
    assert (there(engine, A, B), engine.free_slots()) == ([False, True], 3)
    assert engine.room.shelves[0].left_by == {"corrupt": 1}


def test_condemning_twice_counts_once(small):
    small.store([A])
    read = small.lookup([A])
    for _ in range(2):
        small.ledger.condemn(small.session, 0, read.lease, 0, 0)
    assert small.ledger.counts["corrupt"] == 1


def test_condemned_key_can_be_stored_again(small):
    small.store([A])
    read = small.lookup([A])
    small.ledger.condemn(small.session, 0, read.lease, 0, 0)
    assert small.store([A]).chunks == 1
    small.release(read)
    assert small.hit([A]) == 1


def test_only_who_reads_a_stripe_can_condemn_it(ledger):
    engine = Engine(ledger, TP2)
    engine.store([A, B])
    read, write = engine.lookup([A, B]), engine.reserve([C])
    engine.release(read, 0, 0, 1)
    for rank, lease, chunk in ((0, read.lease, 0), (SCHEDULER, read.lease, 1), (0, write.lease, 0)):
        with pytest.raises(WrongOwner):
            ledger.condemn(engine.session, rank, lease, 0, chunk)
    for group, chunk in ((1, 0), (0, 2), (0, -1)):
        with pytest.raises(BadRequest):
            ledger.condemn(engine.session, 0, read.lease, group, chunk)
    assert engine.hit([A, B]) == 2


def test_namespace_pinned_by_an_operator_is_not_evicted_until_unpinned(small):
    small.store([A, B, C, D])
    small.ledger.set_pinned(small.namespace.id, True)
    assert small.reserve([X]).chunks == 0
    small.ledger.set_pinned(small.namespace.id, False)
    assert small.reserve([X]).chunks == 1


def test_nothing_is_evicted_while_grace_lasts(small):
    small.store([A, B, C, D])
    small.ledger.set_grace(True)
    assert small.reserve([X]).chunks == 0
    end_grace(small.ledger)
    assert small.reserve([X]).chunks == 1


def test_end_of_grace_does_not_undo_an_operators_pin(small):
    small.store([A, B, C, D])
    small.ledger.set_pinned(small.namespace.id, True)
    small.ledger.set_grace(True)
    end_grace(small.ledger)
    assert small.reserve([X]).chunks == 0
