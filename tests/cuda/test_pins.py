"""The thread that page-locks slabs, on a machine without a GPU: what it does first, and when it ends."""

import json
import os
import subprocess
from typing import Any

from tests.vllm.harness import ROOT, vllm_python


def run(case: str) -> Any:
    command = [str(vllm_python()), str(ROOT / "tests" / "cuda" / "pin.py"), case]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout.splitlines()[-1])


def test_the_thread_ends_with_its_engine():
    assert run("close_with_nothing_mapped") is False


def test_before_it_ends_it_unlocks_what_its_engine_unmaps_late():
    called = [["lock", 0], ["lock", 1], ["unlock", 0], ["unlock", 1]]
    assert run("close_before_the_last_is_unmapped") == [False, called]


def test_a_refusal_counts_as_long_as_that_memory_is_mapped():
    assert run("refuse_once") == [False, True]


def test_what_the_server_takes_back_does_not_wait_until_all_else_is_locked():
    assert run("unmap_behind_one_that_is_being_locked") == [False, False]
