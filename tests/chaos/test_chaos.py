"""A short fault run: the same code as `make chaos`, with a fixed schedule."""

import pytest
from rich.console import Console

from tests.campaign import run
from tests.chaos.director import Director


@pytest.mark.timeout(300)
def test_nothing_is_wrong_late_or_lost_under_faults():
    score = run(Director, count=15, seed=11, seconds=40, console=Console(quiet=True))
    assert not score.violations()
    assert score.faults["kill server"] > 0
    assert score.counts["objects_loaded"] > 100  # far more, but machines are busy
    assert score.counts["brought_chunks"] > 0
    assert score.restarts
