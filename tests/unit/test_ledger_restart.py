"""After a restart: what was committed is found, and nothing that somebody may still touch is given out."""

import pytest

from kvcellar.ledger import Ledger, Shelf, audit
from tests.support import FREE, READY, WRITING, Engine, MemoryTable, clear, end_grace, keys, namespace

PAGE = 4096
A, B, C, D = keys(4)
X, Y, Z = keys(3, seed="other prompt")


@pytest.fixture
def small():
    """An engine of one rank with memory for four chunks."""
    return Engine(Ledger(epoch=7, hold_limit=1 << 40), namespace(), slots=4)


def there(engine: Engine, *asked) -> list[bool]:
    return [pins >= 0 for pins in engine.pins(asked)]


def restarted(*tables: MemoryTable) -> Engine:
    """A new server in grace that adopted these racks, as Arena.adopt and StripeTable.scan hand them over."""
    ledger = Ledger(epoch=8, hold_limit=1 << 40)
    ledger.set_grace(True)
    shelf = ledger.open_room(namespace()).shelves[0]
    for number, table in enumerate(tables):
        ready = [
            (slot, *entry)
            for slot, (state, entry) in enumerate(zip(table.states, table.entries, strict=True))
            if state == READY and entry is not None
        ]
        limbo = [slot for slot, state in enumerate(table.states) if state == WRITING]
        shelf.adopt(number, table, ready, limbo)
    return Engine(ledger, namespace())


@pytest.fixture
def table(small):
    return small.room.shelves[0].tables[0]


def test_restart_finds_what_was_committed_and_not_what_was_in_writing(small, table):
    places = small.store([A, B]).places
    small.reserve([C], B)
    engine = restarted(table)
    assert (engine.hit([A, B, C]), engine.lookup([A, B]).places) == (2, places)
    assert there(engine, C) == [False]


def test_in_grace_nothing_is_evicted_and_places_in_limbo_are_not_given_out(small, table):
    small.store([A, B])
    small.reserve([C], B)
    engine = restarted(table)
    granted = engine.reserve([X, Y])
    assert (granted.places, granted.reason) == ([[3]], "no_room")
    assert engine.hit([A, B]) == 2


def test_after_grace_limbo_is_free_and_eviction_goes_on(small, table):
    small.store([A, B])
    small.reserve([C], B)
    engine = restarted(table)
    end_grace(engine.ledger)
    assert (engine.free_slots(), table.states) == (2, [READY, READY, FREE, FREE])
    assert engine.reserve([X, Y, Z]).chunks == 3
    assert there(engine, A, B) == [True, False]
    audit(engine.ledger)


def test_namespace_that_arrives_in_grace_is_not_evicted_either():
    ledger = Ledger(epoch=7, hold_limit=1 << 40)
    ledger.set_grace(True)
    engine = Engine(ledger, namespace(), slots=1)
    engine.store([A])
    assert engine.reserve([B]).chunks == 0
    ledger.set_pinned(engine.namespace.id, False)
    assert engine.reserve([B]).chunks == 0
    end_grace(ledger)
    assert engine.reserve([B]).chunks == 1


def test_rack_with_places_in_limbo_is_not_idle(small, table):
    small.reserve([A])
    engine = restarted(table)
    shelf = engine.room.shelves[0]
    assert shelf.idle_racks() == set()
    end_grace(engine.ledger)
    assert shelf.idle_racks() == {0}


def test_in_grace_clear_hides_but_gives_out_no_place_that_an_old_reader_may_have(small, table):
    small.store([A, B, C, D])
    engine = restarted(table)
    clear(engine.ledger)
    assert (engine.hit([A]), set(table.states)) == (0, {WRITING})  # nor would the next server find it
    assert engine.reserve([X]).chunks == 0
    end_grace(engine.ledger)
    assert engine.reserve([X]).chunks == 1
    audit(engine.ledger)


def test_in_grace_a_condemned_place_is_not_given_out(small, table):
    small.store([A, B, C, D])
    engine = restarted(table)
    read = engine.lookup([A])
    engine.ledger.condemn(engine.session, 0, read.lease, 0, 0)
    engine.release(read)
    assert engine.reserve([X]).chunks == 0
    end_grace(engine.ledger)
    assert engine.reserve([X]).chunks == 1
    audit(engine.ledger)


@pytest.mark.parametrize("leave", ["clear", "condemn"])
def test_what_was_hidden_while_it_was_read_does_not_come_back_after_a_restart(small, table, leave):
    small.store([A])
    read = small.lookup([A])
    if leave == "clear":
        clear(small.ledger)
    else:
        small.ledger.condemn(small.session, 0, read.lease, 0, 0)
    engine = restarted(table)
    assert engine.hit([A]) == 0


def test_key_stored_again_while_its_condemned_bytes_are_read_restarts_with_the_new_bytes(small, table):
    small.store([A])
    read = small.lookup([A])
    small.ledger.condemn(small.session, 0, read.lease, 0, 0)
    (new,) = small.store([A]).places
    engine = restarted(table)
    assert engine.lookup([A]).places == [new]
    assert read.places[0][0] not in engine.reserve([X, Y, Z]).places[0]


def test_adopted_prefix_is_evicted_from_its_end_whatever_the_order_of_its_slots():
    shelf = Shelf(PAGE)
    shelf.adopt(0, MemoryTable(2), [(0, B, A), (1, A, None)], [])
    shelf.set_guarded(False)
    child = shelf.get(B)
    assert child is not None
    shelf.pin([child])
    assert shelf.take(X, None, temporary=False) is None  # A must wait for B
    shelf.let_go(child)
    assert shelf.take(X, None, temporary=False) is not None
    assert (shelf.get(A) is not None, shelf.get(B)) == (True, None)


def test_leftover_of_a_key_in_another_rack_is_free_only_after_grace():
    shelf = Shelf(PAGE)
    tables = [MemoryTable(2), MemoryTable(2)]
    for number, table in enumerate(tables):
        shelf.adopt(number, table, [(0, A, None)], [])
    assert (len(shelf), shelf.slots, shelf.free_slots) == (1, 4, 2)
    assert tables[1].states == [WRITING, FREE]
    shelf.set_guarded(False)
    assert [shelf.sweep(2), shelf.sweep(2)] == [1, 0]
    shelf.check({})
    assert shelf.free_slots == 3
