"""The engine forgets: vLLM's prefix cache alone, or with the weights that made it (a new generation).

Two engines share a server for all tests here. After new weights an engine finds nothing that was made before,
whatever was going on at that moment, and the other engine keeps what it had.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import ServerProcess, server_in
from tests.server.engine import eventually
from tests.vllm.harness import Answer, VllmEngine, prompts_around_borders

pytestmark = pytest.mark.timeout(600)

CHUNK = 128
NEW_WEIGHTS = {"reset_connector": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reset")


@pytest.fixture(scope="module")
def serve(folder: Path) -> Iterator[ServerProcess]:
    with server_in(folder) as server:
        yield server.start(memory="512MiB")


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "ahead"])
def engines(
    serve: ServerProcess, folder: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[VllmEngine, VllmEngine]]:
    connector = {"socket": str(serve.socket), "lookup_timeout_ms": 5000}
    # Prompts take several steps: there is a moment to reset in.
    options: dict[str, Any] = {"max_num_batched_tokens": CHUNK, "enable_prefix_caching": True}
    options["ahead"] = request.param
    with (
        VllmEngine("gqa", folder / "one", connector=connector, **options) as one,
        VllmEngine("gqa", folder / "other", connector=connector, **options) as other,
    ):
        one.ready()
        other.ready()
        yield one, other


def rest(serve: ServerProcess, answer: Answer) -> None:
    """The engine came to rest, and holds nothing."""
    assert answer.settled
    eventually(lambda: not serve.leases())
    assert all(session.held_bytes == 0 for session in serve.status().sessions)


def test_forgetting_locally_keeps_the_cache(
    serve: ServerProcess, engines: tuple[VllmEngine, VllmEngine]
) -> None:
    one, _ = engines
    prompts = prompts_around_borders(128, CHUNK, seed=20)[-4:]
    truth = one.round(prompts).tokens
    assert one.call("reset_prefix_cache") is True
    again = one.round(prompts)
    assert again.tokens == truth
    assert again.external[0] > 0
    rest(serve, again)


def test_new_weights_find_nothing_old_and_others_keep_theirs(
    serve: ServerProcess, engines: tuple[VllmEngine, VllmEngine]
) -> None:
    one, other = engines
    prompts = prompts_around_borders(128, CHUNK, seed=21)[-4:]
    truth = one.round(prompts).tokens
    before = other.round(prompts)
    assert before.tokens == truth
    assert before.external[0] > 0, "the engines do not share: the rest would show nothing"

    assert one.call("reset_prefix_cache", **NEW_WEIGHTS) is True
    fresh = one.round([prompts[-1]])
    assert fresh.tokens == truth[-1:]
    assert fresh.cached == [0]
    for _ in range(20):  # memory is taken back from the others, which may last longer than a store waits
        assert one.call("reset_prefix_cache") is True
        own = one.round([prompts[-1]])
        assert own.tokens == truth[-1:]
        if own.external[0]:
            break
    assert own.external[0] > 0, "what the new weights made is not found"
    assert other.call("reset_prefix_cache") is True
    kept = other.round(prompts)
    assert kept.tokens == truth
    assert kept.cached == before.cached
    rest(serve, kept)


@pytest.mark.parametrize("running", [False, True], ids=["requests go on", "requests start over"])
@pytest.mark.parametrize("what", ["computing", "loading"])
def test_new_weights_in_the_middle_of_everything(
    what: str, running: bool, serve: ServerProcess, engines: tuple[VllmEngine, VllmEngine]
) -> None:
    """At each of the first steps: stores are being planned, copied and answered, or loads are under way."""
    one, _ = engines
    prompts = [prompts_around_borders(128, CHUNK, seed=22 + n)[6] for n in range(2)]
    truth = [one.round([prompt], salt=f"alone {what} {running}").tokens[0] for prompt in prompts]
    if what == "loading":
        assert one.round(prompts).tokens == truth
    for step in range(1, 8):
        if what == "loading":
            assert one.call("reset_prefix_cache") is True
        call = {
            "step": step,
            "call": "reset_prefix_cache",
            "arguments": NEW_WEIGHTS | {"reset_running_requests": running},
        }
        answer = one.round(prompts, together=True, interrupt=call)
        assert answer.tokens == truth
        rest(serve, answer)
        [result] = answer.results
        # vLLM does not reset while blocks are in use, by requests, loads or stores; it says so.
        assert result in (True, False) or result.startswith("RuntimeError: Failed to reset KV cache")
        assert one.call("reset_prefix_cache") is True, "blocks are held for good"
        if not running:
            # Its KV was made, in part, by the weights of before. The other may have begun later.
            assert one.round(prompts, max_tokens=1).cached[0] == 0


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 6])
def test_new_weights_where_nobody_steps_the_engine_after_its_last_request(
    tokens: int, serve: ServerProcess, engines: tuple[VllmEngine, VllmEngine]
) -> None:
    """As vllm.LLM in one process: what the last requests store is planned, on its way, or copied, and no step
    tells of it.
    """
    one, _ = engines
    prompt = prompts_around_borders(128, CHUNK, seed=30 + tokens)[-1]
    truth = one.round([prompt], tokens, settle=False).tokens
    eventually(lambda: one.call("reset_prefix_cache", **NEW_WEIGHTS) is True)
    again = one.round([prompt], tokens)
    assert again.tokens == truth
    assert again.cached == [0]
    rest(serve, again)
