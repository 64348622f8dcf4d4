"""The GPU's mover without a GPU, kernel and all, against the host's: random geometries, byte by byte.

What is compared is in bench/gpu/check.py, as on a real GPU; see emulate.py for what is not real here.
"""

import json
import os
import subprocess
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vllm.harness import ROOT, vllm_python

pytestmark = pytest.mark.timeout(400)

KINDS = ["nhd", "hnd", "split", "interleaved", "mla", "cross-layer", "small-kernel-blocks", "padded"]

# Sizes that no engine has, for whatever is not a whole word, and those that engines have.
groups = st.tuples(
    st.sampled_from(KINDS),
    st.integers(1, 3),  # layers
    st.sampled_from([1, 2, 4, 16]),  # tokens of a block
    st.integers(1, 2),  # heads
    st.sampled_from([1, 3, 5, 8, 64]),  # elements of a head
    st.sampled_from(["bfloat16", "float16", "float8", "uint8"]),
    st.sampled_from([0, 0, 0, 1, 5]),  # elements before the first
)
cases = st.tuples(
    st.lists(groups, min_size=1, max_size=2),
    st.integers(130, 140),  # blocks: as many as the largest case stores and loads, and more
    st.integers(1, 2),  # blocks of a chunk
    st.integers(1, 2),  # chunks
    st.sampled_from([0, 1 << 16]),  # staging: one layer at a time, or many objects
    st.integers(0, 1 << 32),
)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[subprocess.Popen[str]]:
    command = [vllm_python(), ROOT / "tests" / "cuda" / "interpret.py"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        yield child
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(30) == 0


def compare(child: subprocess.Popen[str], case: object) -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps(case) + "\n")
    child.stdin.flush()
    answer: str = json.loads(child.stdout.readline())
    return answer


def test_a_kernel_is_launched_without_triton_only_if_it_takes_what_it_is_given():
    command = [vllm_python(), ROOT / "tests" / "cuda" / "compile.py"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert told.returncode == 0, told.stderr
    taken = json.loads(told.stdout.splitlines()[-1])
    refused = {"one more before", "one less", "another type", "not a kernel"}
    assert {name for name, takes in taken.items() if not takes} == refused
    assert len(taken) == len(refused) + 4


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases)
def test_the_gpu_mover_does_what_the_host_mover_does(interpreter, case):
    assert compare(interpreter, case) == "same"


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_with_every_size_of_block(interpreter, kind, block):
    group = (kind, 1, block, 1, 8, "bfloat16", 0)
    assert compare(interpreter, ([group], 8, 1, 2, 0, 1)) == "same"
