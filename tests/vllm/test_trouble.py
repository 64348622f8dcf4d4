"""A server that stalls, or dies, at the worst moment: requests wait for nothing that will not come.

Each test has an engine of its own: what a worker has mapped, and when, is what it is about.
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcellar.wire import messages as m
from tests.server.conftest import ServerProcess, server_in
from tests.server.engine import eventually
from tests.vllm.harness import Answer, VllmEngine, prompts_around_borders
from tests.vllm.tap import Tap

pytestmark = pytest.mark.timeout(600)

CHUNK = 128
PROMPTS = prompts_around_borders(128, CHUNK, seed=11)[-6:]
# What a load may wait for, seconds. Waits that add up, one per request, would be over it.
PATIENCE = 6.0


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_in(tmp_path_factory.mktemp("server")) as server:
        yield server.start(memory="256MiB")


@pytest.fixture(scope="module")
def truth(serve: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """The right tokens. Their engine has stored the prompts, and is gone."""
    log = tmp_path_factory.mktemp("first") / "log"
    with VllmEngine("gqa", log, connector={"socket": str(serve.socket), "lookup_timeout_ms": 5000}) as first:
        tokens = first.round(PROMPTS).tokens
    eventually(lambda: not serve.status().sessions)
    return tokens


@pytest.fixture
def tap(serve: ServerProcess, tmp_path: Path) -> Iterator[Tap]:
    with Tap(tmp_path / "tap", serve.socket) as tap:
        yield tap


def at_the_grant(number: int, act: Callable[[], None]) -> Callable[[str, m.Reply], None]:
    """Act when the server has granted so many hits, and before the engine hears of the last."""
    granted = 0

    def watch(role: str, reply: m.Reply) -> None:
        nonlocal granted
        before = granted
        granted += sum(isinstance(r, m.Granted) and r.chunks > 0 for r in reply.results)
        if role == "scheduler" and before < number <= granted:
            act()

    return watch


def until_cached(engine: VllmEngine, truth: list[tuple[int, ...]]) -> Answer:
    """Rounds until one hits: how long reconnecting takes is not this file's business."""
    for _ in range(20):
        answer = engine.round(PROMPTS, together=True)
        assert answer.tokens == truth
        if sum(answer.cached):
            return answer
    pytest.fail("the engine never came back to the cache")


@pytest.mark.parametrize("trouble", ["the server stops", "descriptors are held back"])
def test_a_load_whose_bytes_never_come_is_computed(
    trouble: str, serve: ServerProcess, truth: list[tuple[int, ...]], tap: Tap, tmp_path: Path
) -> None:
    """Between the server's answer and the copy. What a rank has mapped by then it can read without a server;
    what it has not is computed.
    """
    connector = {"socket": str(tap.path), "lookup_timeout_ms": 2000}
    if trouble == "the server stops":
        tap.before_reply = at_the_grant(len(PROMPTS), lambda: serve.signal(signal.SIGSTOP))
    else:
        tap.holds_descriptors = True
    with VllmEngine("gqa", tmp_path / "second", connector=connector, warm=False) as engine:
        stalled = engine.round(PROMPTS, together=True)
        assert stalled.tokens == truth
        if trouble == "descriptors are held back":
            assert stalled.counters["vllm:kvcellar_loads_failed"] == len(PROMPTS)
        assert stalled.counters.get("vllm:kvcellar_load_seconds", 0) < PATIENCE
        assert stalled.settled
        assert engine.round(PROMPTS, together=True).tokens == truth

        tap.holds_descriptors = False
        serve.signal(signal.SIGCONT)
        assert until_cached(engine, truth).counters["vllm:kvcellar_load_bytes"] > 0
        eventually(lambda: not serve.leases())


def test_a_server_that_is_gone_for_good_is_not_waited_for(
    serve: ServerProcess, truth: list[tuple[int, ...]], tap: Tap, tmp_path: Path
) -> None:
    connector = {"socket": str(tap.path), "lookup_timeout_ms": 2000}
    with VllmEngine("gqa", tmp_path / "second", connector=connector) as engine:
        until_cached(engine, truth)  # all is mapped
        tap.before_reply = at_the_grant(len(PROMPTS), serve.kill)
        dying = engine.round(PROMPTS, together=True)
        assert dying.tokens == truth
        # How many loads failed is not certain: the last answer may die with the server, and then that request
        # is a miss; and what a rank has begun to copy before it hears of it, it may finish.
        assert dying.counters.get("vllm:kvcellar_load_seconds", 0) < PATIENCE
        assert dying.settled
        without = engine.round(PROMPTS, together=True)
        assert without.tokens == truth
        assert sum(without.cached) == 0

        tap.before_reply = lambda role, reply: None
        serve.start()
        until_cached(engine, truth)
        eventually(lambda: not serve.leases())
