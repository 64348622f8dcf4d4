"""What the server holds for itself: pins that belong to no session, and stripes brought up for one use."""

import pytest

from kvcellar.ledger import Ledger, audit
from kvcellar.server.fetch import Promotion
from tests.support import Engine, keys, namespace

A, B, C, D, X, Y, Z = keys(7)


@pytest.fixture
def ledger():
    return Ledger(epoch=1, hold_limit=1 << 30)


@pytest.fixture
def engine(ledger):
    return Engine(ledger, namespace(), slots=4)


def stripe(engine, key):
    found = engine.room.shelves[0].get(key)
    assert found is not None
    return found


def test_what_the_server_pins_is_not_evicted(ledger, engine):
    engine.store(keys(4))
    shelf = engine.room.shelves[0]
    held = stripe(engine, keys(4)[3])
    ledger.own.pin(shelf, held)
    audit(ledger)
    engine.store(keys(4, seed=1))
    assert engine.pins(keys(4))[3] == 1
    ledger.own.unpin(shelf, held)
    audit(ledger)
    assert not ledger.own.held
    engine.store(keys(4, seed=2))
    assert engine.hit(keys(4)) == 0


def test_a_pin_of_the_server_is_no_use_of_the_stripe(ledger, engine):
    engine.store(keys(1))
    held = stripe(engine, keys(1)[0])
    ledger.own.pin(engine.room.shelves[0], held)
    ledger.own.unpin(engine.room.shelves[0], held)
    assert not held.visited


def test_no_engine_leaving_frees_what_the_server_pins(ledger, engine):
    engine.store(keys(2))
    shelf, held = engine.room.shelves[0], stripe(engine, keys(2)[0])
    ledger.own.pin(shelf, held)
    ledger.own.pin(shelf, held)
    engine.leave()
    assert held.pins == 2
    ledger.own.unpin(shelf, held)
    assert held.pins == 1
    audit(ledger)


@pytest.mark.parametrize("server_last", [False, True])
def test_a_temporary_stripe_goes_with_the_last_pin_of_all(ledger, engine, server_last):
    engine.bring(*keys(1))
    shelf, held = engine.room.shelves[0], stripe(engine, keys(1)[0])
    ledger.own.pin(shelf, held)
    granted = engine.lookup(keys(1))
    ends = [lambda: ledger.own.unpin(shelf, held), lambda: engine.release(granted)]
    first, last = reversed(ends) if server_last else ends
    first()
    assert engine.pins(keys(1)) == [1]
    last()
    assert engine.pins(keys(1)) == [-1]
    audit(ledger)


def test_write_back_is_told_of_what_was_published_later_chunks_first(ledger, engine):
    told = []
    ledger.published = lambda room, group, stripes: told.append((room, group, [s.key for s in stripes]))
    engine.store(keys(3))
    assert told == [(engine.room, 0, keys(3)[::-1])]


def bring(shelf, key) -> None:
    """Read once from a tier, as a server does with what it will not keep."""
    stripe = shelf.take(key, None, temporary=True)
    shelf.publish([stripe])
    shelf.remove(stripe, "temporary")


def test_a_place_that_was_vacated_is_no_room(engine):
    """Or one pass over cold KV would evict everybody: each leaves a place in which the next one stays."""
    [shelf] = engine.room.shelves
    assert shelf.has_room
    engine.store([A, B, C, D])
    assert not shelf.has_room
    for key in (X, Y, Z):
        bring(shelf, key)
        assert (shelf.free_slots, shelf.has_room) == (1, False)
    assert shelf.left_by == {"evicted": 1, "temporary": 3}


def test_a_place_for_what_could_not_be_read_after_all_is_no_room_either(engine):
    [shelf] = engine.room.shelves
    engine.store([A, B, C, D])
    shelf.remove(shelf.take(X, None, temporary=True), "aborted")
    assert (shelf.free_slots, shelf.has_room) == (1, False)


def test_what_others_leave_is_room_beside_vacated_places(engine):
    [shelf] = engine.room.shelves
    engine.store([A, B, C, D])
    bring(shelf, X)
    read = engine.lookup([A])
    engine.ledger.condemn(engine.session, 0, read.lease, 0, 0)
    engine.release(read)
    assert (shelf.free_slots, shelf.has_room) == (2, True)
    engine.store([Y])
    assert (shelf.free_slots, shelf.has_room) == (1, False)
    engine.store([Z])
    assert (shelf.free_slots, shelf.has_room) == (0, False)


def test_after_a_clear_every_place_is_room(engine):
    [shelf] = engine.room.shelves
    for stripe in [shelf.take(key, None, temporary=True) for key in (A, B, C, D)]:
        shelf.remove(stripe, "aborted")
    assert (shelf.free_slots, shelf.has_room) == (4, False)
    shelf.clear()
    assert (shelf.free_slots, shelf.has_room) == (4, True)


def test_what_is_brought_up_is_kept_where_there_is_room_or_when_it_comes_again():
    promotion = Promotion(size=2)
    space = namespace().id
    one, two, three, four = ((space, 0, key) for key in keys(4))
    assert promotion.keeps(one, is_room=True)
    assert not promotion.keeps(two, is_room=False)
    assert promotion.keeps(two, is_room=False)
    assert not promotion.keeps(two, is_room=False), "and from then on as if it had never been seen"
    assert not promotion.keeps(three, is_room=False)
    assert not promotion.keeps(four, is_room=False)
    assert not promotion.keeps(two, is_room=False), "forgotten: only so many are remembered"


def test_the_same_key_in_another_group_or_namespace_comes_for_the_first_time():
    promotion, [key] = Promotion(), keys(1)
    mine, other = namespace().id, namespace(tenant="other").id
    assert not promotion.keeps((mine, 0, key), is_room=False)
    assert not promotion.keeps((mine, 1, key), is_room=False)
    assert not promotion.keeps((other, 0, key), is_room=False)
    assert promotion.keeps((mine, 0, key), is_room=False)
