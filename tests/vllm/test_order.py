"""Copies do not wait for the forward of the step that hands them over."""

import json
import subprocess

import pytest

from tests.vllm.harness import ROOT, vllm_python

pytestmark = pytest.mark.timeout(400)


def test_copies_start_before_the_forward_once():
    told = subprocess.run(
        [vllm_python(), "-m", "tests.vllm.order"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        timeout=300,
        check=True,
    )
    once = ["copies", "forward"]
    assert json.loads(told.stdout) == {"V1": once, "V2": once}
