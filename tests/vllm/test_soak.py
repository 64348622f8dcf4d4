"""A short soak; `make soak` is the long one."""

from pathlib import Path

import pytest

from tests.server.conftest import ServerProcess
from tests.vllm.soak import soak

pytestmark = pytest.mark.timeout(600)


def test_two_engines_give_the_tokens_of_computing_while_the_server_is_killed(
    stopped_server: ServerProcess, tmp_path: Path
) -> None:
    stopped_server.start(memory="256MiB")
    outcome = soak(stopped_server, tmp_path, requests=48, kills=2, seed=3)
    assert outcome.good, outcome
    assert outcome.preempted > 0
