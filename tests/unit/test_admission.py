"""Write filters: what reaches a tier, and what they remember to decide it."""

import pytest

from kvcellar.tiers.admission import FILTERS, Event, Ghost, WriteEverything, WriteEvicted, WriteReused
from tests.support import keys

A, B = keys(2)


def test_everything_is_written_when_it_is_stored():
    assert WriteEverything().wants(A, Event.STORED)
    assert WriteEverything().wants(A, Event.USED)  # the tier lost it, or had no room
    assert not WriteEverything().wants(A, Event.EVICTED)


def test_reused_is_what_was_found_in_memory():
    chosen = WriteReused()
    assert not chosen.wants(A, Event.STORED)
    assert chosen.wants(A, Event.USED)


def test_reused_is_what_was_computed_twice():
    chosen = WriteReused()
    assert not chosen.wants(A, Event.STORED)
    assert not chosen.wants(B, Event.STORED)
    assert not chosen.wants(A, Event.EVICTED)
    assert chosen.wants(A, Event.STORED)


def test_reused_forgets_what_was_long_ago():
    chosen = WriteReused(window=100)
    for key in keys(1000, "others"):
        assert not chosen.wants(key, Event.STORED)
    assert not any(chosen.wants(key, Event.STORED) for key in keys(800, "others"))


def test_evicted_is_written_at_no_other_time():
    assert [event for event in Event if WriteEvicted().wants(A, event)] == [Event.EVICTED]


@pytest.mark.parametrize("name", FILTERS)
def test_every_filter_writes_what_is_used_again_at_some_time(name):
    chosen = FILTERS[name]()
    assert True in [chosen.wants(A, event) for event in (Event.STORED, Event.USED, Event.EVICTED)]


# -- the ghost


def test_a_ghost_knows_most_of_its_window_and_nothing_older():
    ghost = Ghost(1000)
    row = keys(3000)
    for key in row:
        assert key not in ghost
        ghost.add(key)
    assert not any(key in ghost for key in row[:2000])
    assert row[-1] in ghost
    assert 600 < sum(key in ghost for key in row[2000:]) < 1000


def test_a_ghost_of_an_empty_window_knows_nothing():
    ghost = Ghost(0)
    ghost.add(A)
    assert A not in ghost


def test_a_ghost_keeps_its_size():
    ghost = Ghost(1000)
    for key in keys(5000):
        ghost.add(key)
    assert len(ghost._cells) == 2048
