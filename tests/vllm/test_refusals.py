"""Engines whose KV could not be restored exactly have no cache: every refusal, by vLLM's own classes."""

import json
import subprocess

import pytest

from tests.alone import load
from tests.vllm.harness import ROOT, model, vllm_python
from tests.vllm.refusals import OTHERWISE

settings = load("settings")

pytestmark = pytest.mark.timeout(300)

EXACT = {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"}

NO_COMMIT = (
    "nobody knows of which commit the weights of some/model are, say which they are with --revision, and "
    "another one whenever they change"
)
NO_RUN = (
    "nobody knows which weights will take the place of dummy ones, say which they are with --revision, "
    "another one for each run, and reset with reset_connector=True after each update"
)
REFUSED = {
    "sees later tokens": "layer layer 0 lets tokens see later ones, on which its KV then depends",
    "decode_context_parallel_size": "decode context parallelism is not supported yet",
    "prefill_context_parallel_size": "prefill context parallelism is not supported yet",
    "distributed_executor_backend": "external_launcher has a scheduler for each rank",
    "calculate_kv_scales": "calculate_kv_scales makes KV that depends on what the engine saw before",
    "ec_consumer": "ec_transfer_config has images encoded elsewhere, by settings that are not known here",
    "enable_return_routed_experts": "enable_return_routed_experts is about tokens that are computed here",
    "padded pages": "layer layer 0: blocks of 2048 bytes in larger pages",
    "two tensors": "layer layer 0: its state is not one tensor",
    "a commit, untold, tensorizer": NO_COMMIT,
    "another commit, untold, auto": NO_COMMIT,
    "drawn, then sent": NO_RUN,
    "drawn, then set": NO_RUN,
    "drawn, then sent, by name": NO_RUN,
    "no value": "an environment variable of vLLM cannot be read: Expecting property name enclosed in double "
    "quotes: line 1 column 2 (char 1)",
    "two hosts": "it runs on several hosts, and a server has the KV of one",
    "bert": "vLLM does not support prefix caching for this model, or its way of pooling",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    python = vllm_python()
    folder = tmp_path_factory.mktemp("bert")
    with (tmp_path_factory.mktemp("logs") / "log").open("wb") as log:
        done = subprocess.run(
            [python, "-m", "tests.vllm.refusals", model("gqa", python), folder],
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            timeout=240,
            check=True,
        )
    answers: dict[str, str] = json.loads(done.stdout)
    return answers


def test_a_plain_engine_is_supported(said: dict[str, str]) -> None:
    assert said["supported"] == said["whole pages"] == said["ec_producer"] == said["one host"] == ""


def test_weights_that_are_known_may_be_replaced_later(said: dict[str, str]) -> None:
    """By a reset, which is somebody's to call; and drawn ones are known as long as they stay."""
    assert said["drawn"] == said["drawn, then sent, of a run"] == said["read, then sent"] == ""


def test_a_worker_side_knows_whether_vllm_schedules_ahead(said: dict[str, str]) -> None:
    """If it did not, the step that hands over a load would wait for it in vain, on GPUs alone."""
    assert said["one step at a time"] == "ready, waits"
    assert said["steps ahead"] == "ready, waits, ahead"


def test_a_step_without_a_forward_does_not_wait_where_other_engines_do(said: dict[str, str]) -> None:
    """Engines of one MoE model take their steps together: one that waits holds up the others."""
    assert said["engines in step"] == "ready, does not wait"


def test_an_engine_that_sleeps_has_no_mover_before_its_first_step(said: dict[str, str]) -> None:
    """What is allocated while vLLM hands over its KV memory goes with that when the engine sleeps."""
    assert said["an engine that sleeps"] == said["memory that may go"] == "not ready, waits"


def test_layers_that_are_not_known_to_be_exact_are_refused(said: dict[str, str]) -> None:
    kinds = {name for name in said if name.endswith(("Spec", "Specs"))}
    assert kinds > EXACT
    assert {name for name in kinds if not said[name]} == EXACT
    for name in kinds - EXACT - {"UniformTypeKVCacheSpecs"}:
        assert said[name] == f"layer layer 1 has a {name}, whose state cannot be restored yet"


def test_of_many_layers_in_one_group_each_is_looked_at(said: dict[str, str]) -> None:
    assert said["UniformTypeKVCacheSpecs"] == "layer b has a MambaSpec, whose state cannot be restored yet"


@pytest.mark.parametrize("case", REFUSED)
def test_engines_that_cannot_be_exact_are_refused(case: str, said: dict[str, str]) -> None:
    assert said[case] == REFUSED[case]


def test_engines_that_got_other_commits_under_one_name_do_not_share(said: dict[str, str]) -> None:
    ids = [said[case] for case in ("a commit", "another commit", "a revision")]
    assert all(bytes.fromhex(name) for name in ids)
    assert len(set(ids)) == 3
    assert bytes.fromhex(said["a commit, untold, auto"])
    assert ids[:2] == [said["a commit, in a rank"], said["another commit, in a rank"]]


def test_engines_whose_backends_may_put_k_where_others_put_v_do_not_share(said: dict[str, str]) -> None:
    ids = [said[case] for case in ("K beside V", "V beside K", "no name")]
    assert all(bytes.fromhex(name) for name in ids)
    assert len(set(ids)) == 3
    assert said["K beside V again"] == said["K beside V"]
    assert said["no layer"] == said["no name"]
    assert ids == [said[f"{case}, early"] for case in ("K beside V", "V beside K", "no name")]


def test_a_model_that_a_plugin_computes_is_another(said: dict[str, str]) -> None:
    """Whether the class is there already or has only a name; and with other code, another one again."""
    cases = ("vllm's class", "a plugin's class", "another class of it", "a newer plugin's class")
    ids = [said[case] for case in (*cases, "a plugin's class that is nowhere", "a class that is there")]
    assert all(bytes.fromhex(name) for name in ids)
    assert len(set(ids)) == len(ids)
    assert said["a plugin's class again"] == said["a plugin's class"]
    assert said["a class that is there, by name"] == said["a class that is there"]


def test_engines_that_compute_otherwise_by_their_environment_do_not_share(said: dict[str, str]) -> None:
    ids = {said[name] for name in OTHERWISE}
    assert all(bytes.fromhex(name) for name in ids)
    assert len(ids - {said["nothing set"]}) == len(OTHERWISE)
    assert said["VLLM_USE_FLASHINFER_SAMPLER"] == said["nothing set"]
    assert set(settings._ENVIRONMENT) - OTHERWISE.keys() == {"VLLM_TEST_FORCE_FP8_MARLIN"}  # of vLLM 0.26
