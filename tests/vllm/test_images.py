"""Engines that make something else of images and videos do not share KV: by vLLM's own settings."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import ROOT, model, vllm_python

pytestmark = pytest.mark.timeout(300)

# They decide what an engine keeps and needs, and not what its KV is.
SAME = {
    "interleave_mm_strings",
    "mm_encoder_fp8_scale_save_margin",
    "mm_encoder_fp8_scale_save_path",
    "mm_hasher_algorithm",
    "mm_ipc_gpu_memory_gb",
    "mm_processor_cache_gb",
    "mm_processor_cache_type",
    "mm_shm_cache_max_object_size_mb",
    "mm_tensor_ipc",
    "skip_mm_profiling",
}


def ask(folder: Path) -> dict[str, Any]:
    """What images.py finds in a process with a seed of its own for Python's hashes."""
    python = vllm_python()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    with (folder / "log").open("ab") as log:
        done = subprocess.run(
            [python, "-m", "tests.vllm.images", model("gqa", python), folder],
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            env=environment,
            timeout=240,
            check=True,
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return ask(folder)


def test_every_setting_separates_engines_but_those_that_decide_nothing(found: dict[str, Any]) -> None:
    assert set(found["same"]) == SAME & set(found["fields"])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("evs", "vidcom2"),
        ("plain", "fp8"),
        ("plain", "newer"),
        ("plain", "limits"),
        ("plain", "text"),
        ("fp8", "scales"),
        ("scales", "other scales"),
    ],
)
def test_engines_that_make_something_else_of_images_do_not_share(
    one: str, other: str, found: dict[str, Any]
) -> None:
    ids = found["named"][one], found["named"][other]
    assert all(bytes.fromhex(name) for name in ids)
    assert ids[0] != ids[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [("limits", "limits turned"), ("scales", "scales elsewhere"), ("scales", "scales gone since")],
)
def test_engines_that_make_the_same_of_images_share(one: str, other: str, found: dict[str, Any]) -> None:
    assert found["named"][one] == found["named"][other]


def test_names_are_the_same_in_every_process(found: dict[str, Any], folder: Path) -> None:
    assert ask(folder)["named"] == found["named"]


def test_a_setting_that_nobody_can_name_is_refused(found: dict[str, Any]) -> None:
    assert re.fullmatch("<object object at 0x.*> among the settings has no name .*", found["odd"])


def test_scales_that_cannot_be_read_are_refused(found: dict[str, Any], folder: Path) -> None:
    assert found["named"]["gone"] == f"{folder}/nowhere cannot be read: No such file or directory"


def test_an_engine_says_that_our_role_opens_it_to_embeddings(found: dict[str, Any]) -> None:
    """If it is so because of us alone."""
    said = found["embeddings"]
    assert (said["text"], said["sent embeddings"]) == ([], [])
    [warning] = said["images"]
    assert warning.startswith("KVCellar: with a KV connector, this vLLM takes embeddings in place of images")
