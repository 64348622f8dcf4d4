"""Leases: who may read and write what, and when it comes back."""

import pytest

from kvcellar.errors import BadRequest, WrongOwner
from kvcellar.identity import ParallelStrategy
from kvcellar.ledger import NO_LEASE, SCHEDULER, Ledger, audit
from kvcellar.ledger.lease import LeaseId
from kvcellar.slab import NO_PLACE
from tests.support import Engine, full_group, keys, namespace, window_group

TP2 = namespace(parallel=ParallelStrategy(tp=2))
MLA8 = namespace(parallel=ParallelStrategy(tp=8, mla=True))
HYBRID = namespace(groups=(full_group(), window_group(2)))
A, B, C, D = keys(4)


@pytest.fixture
def two(ledger):
    """An engine of two ranks, each a shard."""
    return Engine(ledger, TP2)


@pytest.fixture
def eight(ledger):
    """An engine of eight ranks that all read the same shard."""
    return Engine(ledger, MLA8)


# -- one object, many readers --------------------------------------------------------------------------------


def test_mla_tp8_prompt_of_one_chunk_is_one_stripe_with_one_writer_and_eight_readers(eight):
    granted = eight.store([A])
    assert (granted.chunks, granted.places, len(eight.room.shelves[0])) == (1, [[0]], 1)
    assert eight.room.shelves[0].stripe_bytes == 4096  # one object, not eight
    with pytest.raises(WrongOwner):
        eight.commit(eight.reserve([B]), rank=1)
    read = eight.lookup([A])
    assert [eight.release(read, rank) for rank in range(8)] == [1] * 8


def test_mla_tp4_pp2_is_one_stripe_of_two_objects_with_writers_0_and_4(ledger):
    engine = Engine(ledger, namespace(parallel=ParallelStrategy(tp=4, pp=2, mla=True)))
    granted = engine.reserve([A])
    assert engine.room.shelves[0].stripe_bytes == 2 * 4096
    assert engine.commit(granted, 0) == 1
    assert engine.hit([A]) == 0
    assert engine.commit(granted, 4) == 1
    assert engine.hit([A]) == 1


def test_stripe_of_eight_readers_is_free_after_the_eighth_release_not_the_seventh(eight):
    eight.store([A])
    read = eight.lookup([A])
    assert eight.pins([A]) == [1]
    for rank in range(7):
        eight.release(read, rank)
        assert eight.pins([A]) == [1]
    eight.release(read, 7)
    assert eight.pins([A]) == [0]


def test_temporary_stripe_is_deleted_at_the_eighth_release_not_before(eight):
    eight.bring(A)
    read = eight.lookup([A])
    for rank in range(7):
        eight.release(read, rank)
        assert eight.pins([A]) == [1]
    assert eight.free_slots() == 7
    eight.release(read, 7)
    assert (eight.pins([A]), eight.free_slots()) == ([-1], 8)
    assert eight.room.shelves[0].left_by["temporary"] == 1


def test_temporary_stripe_stays_while_another_lease_reads_it(one):
    one.bring(A)
    first, second = one.lookup([A]), one.lookup([A])
    one.release(first)
    assert one.pins([A]) == [1]
    one.release(second)
    assert one.pins([A]) == [-1]


def test_stripe_that_is_not_temporary_stays_after_its_last_reader(one):
    one.store([A])
    one.release(one.lookup([A]))
    assert one.hit([A]) == 1


def test_readers_come_from_the_engine_that_asks_not_from_who_is_registered(ledger):
    engines = [Engine(ledger, TP2, f"engine{n}") for n in range(4)]
    engines[0].store([A])
    reads = [engine.lookup([A]) for engine in engines]
    for engine, read in zip(engines, reads, strict=True):
        before = engine.pins([A])[0]
        assert engine.release(read, 0) == 1
        assert engine.pins([A]) == [before]
        assert engine.release(read, 1) == 1
        assert engine.pins([A]) == [before - 1]
    assert engines[0].pins([A]) == [0]


# -- giving back ---------------------------------------------------------------------------------------------


def test_part_of_a_hit_is_given_back_and_the_rest_stays_pinned(two):
    two.store([A, B, C, D])
    read = two.lookup([A, B, C, D])
    assert two.release(read, SCHEDULER, 0, 2) == 2
    assert two.pins([A, B, C, D]) == [0, 0, 1, 1]
    two.release(read, 0)
    two.release(read, 1)
    assert two.pins([A, B, C, D]) == [0, 0, 0, 0]


