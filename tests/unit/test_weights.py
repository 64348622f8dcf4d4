"""What the weights in a folder are, by samples of their bytes."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.alone import load

weights = load("weights")


@pytest.fixture(autouse=True)
def forgetful() -> None:
    """An engine asks once; a test changes what is there."""
    weights.weights_digest.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for seed, name in enumerate(("model-1.safetensors", "model-2.safetensors")):
        (made / name).write_bytes(np.random.default_rng(seed).bytes(3_000_000 + seed))
    (made / "config.json").write_text("{}")
    return made


def digest(path: Path) -> str:
    weights.weights_digest.cache_clear()
    found = weights.weights_digest(str(path))
    assert isinstance(found, str)
    return found


def only_commit(cache: Path) -> str:
    weights.only_commit.cache_clear()
    found = weights.only_commit("some-owner/some-model", str(cache))
    assert isinstance(found, str)
    return found


def test_copies_are_the_same_wherever_they_are_and_whatever_is_beside_them(
    folder: Path, tmp_path: Path
) -> None:
    before = digest(folder)
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    (copy / "README.md").write_text("a copy")
    assert digest(copy) == before != ""


def test_other_weights_are_others(folder: Path) -> None:
    seen = {digest(folder)}
    file = folder / "model-2.safetensors"
    old = file.read_bytes()
    for new in (bytes(len(old)), old[:-1], old + b"x", old[: len(old) // 2] + bytes(len(old) // 2 + 1)):
        file.write_bytes(new)
        seen.add(digest(folder))
    file.rename(folder / "model-3.safetensors")
    seen.add(digest(folder))
    assert len(seen) == 6


def test_a_change_as_large_as_the_distance_of_two_samples_is_seen(folder: Path) -> None:
    before, file = digest(folder), folder / "model-1.safetensors"
    step = file.stat().st_size // 128
    old = file.read_bytes()
    for start in range(0, len(old) - step, 7 * step + 11):
        file.write_bytes(old[:start] + bytes(step) + old[start + step :])
        assert digest(folder) != before


def test_other_code_that_comes_with_them_is_another_model(folder: Path) -> None:
    seen = {digest(folder)}
    for code in ("", "a = 1", "a = 2"):
        (folder / "modeling.py").write_text(code)
        seen.add(digest(folder))
    assert len(seen) == 4


def test_one_file_is_a_model_too_and_a_name_is_none(folder: Path) -> None:
    assert digest(folder / "model-1.safetensors") not in ("", digest(folder / "model-2.safetensors"))
    assert digest(Path("some-owner/some-model")) == ""


def test_a_name_stands_for_a_commit_while_the_cache_has_no_other(tmp_path: Path) -> None:
    assert only_commit(tmp_path) == ""
    snapshots = tmp_path / "models--some-owner--some-model" / "snapshots"
    (snapshots / ("1" * 40)).mkdir(parents=True)
    assert only_commit(tmp_path) == "1" * 40
    (snapshots / ("2" * 40)).mkdir()
    assert only_commit(tmp_path) == ""


def test_a_folder_without_weights_is_not_taken_for_one(tmp_path: Path) -> None:
    """They come from elsewhere, and may be others tomorrow."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "modeling.py").write_text("")
    with pytest.raises(FileNotFoundError, match="no weights there"):
        digest(tmp_path)
