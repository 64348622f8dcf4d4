"""A short fuzz run: the same code as `make fuzz`, with fixed words."""

import pytest
from rich.console import Console

from tests.campaign import run
from tests.fuzz.director import Director


@pytest.mark.timeout(300)
def test_every_wrong_frame_is_answered_or_ends_its_connection():
    score = run(Director, count=20_000, seed=11, seconds=120, console=Console(quiet=True))
    assert not score.violations()
    assert score.frames >= 20_000
    assert score.counts["objects"] > 100
