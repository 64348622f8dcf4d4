"""The pure parts of a tier: when it is left alone, and how fast it is said to be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.tiers.breaker import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker
from kvcellar.tiers.meter import Meter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return Breaker(clock)


def fail(breaker, times=FAILURES):
    for _ in range(times):
        breaker.failure("broken")


def test_some_failures_in_a_row_open_it(breaker):
    fail(breaker, FAILURES - 1)
    assert breaker.enter()
    breaker.success()
    fail(breaker, FAILURES - 1)
    assert breaker.is_closed
    breaker.failure("broken")
    assert not breaker.is_closed
    assert not breaker.enter()
    assert breaker.reason == "broken"


def test_a_call_that_does_not_return_opens_it_at_once(breaker):
    breaker.failure("no answer", at_once=True)
    assert not breaker.enter()


def test_after_the_pause_one_may_try(breaker, clock):
    fail(breaker)
    clock.now += FIRST_PAUSE_S
    assert breaker.may_pass
    assert breaker.enter()
    assert not breaker.enter()
    breaker.success()
    assert breaker.is_closed
    assert breaker.enter()
    assert breaker.enter()


def test_each_failed_try_doubles_the_pause_up_to_a_bound(breaker, clock):
    fail(breaker)
    pause = FIRST_PAUSE_S
    for _ in range(10):
        clock.now += pause - 0.01
        assert not breaker.enter()
        clock.now += 0.01
        assert breaker.enter()
        breaker.failure("still broken")
        pause = min(2 * pause, LONGEST_PAUSE_S)
    assert pause == LONGEST_PAUSE_S


def test_failures_of_old_calls_do_not_prolong_the_pause(breaker, clock):
    fail(breaker, 20)
    clock.now += FIRST_PAUSE_S
    assert breaker.enter()


def test_a_try_that_was_never_made_leaves_it_to_the_next(breaker, clock):
    fail(breaker)
    clock.now += FIRST_PAUSE_S
    assert breaker.enter()
    breaker.no_verdict()
    assert breaker.enter()


@given(st.lists(st.sampled_from(["enter", "success", "failure", "hang", "wait"]), max_size=60))
def test_it_never_locks_itself_out(steps):
    clock = Clock()
    breaker = Breaker(clock)
    entered = 0
    for step in steps:
        if step == "enter":
            entered += breaker.enter()
        elif step == "wait":
            clock.now += 1.0
        elif entered:
            entered -= 1
            breaker.success() if step == "success" else breaker.failure(step, at_once=step == "hang")
    for _ in range(entered):
        breaker.failure("late")
    clock.now += LONGEST_PAUSE_S
    assert breaker.enter()


def move(meter, clock, seconds, moved):
    began = meter.begin()
    clock.now += seconds
    meter.end(began, moved)


def test_nothing_measured_is_no_rate(clock):
    meter = Meter(clock)
    assert meter.rate == 0
    move(meter, clock, 1, 0)
    assert meter.rate == meter.call_s == 0


def test_the_rate_is_bytes_over_busy_time(clock):
    meter = Meter(clock)
    for _ in range(3):
        move(meter, clock, 0.1, 1000)
        clock.now += 50  # idle
    assert meter.rate == pytest.approx(10_000)
    assert meter.bytes == 3000
    assert meter.call_s == pytest.approx(0.1)


def test_calls_at_once_share_the_time(clock):
    meter = Meter(clock)
    began = [meter.begin() for _ in range(4)]
    clock.now += 0.1
    for one in began:
        meter.end(one, 1000)
    assert meter.rate == pytest.approx(40_000)
    assert meter.call_s == pytest.approx(0.1)


def test_a_call_that_is_alone_says_nothing_once_calls_were_seen_together(clock):
    meter = Meter(clock)
    move(meter, clock, 0.1, 1000)
    assert meter.rate == pytest.approx(10_000)
    began = [meter.begin() for _ in range(4)]
    clock.now += 0.1
    for one in began:
        meter.end(one, 1000)
    move(meter, clock, 0.1, 1000)
    assert meter.rate == pytest.approx(40_000)


def test_a_rate_grows_old(clock):
    meter = Meter(clock)
    move(meter, clock, 0.1, 1000)
    assert meter.fresh_rate == meter.rate
    clock.now += 61
    assert meter.fresh_rate == 0
    assert meter.rate > 0


def test_old_measurements_fade(clock):
    meter = Meter(clock)
    for speed in (1000, 10):
        for _ in range(200):
            move(meter, clock, 0.1, speed)
    assert meter.rate == pytest.approx(100, rel=0.05)
