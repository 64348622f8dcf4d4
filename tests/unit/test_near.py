"""Loads that are over are told once, by whichever side comes first."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.alone import load

near = load("near")


def no_stores(seconds):
    return Counter()


@pytest.fixture
def landed():
    """Of an engine whose scheduler side asks."""
    one = near.Landed(no_stores)
    assert one.fetch() == set()
    return one


def test_what_is_fetched_is_not_reported(landed):
    assert landed.put({"a", "b"}) == set()
    assert landed
    assert landed.fetch() == {"a", "b"}
    assert not landed
    assert [landed.put(set()) for _ in range(5)] == [set()] * 5


def test_what_nobody_fetches_is_reported_after_two_steps(landed):
    reported = [landed.put(one) for one in ({"a"}, {"b"}, set(), set())]
    assert reported == [set(), set(), {"a"}, {"b"}]
    assert landed.fetch() == set()


def test_where_nobody_ever_asks_all_is_reported_at_once():
    landed = near.Landed(no_stores)
    assert [landed.put({"a"}), landed.put({"b"})] == [{"a"}, {"b"}]
    assert not landed


def test_a_scheduler_side_finds_its_worker_side_if_there_is_one_of_that_name_only():
    one, other = near.open_landed("one", no_stores), near.open_landed("other", no_stores)
    assert (near.landed_of("one"), near.landed_of("other"), near.landed_of("third")) == (one, other, None)
    twin = near.open_landed("one", no_stores)
    assert near.landed_of("one") is None
    near.close_landed("one", twin)
    assert near.landed_of("one") is None
    near.close_landed("other", other)
    assert near.landed_of("other") is None
    near.close_landed("other", other)


@given(st.lists(st.one_of(st.just("fetch"), st.integers(0, 3)), max_size=60))
def test_each_is_told_exactly_once_and_soon(steps):
    landed, told, number = near.Landed(no_stores), [], 0
    for step in [*steps, 0, 0]:
        if step == "fetch":
            told += landed.fetch()
        else:
            told += landed.put(set(range(number, number + step)))
            number += step
    assert sorted(told) == list(range(number))
