"""Engines of one model share KV if, and only if, it is the same; or have no cache, if it may become wrong."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import server_in
from tests.vllm.harness import make_job, prompts_around_borders, start_engines, vllm_python

pytestmark = pytest.mark.timeout(600)

PROMPT = prompts_around_borders(128, 128, seed=41)[3]

# Phi 3's rope: which of the factors it takes depends on how long a prompt may be.
LONG_ROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 1024,
        "short_factor": [1.0] * 32,
        "long_factor": [1.0 + number / 4 for number in range(32)],
    },
    "original_max_position_embeddings": 1024,
}

JOBS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # kind, options of vLLM, words for the job
    "plain": ("gqa", {}, {}),
    "again": ("gqa", {"max_num_seqs": 4}, {}),
    "drawn": ("gqa", {"load_format": "dummy"}, {}),
    "other code": (
        "gqa",
        {"model_class_overrides": {"LlamaForCausalLM": "tests.vllm.otherwise:Otherwise"}},
        {},
    ),
    "a file that is not ours": ("gqa", {}, {"unprivileged": True}),
    "the same with a revision": ("gqa", {"revision": "one"}, {"unprivileged": True}),
    "short rope": ("gqa", {"hf_overrides": LONG_ROPE, "max_model_len": 1024}, {}),
    "long rope": ("gqa", {"hf_overrides": LONG_ROPE, "max_model_len": 2048}, {}),
    "mla": ("mla", {}, {}),
    "mla, code of transformers": ("mla", {"model_impl": "transformers"}, {}),
    "window": ("sliding", {}, {}),
    "window, old vLLM": ("sliding", {}, {"old": True}),
    "no window, old vLLM": ("gqa", {}, {"old": True}),
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def engines(played: tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]) -> dict[str, dict[str, Any]]:
    """What became of each."""
    return played[0]


@pytest.fixture(scope="module")
def namespaces(
    played: tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]],
) -> dict[str, dict[str, str]]:
    """What the server knows, by id."""
    return played[1]


@pytest.fixture(scope="module")
def played(logs: Path) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    """What became of each engine, and the server's namespaces by id."""
    python = vllm_python()
    with server_in(logs) as server:
        server.start(memory="256MiB")
        connector = {"socket": str(server.socket), "lookup_timeout_ms": 5000}
        jobs = [
            make_job(kind, python, connector=connector, **options)
            | words
            | {"log": str(logs / name), "prompt": PROMPT}
            for name, (kind, options, words) in JOBS.items()
        ]
        hidden = Path(shutil.copytree(jobs[0]["model"], logs / "hidden"))
        (hidden / "more.bin").touch(0)
        for job in jobs:
            if job.get("unprivileged"):
                job["model"] = str(hidden)
        engines = dict(zip(JOBS, start_engines(jobs, logs / "program"), strict=True))
        return engines, {namespace.id: namespace.identity for namespace in server.status().namespaces}


def test_engines_that_differ_in_nothing_that_matters_share(engines: dict[str, dict[str, Any]]) -> None:
    assert engines["plain"] == engines["again"]
    assert engines["plain"]["namespace"]


@pytest.mark.parametrize(
    ("one", "other"), [("plain", "drawn"), ("plain", "other code"), ("short rope", "long rope")]
)
def test_engines_that_compute_something_else_do_not(
    one: str, other: str, engines: dict[str, dict[str, Any]]
) -> None:
    assert engines[one]["tokens"] != engines[other]["tokens"], "then it would not matter"
    assert len({engines[one]["namespace"], engines[other]["namespace"], ""}) == 3


def test_engines_whose_bytes_are_in_another_order_do_not(engines: dict[str, dict[str, Any]]) -> None:
    """Their layers have the same names and sizes."""
    assert len({engines[name]["namespace"] for name in ("mla", "mla, code of transformers")} | {""}) == 3


def test_a_namespace_says_by_which_code_kv_was_written(
    engines: dict[str, dict[str, Any]], namespaces: dict[str, dict[str, str]]
) -> None:
    """Of layers of the same names and sizes it may put K where others put V."""
    for name, backend in (("plain", "CPU_ATTN"), ("mla", "CPU_MLA")):
        assert f" by {backend} " in namespaces[engines[name]["namespace"]]["kv_layout"]


def test_what_a_rank_finds_early_is_what_its_scheduler_finds_later(
    engines: dict[str, dict[str, Any]], namespaces: dict[str, dict[str, str]]
) -> None:
    """Else it would have mapped memory, and taken it from others, for a namespace without an engine."""
    assert set(namespaces) == {engine["namespace"] for engine in engines.values()} - {""}


def test_vllm_that_would_compute_a_failed_load_in_a_wrong_way_has_no_cache_for_it(
    engines: dict[str, dict[str, Any]], logs: Path
) -> None:
    """It goes on from the first bad block, and with a window those before it were never loaded."""
    assert engines["window, old vLLM"] == engines["window"] | {"namespace": ""}
    assert engines["no window, old vLLM"] == engines["plain"]
    assert "this vLLM cannot compute a failed load of layers with a window" in said(logs / "window, old vLLM")


def test_an_engine_whose_weights_cannot_be_read_has_no_cache_unless_told_what_they_are(
    engines: dict[str, dict[str, Any]], logs: Path
) -> None:
    name = "a file that is not ours"
    assert engines[name] == engines["plain"] | {"namespace": ""}
    assert "/hidden cannot be read: Permission denied; if they come from elsewhere" in said(logs / name)
    assert engines["the same with a revision"]["namespace"] not in ("", engines["plain"]["namespace"])


def said(log: Path) -> str:
    """The one line that is about the cache."""
    [line] = [line for line in log.read_text().splitlines() if "KVCellar: " in line]
    before, _, reason = line.partition("no cache for this engine: ")
    assert before != line
    return reason
