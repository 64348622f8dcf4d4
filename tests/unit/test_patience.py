"""When an engine waits for a tier, and for how long. Pure: time is a number here."""

import pytest

from tests.alone import load

module = load("patience")
Patience = module.Patience

CHUNK = 256


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def patience(clock):
    return Patience(clock)


def compute(patience, clock, tokens, seconds):
    patience.step_begins(tokens)
    clock.now += seconds
    patience.step_ends()


def test_the_prefill_rate_is_measured_by_steps(patience, clock):
    compute(patience, clock, 2000, 1.0)
    assert patience.computing_s(4000) == pytest.approx(2.0)


def test_decoding_steps_say_nothing(patience, clock):
    compute(patience, clock, 2000, 1.0)
    for _ in range(100):
        compute(patience, clock, 8, 1.0)
    assert patience.computing_s(4000) == pytest.approx(2.0)


def test_steps_end_in_the_order_in_which_they_began(patience, clock):
    """An engine that schedules ahead: each takes a second, and the next begins at once."""
    patience.step_begins(8)
    for _ in range(3):
        clock.now += 0.01
        patience.step_begins(2000)
        clock.now += 0.99
        patience.step_ends()
    assert patience.computing_s(2000) == pytest.approx(1.98, abs=0.02)


def test_a_step_that_never_began_cannot_end(patience):
    patience.step_ends()
    assert patience.computing_s(20_000) == pytest.approx(1.0)


def test_a_faster_engine_is_believed_at_once_and_a_slower_one_slowly(patience, clock):
    compute(patience, clock, 2000, 1.0)
    compute(patience, clock, 2000, 0.5)
    assert patience.computing_s(4000) == pytest.approx(1.0)
    compute(patience, clock, 2000, 10.0)
    assert patience.computing_s(4000) < 1.1
    for _ in range(200):
        compute(patience, clock, 2000, 10.0)
    assert patience.computing_s(4000) == pytest.approx(20.0, rel=0.1)


def test_a_tier_that_is_slower_than_computing_is_not_waited_for(patience, clock):
    compute(patience, clock, 2560, 1.0)  # 0.1 s a chunk
    for chunk_s, pays in ((0.2, False), (0.09, False), (0.01, True)):
        patience.told(0.0, chunk_s)
        assert bool(patience.worth(10, CHUNK)) == pays


@pytest.mark.parametrize("chunks", [1, 3, 10, 100, 4000])
@pytest.mark.parametrize("chunk_s", [0.0, 1e-6, 1e-4, 0.01, 0.05, 0.079, 0.081, 1.0, 100.0])
def test_no_wait_is_longer_than_computing(patience, clock, chunks, chunk_s):
    compute(patience, clock, 2560, 1.0)
    patience.told(0.0, chunk_s)
    assert 0 <= patience.worth(chunks, CHUNK) <= patience.computing_s(chunks * CHUNK)


def test_the_first_object_takes_its_time_however_fast_the_rest_is(patience, clock):
    compute(patience, clock, 2560, 1.0)
    patience.told(0.15, 0.01)
    assert patience.worth(1, CHUNK) == 0
    assert patience.worth(10, CHUNK) == pytest.approx(1.5 * 0.25 + 0.02)


@pytest.mark.parametrize(
    ("chunks", "trial"), [(1000, 0.25), (20, 0.08), (5, 0.02), (1, 0.02)]
)  # 0.1 s a chunk: a quarter of a second, 4%, or what asking takes
def test_an_unknown_tier_gets_a_short_trial(patience, clock, chunks, trial):
    compute(patience, clock, 2560, 1.0)
    assert patience.worth(chunks, CHUNK) == pytest.approx(trial)


def test_before_anything_was_measured_a_trial_is_half_of_what_a_fast_engine_takes(patience):
    assert patience.worth(1, CHUNK) == pytest.approx(CHUNK / 20_000 / 2)
    assert patience.worth(10, CHUNK) == pytest.approx(0.02)


def test_a_tier_of_which_only_its_speed_is_known_waits_for_no_more_than_a_fast_engine_takes(patience):
    """The first request after a start: the engine's own rate is not known yet."""
    patience.told(0.001, 0.001)
    assert 0 < patience.worth(32, CHUNK) < 32 * CHUNK / 20_000
    patience.told(0.001, 0.02)
    assert patience.worth(32, CHUNK) == 0


@pytest.mark.parametrize("chunks", [1, 2, 8, 32, 64])
@pytest.mark.parametrize("tier_rate", [0.2, 0.5, 0.9, 1.0, 1.2, 1.3, 2.0, 10.0, 30.0])
def test_a_tier_that_keeps_its_word_never_makes_it_slower(patience, clock, chunks, tier_rate):
    """`tier_rate`: times as fast as computing. What the wait brings is used, the rest is computed."""
    compute(patience, clock, 4 * CHUNK, 1.0)
    chunk_s, lead_s = 0.25 / tier_rate, 0.01
    patience.told(lead_s, chunk_s)
    wait, computing = patience.worth(chunks, CHUNK), patience.computing_s(chunks * CHUNK)
    came = min(chunks, int(max(0.0, wait - lead_s) / chunk_s))
    took = min(wait, lead_s + chunks * chunk_s) if wait else 0.0
    assert took + (chunks - came) / chunks * computing <= 1.05 * computing


def test_nothing_missing_is_worth_nothing(patience):
    assert patience.worth(0, CHUNK) == 0
    assert patience.worth(-1, CHUNK) == 0


def test_a_wait_ends_and_is_over_for_good(patience, clock):
    patience.begin(7, 1.0)
    clock.now += 1.04
    assert patience.lasts(7), "the answer may be on its way"
    clock.now += 0.02
    assert not patience.lasts(7)
    clock.now -= 1
    assert not patience.lasts(7)


def test_what_does_not_pay_is_over_at_once(patience):
    patience.begin(7, 0.0)
    assert not patience.lasts(7)
    assert not patience.lasts(8), "nobody began that"


def test_for_a_request_in_the_queue_a_tier_may_read_as_long_as_computing_takes(patience, clock):
    compute(patience, clock, 2560, 1.0)
    assert patience.ahead(100, CHUNK) == pytest.approx(10.0)
    assert patience.ahead(1, CHUNK) == 1.0, "nobody waits for it yet"
