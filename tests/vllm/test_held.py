"""Blocks that stores hold: what vLLM hears of them when it is short of blocks, and when they are let go."""

import json
import subprocess

import pytest

from tests.server.conftest import server_in
from tests.vllm.harness import ROOT, model, vllm_python

pytestmark = pytest.mark.timeout(300)

Told = dict[str, dict[str, list[bool]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """By moment: would any block come free, and is any held?"""
    folder, python = tmp_path_factory.mktemp("held"), vllm_python()
    with server_in(folder) as server, (folder / "program").open("wb") as log:
        server.start(memory="64MiB")
        done = subprocess.run(
            [python, "-m", "tests.vllm.held", model("gqa", python), server.socket],
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            timeout=240,
            check=True,
        )
    answer: Told = json.loads(done.stdout)
    return answer


def test_vllm_waits_for_stores_only_if_they_have_blocks_that_nobody_else_has(told: Told) -> None:
    """If not, waiting is in vain, and it preempts a request."""
    assert told["short_of_blocks"] == {
        "nothing is stored": [False, False],
        "its request goes on": [False, True],
        "two requests go on": [False, True],
        "one of two goes on": [False, True],
        "no request goes on": [True, True],
        "all is let go": [False, False],
    }


def test_a_reset_lets_go_of_what_is_stored_though_the_step_that_tells_of_it_comes_later(told: Told) -> None:
    assert told["reset_beside_a_step"] == {
        "stored, and no step is handled that tells of it": [True, True],
        "reset": [False, False],
        "the step is handled": [False, False],
    }
