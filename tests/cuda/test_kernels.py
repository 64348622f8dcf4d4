"""The GPU kernels without a GPU: under Triton's interpreter, in vLLM's environment, which has Triton."""

import os
import subprocess

from tests.vllm.harness import ROOT, vllm_python


def test_kernels_move_and_sum_what_a_plain_copy_would():
    done = subprocess.run(
        [vllm_python(), ROOT / "tests" / "cuda" / "interpret.py", "0", "40"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "40 geometries of 7 kinds\n"
