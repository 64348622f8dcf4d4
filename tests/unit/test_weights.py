"""What the weights in a folder are, by samples of their bytes."""

import json
import os
import random
import shutil
from collections.abc import Mapping
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


def write_tensors(file: Path, tensors: Mapping[str, bytes], *, ordered: bool = True) -> None:
    """As safetensors does; or with names in another order than that of the bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [end, end := end + len(data)]}
    names = list(header) if ordered else random.Random(0).sample(list(header), len(header))
    text = json.dumps({name: header[name] for name in names}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


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


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
)
def test_what_is_made_of_images_is_part_of_the_model(name: str, folder: Path) -> None:
    seen = {digest(folder)}
    for text in ("{}", '{"max_pixels": 1}', '{"max_pixels": 2}'):
        (folder / name).write_text(text)
        seen.add(digest(folder))
    assert len(seen) == 4


def test_how_text_becomes_tokens_and_tokens_answers_is_not(folder: Path) -> None:
    """Tokens are hashed themselves."""
    before = digest(folder)
    for name in (
        "added_tokens.json",
        "chat_template.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    ):
        (folder / name).write_text("{}")
    (folder / "cache.json").mkdir()
    assert digest(folder) == before


@pytest.mark.parametrize("ordered", [True, False])
def test_every_byte_of_a_small_tensor_counts(ordered: bool, folder: Path) -> None:
    """Scales that were calibrated anew, say, among matrices that stay."""
    tensors = {"matrix": bytes(4 << 20), "scale": b"one", "norm": bytes(16 << 10), "more": bytes(4 << 20)}
    file, seen = folder / "model-1.safetensors", set()
    for changed in (
        {},
        {"scale": b"two"},
        {"norm": bytes((16 << 10) - 1) + b"x"},
        {"norm": bytes(10_000) + b"x" + bytes((16 << 10) - 10_001)},
    ):
        write_tensors(file, tensors | changed, ordered=ordered)
        seen.add(digest(folder))
    assert len(seen) == 4


def test_of_small_tensors_in_a_row_each_counts(folder: Path) -> None:
    tensors = {f"layer {number}": bytes(1000) for number in range(4000)}
    file, seen = folder / "model-1.safetensors", set()
    for changed in range(0, 4000, 371):
        write_tensors(file, tensors | {f"layer {changed}": bytes(999) + b"x"})
        seen.add(digest(folder))
    assert len(seen) == 11


def test_the_same_bytes_under_other_names_are_other_weights(folder: Path) -> None:
    """Far behind what is sampled of the header."""
    tensors = {f"layer {number}": bytes(1000) for number in range(4000)}
    file, seen = folder / "model-1.safetensors", set()
    for one, other in (("a", "b"), ("b", "a")):
        write_tensors(file, tensors | {one: b"one", other: b"two"})
        seen.add(digest(folder))
    assert len(seen) == 2


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b"{" + b"x" * 50,
        b'{"a": 1, "b": {"data_offsets": 1}, "c": {"data_offsets": [0, "1"]}}',
        b'{"a": {"data_offsets": [-999, 1]}, "b": {"data_offsets": [2, 1]}}',
        b'{"a": {"data_offsets": [1e9, 2e9]}}',
        b'{"a": {"data_offsets": [%d, %d]}, "b": {"data_offsets": [0, %d]}}'
        % (1 << 64, (1 << 64) + 1, 1 << 64),
        b'{"a": {"data_offsets": [0, 99]}, "b": {"data_offsets": [1, 100]}, "c": {"data_offsets": [0, 5]}}',
    ],
)
def test_a_header_that_is_wrong_leaves_the_samples(header: bytes, folder: Path) -> None:
    file = folder / "model-1.safetensors"
    for length in (len(header), len(header) + 1, 5, 1 << 40, (1 << 64) - 1):
        file.write_bytes(length.to_bytes(8, "little") + header + bytes(3_000_000))
        before = digest(folder)
        file.write_bytes(length.to_bytes(8, "little") + header + b"x" * 3_000_000)
        assert digest(folder) != before != ""
    file.write_bytes(b"short")
    assert digest(folder)


def test_as_many_small_tensors_as_experts_have_are_few_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tensors(
        folder / "model-1.safetensors", {f"scale {n}": b"four" for n in range(50_000)}, ordered=False
    )
    read, pread = [], os.pread

    def counted(*what: int) -> bytes:
        read.append(what)
        return pread(*what)

    monkeypatch.setattr(os, "pread", counted)
    digest(folder)
    assert len(read) < 200


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
