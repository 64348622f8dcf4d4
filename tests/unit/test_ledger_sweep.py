"""Sweep: what a clear, or the end of grace, leaves behind comes free in parts, and nothing is wrong between
them.
"""

import asyncio

import pytest

from kvcellar.ledger import audit
from kvcellar.server.sweep import sweep
from tests.support import Engine, clear, keys, namespace
from tests.support import sweep as sweep_all

A, B, C, D, E, F, G = keys(7)
X, Y, Z = keys(3, seed="other prompt")


@pytest.fixture
def slow(monkeypatch, ledger):
    """An engine with memory for six chunks, two of which come free at a time."""
    for name in ("shelf", "ledger"):
        monkeypatch.setattr(f"kvcellar.ledger.{name}.SWEEP", 2)
    return Engine(ledger, namespace(), slots=6)


def frees(engine: Engine) -> list[int]:
    """Free places after each part, to the last."""
    free, more = list[int](), True
    while more:
        more = engine.ledger.sweep()
        free.append(engine.free_slots())
        audit(engine.ledger)
    return free


def test_what_is_cleared_is_gone_at_once_and_its_places_come_by_and_by(slow):
    slow.store([A, B, C, D, E])
    assert slow.ledger.clear() == 5
    assert (slow.hit([A]), len(slow.room.shelves[0]), slow.free_slots()) == (0, 0, 1)
    assert frees(slow) == [3, 5, 6]
    assert slow.room.shelves[0].left_by == {"cleared": 5}


def test_what_is_stored_before_all_of_a_clear_is_swept_stays(slow):
    slow.store([A, B, C])
    slow.ledger.clear()
    slow.store([A, B])
    audit(slow.ledger)
    sweep_all(slow.ledger)
    assert (slow.hit([A, B, C]), slow.free_slots()) == (2, 4)


def test_what_was_in_writing_is_cleared_whether_swept_or_not(slow):
    writes = [slow.reserve([key]) for key in (A, B, C)]
    slow.ledger.clear()
    slow.ledger.sweep()
    for write in writes:
        slow.commit(write)
    assert slow.session.counts["committed"] == 0
    audit(slow.ledger)
    sweep_all(slow.ledger)
    assert (slow.hit([A]), slow.hit([B]), slow.hit([C]), slow.free_slots()) == (0, 0, 0, 6)
    assert slow.room.shelves[0].left_by == {"cleared": 3}


def test_nothing_new_is_evicted_for_what_is_not_swept_yet(slow):
    slow.store([A, B, C, D])
    slow.ledger.clear()
    slow.store([X, Y])
    assert slow.store([E, F, G, Z]).chunks == 4
    assert slow.pins([X, Y, E, F, G, Z]) == [0] * 6
    assert slow.room.shelves[0].left_by == {"cleared": 4}


def test_rack_is_not_idle_before_it_is_swept(slow):
    slow.store([A, B, C])
    slow.ledger.clear()
    slow.ledger.sweep()
    assert slow.room.shelves[0].idle_racks() == set()
    slow.ledger.sweep()
    assert slow.room.shelves[0].idle_racks() == {0}


def test_places_that_grace_has_kept_back_come_by_and_by(slow):
    slow.store([A, B, C, D, E])
    slow.ledger.set_grace(True)
    clear(slow.ledger)
    slow.ledger.set_grace(False)
    assert slow.free_slots() == 1
    assert frees(slow) == [3, 5, 6]


def test_others_have_their_turn_while_it_is_swept(slow):
    """As the server does it."""

    async def clear_and_look() -> list[int]:
        slow.ledger.clear()
        sweeping = asyncio.create_task(sweep(slow.ledger))
        seen = []
        while not sweeping.done():
            seen.append(slow.free_slots())
            await asyncio.sleep(0)
        return seen

    slow.store([A, B, C, D, E])
    assert {1, 3, 5} <= set(asyncio.run(clear_and_look()))
    assert slow.free_slots() == 6