def test_one_rank_gives_back_only_its_own_share(two):
    two.store([A, B])
    read = two.lookup([A, B])
    assert [two.release(read, 0), two.release(read, 0)] == [2, 0]
    assert two.pins([A, B]) == [1, 1]
    assert two.ledger.counts["repeated"] == 1
    two.release(read, 1)


def test_giving_back_twice_takes_no_share_of_another_lease(one):
    one.store([A])
    first, second = one.lookup([A]), one.lookup([A])
    assert [one.release(first), one.release(first), one.pins([A])] == [1, 0, [1]]
    assert one.ledger.counts["stale"] == 1
    one.release(second)


def test_giving_back_what_another_session_holds_is_refused_and_touches_nothing(ledger):
    owner, thief = Engine(ledger, TP2, "owner"), Engine(ledger, TP2, "thief")
    owner.store([A])
    read, write = owner.lookup([A]), owner.reserve([B])
    for rank in (SCHEDULER, 0, 1):
        with pytest.raises(WrongOwner):
            thief.release(read, rank)
        with pytest.raises(WrongOwner):
            thief.abort(write, rank)
    with pytest.raises(WrongOwner):
        thief.commit(write)
    with pytest.raises(WrongOwner):
        ledger.condemn(thief.session, 0, read.lease, 0, 0)
    assert (owner.release(read, 0), owner.release(read, 1), owner.commit(write, 0)) == (1, 1, 1)


@pytest.mark.parametrize("rank", [2, -2, 1 << 40])
def test_rank_without_a_share_is_refused(two, rank):
    two.store([A])
    read = two.lookup([A])
    with pytest.raises(WrongOwner):
        two.release(read, rank)
    assert two.pins([A]) == [1]


@pytest.mark.parametrize("lease", [0, 1, 6 << 40 | 1, 8 << 40 | 1])
def test_unknown_lease_is_a_counted_no_op(one, lease):
    one.store([A])
    one.lookup([A])
    assert one.ledger.release(one.session, 0, LeaseId(lease), 0, 1) == 0
    assert one.ledger.commit(one.session, 0, LeaseId(lease), 0, 1) == 0
    assert one.ledger.abort(one.session, SCHEDULER, LeaseId(lease), 0, 1) == 0
    one.ledger.condemn(one.session, 0, LeaseId(lease), 0, 0)
    assert one.ledger.counts["stale"] == 4
    assert one.pins([A]) == [1]


def test_leases_of_another_epoch_never_meet_those_of_this_one():
    leases = []
    for epoch in (7, 8):
        engine = Engine(Ledger(epoch, 1 << 40), namespace())
        leases.append(engine.reserve([A]).lease)
    assert leases[0] != leases[1]


@pytest.mark.parametrize(("first", "stop"), [(0, 3), (-1, 1), (2, 1), (0, -1), (3, 3), (0, 1 << 62)])
def test_range_outside_the_lease_is_refused_and_nothing_changes(one, first, stop):
    one.store([A, B])
    read, write = one.lookup([A, B]), one.reserve([C, D])
    for answer, granted in ((one.release, read), (one.commit, write), (one.abort, write)):
        with pytest.raises(BadRequest):
            answer(granted, 0, first, stop)
    assert one.pins([A, B]) == [1, 1]
    assert [one.release(read), one.commit(write)] == [2, 2]


def test_empty_range_is_a_counted_no_op(one):
    one.store([A])
    assert one.release(one.lookup([A]), 0, 1, 1) == 0
    assert one.pins([A]) == [1]
    assert one.ledger.counts["repeated"] == 1


def told_of_uses(ledger):
    told: list[bytes] = []
    ledger.used = lambda _room, _group, stripes: told.extend(stripe.key for stripe in stripes)
    return told


def test_a_use_is_told_once_with_the_last_share_and_later_chunks_first(ledger, two):
    told = told_of_uses(ledger)
    two.store([A, B])
    granted = two.lookup([A, B])
    two.release(granted, 0)
    assert told == []
    two.release(granted, 1)
    assert told == [B, A]
    two.store([C], B)
    assert two.hit([A, B, C]) == 3
    assert told[2:] == [C], "the others have not been looked at by the policy since"


def test_what_a_dead_engine_held_is_a_use_and_what_is_temporary_is_none(ledger, one):
    """Temporary ones came from a tier; they are hidden, too, when they were condemned."""
    told = told_of_uses(ledger)
    one.store([A])
    other = Engine(ledger, namespace(), name="other")
    other.lookup([A])
    other.leave()
    assert told == [A]
    [shelf] = one.room.shelves
    brought = shelf.take(B, A, temporary=True)
    shelf.publish([brought])
    ledger.own.pin(shelf, brought)
    granted = one.lookup([A, B])
    one.release(granted)
    ledger.own.unpin(shelf, brought)
    assert told == [A]


