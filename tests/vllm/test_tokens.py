"""Real vLLM, real server: whatever comes from the cache gives the tokens that computing gives.

Each case runs two engines. The first computes every prompt alone (a salt of its own keeps it from finding
anything), then stores, then reloads what it stored. The server is killed and restarted. The second engine,
with vLLM's own prefix cache on, loads what the first one computed, and then has part of it itself.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.server.conftest import ServerProcess
from tests.server.engine import eventually
from tests.vllm.harness import VllmEngine, prompts_around_borders
from tests.vllm.models import KINDS

pytestmark = pytest.mark.timeout(600)

CHUNK = 128


# Drafts found in the prompt, with no KV of their own.
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

# vLLM's CPU backend has pipelines only where it warms the model up, and it does that only for compiled ones.
PIPELINE = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}

AHEAD = {"ahead": True}


class Case(NamedTuple):
    kind: str
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    groups: int = 1
    prefix_caching: bool = True  # vLLM has none for MLA on a CPU

    @property
    def ranks(self) -> int:
        sizes = [self.options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline")]
        return int(sizes[0] * sizes[1])

    @property
    def shards(self) -> int:
        return 1 if self.kind == "mla" else self.ranks


CASES = {
    "gqa": Case("gqa"),
    "mla": Case("mla", prefix_caching=False),
    "hybrid": Case("hybrid", groups=2),
    "hybrid, one group": Case("hybrid", {"disable_hybrid_kv_cache_manager": True}),
    "sliding": Case("sliding"),
    "moe": Case("moe"),
    "gqa, drafts": Case("gqa", {"speculative_config": NGRAM}),
    "gqa, ahead": Case("gqa", AHEAD),
    "hybrid, ahead": Case("hybrid", AHEAD, groups=2),
    "gqa, tp 2": Case("gqa", {"tensor_parallel_size": 2, "apart": True}),
    "mqa, tp 2": Case("mqa", {"tensor_parallel_size": 2}),
    "mla, tp 2": Case("mla", {"tensor_parallel_size": 2}, prefix_caching=False),
    "hybrid, pp 2": Case("hybrid", PIPELINE, groups=2),
}


@pytest.fixture
def serve(stopped_server: ServerProcess) -> ServerProcess:
    return stopped_server.start(memory="512MiB")


def hit_chunks(server: ServerProcess) -> int:
    return sum(session.counts.get("hit_chunks", 0) for session in server.status().sessions)


def is_attached(server: ServerProcess, ranks: int) -> bool:
    """Both engines have found the server again, and every process has said what it works with."""
    sessions = server.status().sessions
    connected = [session.connected for session in sessions]
    said = all(session.counts.get("messages", 0) >= 1 + ranks for session in sessions)
    return connected == [[-1, *range(ranks)]] * 2 and said


def chunks_of(salt: str, prompt: list[int], tokens: tuple[int, ...]) -> set[tuple[str, tuple[int, ...]]]:
    """What there is to store of a request. Nothing is computed for its last token."""
    text = (*prompt, *tokens[:-1])
    return {(salt, text[:end]) for end in range(CHUNK, len(text) + 1, CHUNK)}


def is_whole(cached: list[int], prompts: list[list[int]], block: int) -> bool:
    """All chunks were there, and vLLM may have had more. Of a prompt of whole chunks the last block is not
    loaded if vLLM has the others.
    """
    least = [min(len(prompt) // CHUNK * CHUNK, len(prompt) - block) for prompt in prompts]
    return all(tokens >= some for tokens, some in zip(cached, least, strict=True))


def check_books(case: Case, server: ServerProcess, chunks: int, used: int) -> None:
    """The server's own books: a stripe for each chunk, of one object a shard; a share in each hit for every
    rank, and in each store for one rank a shard.
    """
    [report] = server.status().namespaces
    assert len(report.groups) == case.groups
    assert report.shards == case.shards
    assert all(len(group.slot_bytes) == case.shards for group in report.groups)
    if case.groups == 1:  # of a window's chunks only some are stored
        eventually(lambda: server.status().namespaces[0].groups[0].stripes == chunks)
    [counts] = [session.counts for session in server.status().sessions if session.counts.get("hit_chunks")]
    assert counts["hits"] >= used > 0
    assert counts["read_shares"] == counts["hits"] * case.ranks
    assert counts["write_shares"] == counts["stores"] * case.shards
    if case.groups == 1:
        eventually(lambda: not server.leases())
        assert counts["committed"] == counts["reserved"] == chunks


@pytest.mark.parametrize("name", CASES)
def test_tokens_from_the_cache_are_those_of_computing(
    name: str, serve: ServerProcess, tmp_path: Path
) -> None:
    case = CASES[name]
    prompts = prompts_around_borders(KINDS[case.kind].block, CHUNK, seed=7)
    connector = {"socket": str(serve.socket), "lookup_timeout_ms": 5000}
    later = case.options | {"enable_prefix_caching": case.prefix_caching}
    with (
        VllmEngine(case.kind, tmp_path / "first", connector=connector, **case.options) as first,
        VllmEngine(case.kind, tmp_path / "second", connector=connector, **later) as second,
    ):
        cold = [first.round([prompt], salt=f"alone {number}") for number, prompt in enumerate(prompts)]
        truth = [answer.tokens[0] for answer in cold]
        assert [answer.cached[0] for answer in cold] == [0] * len(prompts)

        warm, reloaded = first.round(prompts), first.round(prompts)
        assert warm.tokens == reloaded.tokens == truth
        block = first.ready()["block"]
        assert is_whole(reloaded.cached, prompts, block)
        assert not reloaded.counters.get("vllm:kvcellar_loads_failed")
        assert reloaded.cached[-1] == len(prompts[-1]) - 1
        stored = {
            chunk
            for number, (prompt, tokens) in enumerate(zip(prompts, truth, strict=True))
            for salt in ("", f"alone {number}")
            for chunk in chunks_of(salt, prompt, tokens)
        }
        check_books(case, serve, len(stored), used=sum(map(bool, warm.cached + reloaded.cached)))

        long = first.round([prompts[-1]], max_tokens=CHUNK + 8)
        grown = prompts[-1] + list(long.tokens[0])
        if case.options.get("speculative_config"):
            drafts = long.counters["vllm:spec_decode_num_draft_tokens"]
            assert drafts > long.counters["vllm:spec_decode_num_accepted_tokens"] > 0
        # To be known to the server, and so that blocks hold something else by the time they are loaded into.
        second.round([prompt[::-1] for prompt in prompts], salt="before")
        serve.restart()
        eventually(lambda: is_attached(serve, case.ranks))
        loaded = second.round(prompts)
        assert loaded.tokens == truth
        assert not loaded.counters.get("vllm:kvcellar_loads_failed")
        assert is_whole(loaded.cached, prompts, block)
        assert loaded.external[0] > 0
        assert bool(loaded.fetched) == (case.ranks == 1)
        assert hit_chunks(serve) > 0
        continued = second.round([grown])
        assert continued.tokens == first.round([grown], salt="grown").tokens
        assert continued.cached == [len(grown) // CHUNK * CHUNK], "a chunk that was decoded is not here"
        again = second.round([prompt + prompt[: CHUNK // 2] for prompt in prompts])
        assert again.tokens == [
            first.round([p + p[: CHUNK // 2]], salt=f"longer {n}").tokens[0] for n, p in enumerate(prompts)
        ]
    assert serve.status().counts.get("corrupt", 0) == 0
    # The server hears of the end of a process a little later.
    eventually(lambda: not any(one.leases or one.held_bytes for one in serve.status().sessions))


def flip_a_bit_in_every_slot(folder: Path) -> int:
    flipped = 0
    for path in folder.rglob("*.slab"):
        with path.open("r+b") as slab:
            size = path.stat().st_size
            for at in range(4096 + 64, size, 4096):
                slab.seek(at)
                byte = slab.read(1)
                slab.seek(at)
                slab.write(bytes([byte[0] ^ 1]))
                flipped += 1
    return flipped


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])
@pytest.mark.parametrize("kind", ["gqa", "hybrid"])
def test_corrupted_slots_are_caught_and_computed_again(
    kind: str, ahead: bool, serve: ServerProcess, tmp_path: Path
) -> None:
    prompts = prompts_around_borders(KINDS[kind].block, CHUNK, seed=8)[-4:]
    connector = {"socket": str(serve.socket), "lookup_timeout_ms": 5000}
    with VllmEngine(kind, tmp_path / "engine", connector=connector, ahead=ahead) as engine:
        truth = [engine.round([p], salt=f"alone {n}").tokens[0] for n, p in enumerate(prompts)]
        assert engine.round(prompts).tokens == truth
        assert flip_a_bit_in_every_slot(serve.folder) > 0
        again = engine.round(prompts)
        assert again.tokens == truth
        assert again.counters["vllm:kvcellar_loads_failed"] > 0
        assert serve.status().counts["corrupt"] > 0
        healed = _until_cached(engine, prompts)  # what was computed again was stored again
        assert all(tokens == truth for tokens in healed)


def test_an_engine_computes_while_there_is_no_server_and_comes_back(
    stopped_server: ServerProcess, tmp_path: Path
) -> None:
    prompts = prompts_around_borders(128, CHUNK, seed=9)[-4:]
    connector = {"socket": str(stopped_server.socket), "lookup_timeout_ms": 5000}
    with VllmEngine("gqa", tmp_path / "engine", connector=connector) as engine:
        without = engine.round(prompts)
        assert sum(without.cached) == 0
        stopped_server.start(memory="512MiB")
        connected_tokens = _until_cached(engine, prompts)
        assert all(tokens == without.tokens for tokens in connected_tokens)
        stopped_server.kill()
        assert engine.round(prompts).tokens == without.tokens
    stopped_server.start()


def _until_cached(engine: VllmEngine, prompts: list[list[int]]) -> Iterator[list[tuple[int, ...]]]:
    """Rounds until one hits: how long reconnecting and storing take is not this test's business."""
    for _ in range(20):
        answer = engine.round(prompts)
        yield answer.tokens
        if sum(answer.cached):
            return
    pytest.fail("the engine never came back to the cache")
