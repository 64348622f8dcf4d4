"""Write filters: what reaches a tier, and what they remember to decide it."""

from random import Random

import pytest

from kvcellar.errors import ConfigError
from kvcellar.tiers.admission import Event, Ghost, WriteEverything, WriteReused
from kvcellar.tiers.registry import parse_spec
from tests.support import keys

A, B = keys(2)


def numbers(count, seed=0):
    return [Random(seed + at).getrandbits(64) for at in range(count)]


def test_everything_is_written_when_it_is_stored_and_at_no_other_time():
    assert [event for event in Event if WriteEverything().wants(A, event)] == [Event.STORED]


def test_reused_is_what_was_found_in_memory():
    chosen = WriteReused()
    assert not chosen.wants(A, Event.STORED)
    assert chosen.wants(A, Event.USED)


def test_reused_is_what_was_computed_twice():
    chosen = WriteReused()
    assert not chosen.wants(A, Event.STORED)
    assert not chosen.wants(B, Event.STORED)
    assert chosen.wants(A, Event.STORED)


@pytest.mark.parametrize("salt", [1, -1, 1 << 63, hash((b"namespace", 1))])
def test_equal_keys_of_two_groups_are_two_things(salt):
    chosen = WriteReused()
    assert not chosen.wants(A, Event.STORED)
    assert not chosen.wants(A, Event.STORED, salt)
    assert chosen.wants(A, Event.STORED, salt)


def test_reused_forgets_what_was_long_ago():
    chosen = WriteReused(window=100)
    for key in keys(1000, "others"):
        assert not chosen.wants(key, Event.STORED)
    assert not any(chosen.wants(key, Event.STORED) for key in keys(800, "others"))


# -- the operator's choice


def test_a_disk_is_written_as_its_url_says():
    assert parse_spec("disk:///kv").write_filter is WriteEverything
    assert parse_spec("disk:///kv?size=1GiB&write=everything").write_filter is WriteEverything
    assert parse_spec("disk:///kv?write=reused&size=1GiB").write_filter is WriteReused


def test_a_wrong_choice_is_named_with_the_right_ones():
    with pytest.raises(ConfigError, match=r"write='once' is none of everything, reused"):
        parse_spec("disk:///kv?write=once")


def test_a_tier_that_hosts_share_is_given_everything():
    """What this host reads once, another may read next: the option is not taken from its engine."""
    spec = parse_spec("redis://127.0.0.1:1?write=reused")
    assert spec.write_filter is WriteEverything
    with pytest.raises(ConfigError, match="write"):
        spec.open()


# -- the ghost


def test_a_ghost_knows_most_of_its_window_and_nothing_older():
    ghost = Ghost(1000)
    row = numbers(3000)
    for number in row:
        assert number not in ghost
        ghost.add(number)
    assert not any(number in ghost for number in row[:2000])
    assert row[-1] in ghost
    assert 600 < sum(number in ghost for number in row[2000:]) < 1000


def test_a_ghost_of_an_empty_window_knows_nothing():
    ghost = Ghost(0)
    ghost.add(numbers(1)[0])
    assert numbers(1)[0] not in ghost


def test_a_ghost_keeps_its_size():
    ghost = Ghost(1000)
    for number in numbers(5000):
        ghost.add(number)
    assert len(ghost._cells) == 2048