def test_read_lease_cannot_be_committed_and_write_lease_cannot_be_released(one):
    one.store([A])
    read, write = one.lookup([A]), one.reserve([B])
    for answer, granted in ((one.commit, read), (one.abort, read), (one.release, write)):
        with pytest.raises(BadRequest):
            answer(granted)


def test_scheduler_cannot_commit_for_the_ranks_that_write(two):
    write = two.reserve([A])
    with pytest.raises(WrongOwner):
        two.commit(write, SCHEDULER)
    assert two.hit([A]) == 0


# -- those who go away ---------------------------------------------------------------------------------------


def test_request_aborted_between_lookup_and_load_gives_all_shares_back_at_once(eight):
    eight.store([A, B])
    read = eight.lookup([A, B])
    assert eight.release(read, SCHEDULER) == 2
    assert eight.pins([A, B]) == [0, 0]
    assert not eight.session.leases


def test_dead_worker_gives_back_its_shares_and_no_others(two):
    two.store([A])
    read = two.lookup([A])
    two.part(1)
    assert two.pins([A]) == [1]
    assert two.release(read, 0) == 1
    assert two.pins([A]) == [0]


def test_dead_worker_aborts_what_it_had_not_committed(two):
    write = two.reserve([A, B])
    two.commit(write, 1, 0, 1)
    two.part(1)
    two.commit(write, 0)
    assert [two.hit([A]), two.hit([B])] == [1, 0]


def test_vanished_engine_leaves_nothing_pinned_and_nothing_in_writing(ledger):
    engine, other = Engine(ledger, TP2, "vanished"), Engine(ledger, TP2, "other")
    engine.store([A])
    engine.lookup([A])
    write = engine.reserve([B, C])
    engine.commit(write, 0)
    engine.leave()
    assert (other.pins([A, B, C]), other.free_slots()) == ([0, -1, -1], 7)
    assert list(ledger.sessions) == ["other"]


def test_vanished_engine_whose_ranks_never_came_leaves_nothing_behind(ledger):
    Engine(ledger, TP2, "writer").store([A])
    session = ledger.join("young", SCHEDULER)
    ledger.register(session, SCHEDULER, TP2)
    ledger.lookup(session, TP2.id, [A])
    ledger.part(session, SCHEDULER)
    assert "young" not in ledger.sessions
    audit(ledger)


def test_death_of_the_scheduler_alone_frees_nothing_that_a_live_rank_may_touch(two):
    two.store([A])
    two.lookup([A])
    write = two.reserve([B])
    two.part(SCHEDULER)
    assert (two.pins([A]), two.free_slots()) == ([1], 6)
    two.part(0)
    assert (two.pins([A]), two.free_slots()) == ([1], 6)
    assert two.commit(write, 1) == 1
    two.part(1)
    assert (two.pins([A]), two.free_slots()) == ([0], 7)


def test_death_of_the_scheduler_settles_for_ranks_that_are_not_there(two):
    two.store([A])
    two.part(1)
    read, write = two.lookup([A]), two.reserve([B])
    two.part(SCHEDULER)
    assert (two.release(read, 0), two.commit(write, 0)) == (1, 1)
    assert (two.pins([A, B]), two.free_slots()) == ([0, -1], 7)


def test_late_word_of_a_death_does_not_touch_a_new_session_of_the_same_name(ledger):
    old = Engine(ledger, TP2)
    old.store([A])
    old.leave()
    young = Engine(ledger, TP2)
    read = young.lookup([A])
    old.part(1)
    assert ledger.sessions["engine"] is young.session
    assert (young.pins([A]), young.release(read, SCHEDULER)) == ([1], 1)


def test_rank_that_attaches_again_holds_nothing(two):
    two.store([A])
    read, write = two.lookup([A]), two.reserve([B])
    two.ledger.join("engine", 0)
    assert (two.release(read, 0), two.commit(write, 0)) == (0, 0)
    assert (two.release(read, 1), two.commit(write, 1)) == (1, 1)
    assert (two.pins([A, B]), two.hit([B])) == ([0, -1], 0)


def test_rank_that_attaches_has_no_share_in_what_was_granted_while_it_was_away(two):
    two.store([A])
    two.part(1)
    read = two.lookup([A])
    two.ledger.join("engine", 1)
    assert two.pins([A]) == [1]
    two.release(read, 0)
    assert two.pins([A]) == [0]
    assert two.release(read, 1) == 0


