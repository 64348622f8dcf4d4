"""When a load should be over: told by the fastest of the last ones."""

from typing import Any

from tests.alone import load

Forecast = load("forecast").Forecast


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def after(forecast: Any, clock: Clock, size: int, seconds: float) -> None:
    forecast.begin(size)
    clock.now += seconds
    forecast.end(size)


def test_nothing_is_due_before_a_load_was_seen():
    clock = Clock()
    forecast = Forecast(clock)
    assert not forecast.is_due(1.0)
    forecast.begin(1000)
    assert not forecast.is_due(1e9)


def test_a_load_is_due_when_one_of_its_size_would_be_over():
    clock = Clock()
    forecast = Forecast(clock)
    after(forecast, clock, 1000, 0.010)
    forecast.begin(2000)
    assert not forecast.is_due(0.019)
    assert forecast.is_due(0.021)
    clock.now += 0.016
    assert forecast.is_due(0.005)
    clock.now += 1.0  # late, and so due at any moment
    assert forecast.is_due(0.005)
    forecast.end(2000)
    assert not forecast.is_due(0.005)


def test_the_fastest_counts_and_is_forgotten_slowly():
    clock = Clock()
    forecast = Forecast(clock)
    after(forecast, clock, 1000, 0.010)
    after(forecast, clock, 1000, 0.100)  # something else had the bus
    forecast.begin(1000)
    assert not forecast.is_due(0.0105)
    assert forecast.is_due(0.0115)
    forecast.end(0)  # failed: says nothing of speed
    for _ in range(50):
        after(forecast, clock, 1000, 0.100)
    forecast.begin(1000)
    assert not forecast.is_due(0.099)


def test_a_load_of_nothing_is_due_at_once():
    forecast = Forecast(Clock())
    forecast.begin(0)
    assert forecast.is_due(0.0)
