"""Loads that are over are told once, by whichever side comes first."""

from hypothesis import given
from hypothesis import strategies as st

from tests.alone import load

near = load("near")


def test_what_is_fetched_is_not_reported():
    landed = near.Landed()
    assert landed.put({"a", "b"}) == set()
    assert landed
    assert landed.fetch() == {"a", "b"}
    assert not landed
    assert [landed.put(set()) for _ in range(5)] == [set()] * 5


def test_what_nobody_fetches_is_reported_after_two_steps():
    landed = near.Landed()
    assert [landed.put({"a"}), landed.put({"b"}), landed.put(set()), landed.put(set())] == [
        set(),
        set(),
        {"a"},
        {"b"},
    ]
    assert landed.fetch() == set()


def test_a_scheduler_side_of_another_engine_or_process_does_not_listen():
    near.listen("one")
    near.landed("one").put({"a"})
    assert near.landed("other") is None
    near.close("one")
    assert near.landed("one") is None
    near.close("one")


@given(st.lists(st.one_of(st.just("fetch"), st.integers(0, 3)), max_size=60))
def test_each_is_told_exactly_once_and_soon(steps):
    landed, told, number = near.Landed(), [], 0
    for step in [*steps, 0, 0]:
        if step == "fetch":
            told += landed.fetch()
        else:
            told += landed.put(set(range(number, number + step)))
            number += step
    assert sorted(told) == list(range(number))
