"""Every eviction policy keeps the same promises; the default also does what it was chosen for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.ledger import Shelf, Stripe
from kvcellar.ledger.policy import POLICIES, DefaultPolicy, S3Fifo
from kvcellar.slab import place_of
from tests.support import MemoryTable, keys

KEYS = keys(12)


def stripe(key) -> Stripe:
    return Stripe(key, place_of(0, 0), ready=True)


# What is done to one of twelve stripes: it is stored, used, may not go or may again, is lost; or the policy
# is asked for a victim.
STEPS = st.lists(
    st.tuples(st.sampled_from(["admit", "admit", "touch", "pin", "forget", "evict"]), st.integers(0, 11)),
    min_size=30,
    max_size=80,
)


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None)
@given(steps=STEPS)
def test_a_victim_is_found_if_there_is_one_and_is_never_one_that_may_not_go(name, steps):
    policy, held = POLICIES[name](), dict[bytes, Stripe]()
    pinned = set[bytes]()
    for step, number in steps:
        key = KEYS[number]
        if step == "admit" and key not in held:
            held[key] = stripe(key)
            policy.admit(held[key])
        elif step == "touch" and key in held:
            policy.touch([held[key]])
        elif step == "pin":
            pinned.symmetric_difference_update({key})
        elif step == "forget" and key in held:
            lost = held.pop(key)
            lost.indexed = False
            policy.forget(lost)
        elif step == "evict":
            victim = policy.evict(lambda one: one.key not in pinned)
            assert (victim is None) == (held.keys() <= pinned)
            if victim is not None:
                assert held.pop(victim.key) is victim
                assert victim.key not in pinned
                victim.indexed = False


@pytest.mark.parametrize("name", POLICIES)
def test_what_was_cleared_is_another_than_what_was_stored_since(name):
    policy, cleared, since = POLICIES[name](), stripe(KEYS[0]), stripe(KEYS[0])
    policy.admit(cleared)
    policy.admit(since)
    cleared.indexed = False
    policy.forget(cleared)
    policy.touch([since])
    assert policy.evict(lambda _: True) is since
    assert policy.evict(lambda _: True) is None


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None)
@given(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=30))
def test_a_parent_never_goes_before_its_children(name, prompts):
    """Prompts are walks down one tree; each loads what is there and stores the rest, in a shelf of eight."""
    shelf = Shelf(1, POLICIES[name]())
    shelf.add_rack(0, MemoryTable(8))
    for prompt in prompts:
        row = [keys(1, str(prompt[: n + 1]))[0] for n in range(len(prompt))]
        found = [one for one in shelf.find_run(row, gaps=False) if one is not None]
        shelf.pin(found)
        shelf.unpin(found[::-1])
        taken = [shelf.take(row[n], row[n - 1] if n else None) for n in range(len(found), len(row))]
        shelf.publish(one for one in reversed(taken) if one is not None)
        shelf.check({})
        there = [shelf.get(key) is not None for key in row]
        assert there == sorted(there, reverse=True), "a gap"


@pytest.mark.parametrize("name", POLICIES)
def test_there_is_no_victim_where_all_that_is_left_was_lost(name):
    policy = POLICIES[name]()
    lost = fill(policy, 3, "three")[2]
    lost.indexed = False
    policy.forget(lost)
    take(policy, 2)
    assert policy.evict(lambda one: True) is None


def fill(policy, count, seed):
    stripes = [stripe(key) for key in keys(count, seed)]
    for one in stripes:
        policy.admit(one)
    return stripes


def take(policy, count):
    """Evict so many; returns them in order."""
    gone = []
    for _ in range(count):
        victim = policy.evict(lambda one: True)
        victim.indexed = False
        gone.append(victim)
    return gone


def test_the_default_is_not_flushed_by_one_pass_over_much_data():
    policy = DefaultPolicy()
    used = fill(policy, 5, "used")
    policy.touch(used)
    fill(policy, 15, "filler")
    take(policy, 5)
    for number in range(100):  # newcomers, each unused
        fill(policy, 1, f"scan {number}")
        take(policy, 1)
    assert all(one.indexed for one in used)


def test_the_default_gives_up_nothing_in_use_for_answers_that_grow():
    """Three prompts of 50 chunks, loaded in turn, in a shelf of 185; eight answers at a time, of five chunks
    each, which are stored as they grow and never asked for. A tenth of what three prompts of 64,000 tokens
    are in 29 GiB.
    """
    shelf = Shelf(1, DefaultPolicy())
    shelf.add_rack(0, MemoryTable(185))
    prompts = [keys(50, f"prompt {number}") for number in range(3)]
    for prompt in prompts:
        store(shelf, prompt, range(50))
    found = []
    for turn in range(60):
        answers = [keys(5, f"answer {turn} {number}") for number in range(8)]
        for chunk in range(5):
            for answer in answers:
                store(shelf, answer, [chunk])
            there = [
                one for one in shelf.find_run(prompts[(turn + chunk) % 3], gaps=False) if one is not None
            ]
            shelf.pin(there)
            shelf.unpin(there[::-1])
            found.append(len(there))
    assert found == [50] * 300


def store(shelf, row, positions):
    taken = [shelf.take(row[n], row[n - 1] if n else None) for n in positions]
    shelf.publish(reversed(taken))


class Counting(S3Fifo):
    asked = 0

    def evict(self, may_go):
        def ask(one):
            self.asked += 1
            return may_go(one)

        return super().evict(ask)


def test_the_ends_of_answers_are_found_without_asking_their_beginnings_each_time():
    policy = Counting()
    shelf = Shelf(1, policy)
    shelf.add_rack(0, MemoryTable(1000))
    answer = keys(1000, "answer")
    for chunk in range(1000):
        store(shelf, answer, [chunk])
    for number in range(500):
        store(shelf, keys(1, f"other {number}"), [0])
    assert policy.asked < 2500
    assert shelf.get(answer[499]) is not None


def test_the_default_keeps_what_came_back_after_it_went():
    policy = DefaultPolicy()
    fill(policy, 8, "first")
    [gone] = take(policy, 1)
    policy.admit(stripe(gone.key))
    fill(policy, 8, "later")
    assert gone.key not in [one.key for one in take(policy, 12)]


def test_the_default_is_patient_with_parents_but_not_for_ever():
    """A thousand proven parents may not go; their child, a newcomer, is found without asking each of them."""
    policy = Counting()
    policy.touch(fill(policy, 1000, "parents"))
    assert policy.evict(lambda one: False) is None  # they are proven now
    [child] = fill(policy, 1, "child")
    policy.asked = 0
    assert policy.evict(lambda one: one is child) is child
    assert policy.asked < 100


def test_newcomers_that_are_being_read_are_not_asked_again_and_again():
    policy = Counting()
    proven = fill(policy, 20, "proven")
    policy.touch(proven)
    assert policy.evict(lambda one: False) is None  # they are proven now
    for one in fill(policy, 1000, "read"):
        one.pins = 1
    policy.asked = 0
    for _ in range(10):
        victim = policy.evict(lambda one: not one.pins)
        assert victim in proven
        victim.indexed = False
    assert policy.asked < 100
