"""vLLM that is short of blocks is told whether waiting for stores brings any; if not, it preempts."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.vllm.harness import ROOT, model, vllm_python

pytestmark = pytest.mark.timeout(300)


def test_blocks_come_free_if_nobody_else_has_them(tmp_path: Path) -> None:
    python = vllm_python()
    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run(
            [python, "-m", "tests.vllm.frees", model("gqa", python), tmp_path / "socket"],
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            timeout=240,
            check=True,
        )
    assert json.loads(done.stdout) == {  # would any come free, and are any held
        "nothing is stored": [False, False],
        "its request goes on": [False, True],
        "two requests go on": [False, True],
        "one of two goes on": [False, True],
        "no request goes on": [True, True],
        "all is let go": [False, False],
    }
