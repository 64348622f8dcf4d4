"""A shelf of which nothing may go: it is not looked through for every reserve, and misses nobody who may go
later.
"""

from kvcellar.ledger import Ledger, Stripe, shelf
from tests.support import Engine, keys, namespace

A, B, C, D = keys(4)
X, Y = keys(2, seed="other prompt")


def full(ledger: Ledger) -> Engine:
    return Engine(ledger, namespace(), slots=4)


def test_while_all_is_being_read_a_reserve_does_not_look_at_it_again(ledger, monkeypatch):
    small = full(ledger)
    small.store([A, B, C, D])
    read = small.lookup([A, B, C, D])
    assert small.reserve([X]).chunks == 0
    looks: list[Stripe] = []
    monkeypatch.setattr(small.room.shelves[0], "_may_go", looks.append)
    assert small.reserve([X], D).chunks == small.reserve([Y]).chunks == 0
    assert looks == []
    monkeypatch.undo()
    small.release(read, 0, 3, 4)
    assert small.reserve([X], D).chunks == 0, "D stays: it is what X follows"
    assert small.reserve([Y]).chunks == 1, "and goes for somebody else"


def test_while_all_else_is_being_read_a_growing_answer_looks_at_its_own_end_alone(ledger, monkeypatch):
    small = full(ledger)
    small.store([A, B, C])
    small.lookup([A, B, C])
    small.store([D])
    assert small.reserve([X], D).chunks == 0
    own, looks = small.room.shelves[0], set[bytes]()
    may_go = own._may_go

    def noted(stripe: Stripe) -> bool:
        looks.add(stripe.key)
        return may_go(stripe)

    monkeypatch.setattr(own, "_may_go", noted)
    for _ in range(3):
        assert small.reserve([X], D).chunks == 0
    assert looks == {D}
    assert small.reserve([Y]).chunks == 1, "it goes for somebody else"


def test_what_may_go_at_last_is_found_however_much_that_is(monkeypatch):
    """More than a shelf keeps in mind, and less."""
    monkeypatch.setattr(shelf, "_FEW", 2)
    for count in (1, 2, 3, 4):
        small = full(Ledger(epoch=1, hold_limit=1 << 20))
        small.store([A, B, C, D])
        read = small.lookup([A, B, C, D])
        assert small.reserve([X]).chunks == 0
        small.release(read, 0, 4 - count, 4)
        assert small.reserve(keys(4, "more")).chunks == count