def test_scheduler_that_attaches_again_keeps_the_leases_it_knows(two):
    two.store([A, B])
    known, lost = two.lookup([A]), two.lookup([B])
    kept, dropped = two.reserve([C]), two.reserve([D])
    session = two.ledger.join("engine", SCHEDULER)
    two.ledger.keep_leases(session, [known.lease, kept.lease, LeaseId(99)])
    assert two.pins([A, B, C, D]) == [1, 0, 0, -1]
    assert set(session.leases) == {known.lease, kept.lease}
    assert (two.release(lost, 0), two.commit(dropped, 0)) == (0, 0)


def test_scheduler_that_attaches_again_frees_nothing_by_itself(two):
    two.store([A])
    two.lookup([A])
    two.ledger.join("engine", SCHEDULER)
    assert two.pins([A]) == [1]


# -- writing -------------------------------------------------------------------------------------------------


def test_stripe_is_found_only_after_its_last_writer_committed(two):
    write = two.reserve([A])
    assert (two.commit(write, 0), two.hit([A])) == (1, 0)
    assert (two.commit(write, 1), two.hit([A])) == (1, 1)
    assert two.session.counts["committed"] == 1


def test_writer_that_commits_twice_does_not_stand_for_the_other(two):
    write = two.reserve([A])
    assert [two.commit(write, 0), two.commit(write, 0)] == [1, 0]
    assert two.hit([A]) == 0


def test_second_commit_of_a_finished_lease_changes_nothing(one):
    write = one.store([A])
    assert (one.commit(write), one.abort(write), one.hit([A])) == (0, 0, 1)
    assert one.ledger.counts["stale"] == 2


def test_abort_after_ones_own_commit_changes_nothing(two):
    write = two.reserve([A])
    two.commit(write, 0)
    assert two.abort(write, 0) == 0
    two.commit(write, 1)
    assert two.hit([A]) == 1


def test_one_aborted_writer_aborts_the_chunk_but_its_slot_is_free_only_when_all_answered(two):
    write = two.reserve([A, B])
    two.abort(write, 0, 0, 1)
    assert (two.free_slots(), two.reserve([A]).places) == (6, [[NO_PLACE]])
    two.commit(write, 1)
    assert (two.free_slots(), two.hit([A])) == (7, 0)
    two.commit(write, 0)
    assert (two.hit([A]), two.hit([B])) == (0, 1)


def test_scheduler_aborts_for_all_ranks_what_none_was_told(two):
    write = two.reserve([A, B])
    assert two.abort(write, SCHEDULER, 1, 2) == 1
    assert (two.free_slots(), two.pins([A, B])) == (7, [0, -1])


def test_two_engines_that_write_the_same_prefix_get_one_set_of_places(ledger):
    first, second = Engine(ledger, TP2, "first"), Engine(ledger, TP2, "second")
    granted = first.reserve([A, B])
    late = second.reserve([A, B, C])
    assert (granted.places, late.places) == ([[0, 1]], [[NO_PLACE, NO_PLACE, 2]])
    assert late.chunks == 3
    first.commit(granted, 0)
    first.commit(granted, 1)
    assert [second.hit([A, B]), second.reserve([A, B])] == [2, (NO_LEASE, 2, [[NO_PLACE] * 2], "")]


def test_engine_with_part_of_the_places_answers_only_for_those(ledger):
    first, second = Engine(ledger, namespace(), "first"), Engine(ledger, namespace(), "second")
    first.reserve([A])
    late = second.reserve([A, B])
    assert second.commit(late) == 1
    assert first.pins([A, B]) == [0, 0]
    assert first.hit([A, B]) == 0


def test_ready_stripe_is_not_written_again(one):
    places = one.store([A]).places
    assert one.reserve([A]).lease == NO_LEASE
    assert one.lookup([A]).places == places


def test_same_key_twice_in_one_request_is_one_stripe(one):
    assert one.store([A, A]).places == [[0, NO_PLACE]]
    read = one.lookup([A, A])
    assert (read.places, one.pins([A])) == ([[0, 0]], [2])
    assert (one.release(read, 0, 0, 1), one.pins([A])) == (1, [1])


@pytest.mark.parametrize("groups", [[0, 0], [2], [-1], [0, 1, 2]])
def test_groups_that_are_not_there_are_refused_and_nothing_is_taken(ledger, groups):
    engine = Engine(ledger, HYBRID)
    with pytest.raises(BadRequest):
        engine.reserve([A], groups=groups)
    assert (engine.free_slots(0), engine.free_slots(1)) == (8, 8)
