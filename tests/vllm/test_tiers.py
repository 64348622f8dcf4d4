"""Real vLLM over the disk tier: server and engine are both restarted and memory is wiped, and the tokens that
come from disk are those of computing. And what a request in the queue needs is brought up while it waits.
"""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from kvcellar.client import AdminClient
from kvcellar.wire import messages as m
from tests.server.conftest import ServerProcess
from tests.server.engine import eventually
from tests.vllm.harness import VllmEngine, prompts_around_borders
from tests.vllm.models import KINDS, VOCAB
from tests.vllm.tap import Tap

pytestmark = pytest.mark.timeout(600)

CHUNK = 128
TOKENS = 4 * CHUNK  # of an answer that takes longer than a disk


def tier_chunks(server: ServerProcess) -> int:
    return sum(session.counts.get("tier_chunks", 0) for session in server.status().sessions)


def expected_stripes(server: ServerProcess) -> int:
    return sum(session.counts.get("expected_stripes", 0) for session in server.status().sessions)


def forget(server: ServerProcess) -> None:
    with AdminClient(server.socket) as admin:
        admin.clear()


@pytest.mark.parametrize("kind", ["gqa", "mla", "hybrid"])
def test_tokens_from_disk_are_those_of_computing(
    kind: str, stopped_server: ServerProcess, tmp_path: Path
) -> None:
    server = stopped_server.start(memory="512MiB", disk=str(tmp_path / "disk"), disk_size="256MiB")
    prompts = [p for p in prompts_around_borders(KINDS[kind].block, CHUNK, seed=11) if len(p) > CHUNK]
    connector = {"socket": str(server.socket), "lookup_timeout_ms": 5000}
    with VllmEngine(kind, tmp_path / "first", connector=connector) as first:
        truth = [first.round([p], salt=f"alone {n}").tokens[0] for n, p in enumerate(prompts)]
        assert first.round(prompts).tokens == truth
    eventually(lambda: not server.status().tiers[0].queued)
    assert server.stop() == 0
    shutil.rmtree(server.folder)
    server.start()
    with VllmEngine(kind, tmp_path / "second", connector=connector) as second:
        for _ in range(20):  # whether waiting pays is for the connector to decide, and machines are busy
            answer = second.round(prompts)
            assert answer.tokens == truth
            if tier_chunks(server):
                break
            forget(server)
        assert tier_chunks(server) > 0, "the disk was never worth waiting for"
        assert sum(answer.cached) > 0
    status = server.status()
    assert status.tiers[0].counts.get("corrupt", 0) == 0
    assert status.counts.get("corrupt", 0) == 0
    eventually(lambda: server.leases() == 0)


def test_what_waits_in_the_queue_is_brought_up_before_the_engine_gets_to_it(
    stopped_server: ServerProcess, tmp_path: Path
) -> None:
    """One request at a time: three wait while the first, too short to be looked up, decodes for seconds. What
    the next two need is on disk; the last is aborted before its turn.
    """
    server = stopped_server.start(memory="512MiB", disk=str(tmp_path / "disk"), disk_size="256MiB")
    draw = random.Random(5)
    other, late = ([draw.randrange(VOCAB) for _ in range(8 * CHUNK + 1)] for _ in range(2))
    first, again = late[: CHUNK // 2], [*other[: 5 * CHUNK], *late[: CHUNK + 1]]
    with Tap(tmp_path / "tap", server.socket) as tap:
        connector = {"socket": str(tap.path), "lookup_timeout_ms": 5000}
        with VllmEngine("gqa", tmp_path / "engine", connector=connector, max_num_seqs=1) as engine:
            truth = engine.round([other, again], max_tokens=TOKENS)
            eventually(lambda: not server.status().tiers[0].queued)
            forget(server)
            tap.forget()
            prompts = [first, other, again, late]
            answer = engine.round(prompts, max_tokens=TOKENS, together=True, abort_at={"3": 20})
            assert answer.outputs[3].stage == "waiting"
            assert answer.tokens[1:3] == truth.tokens
            assert answer.cached[:3] == [0, 8 * CHUNK, 6 * CHUNK]
            assert expected_stripes(server) == 9, "eight, and the one that is not of the same prefix"
            assert tier_chunks(server) == 0, "nobody waited for the disk: it was all there"
            assert server.status().tiers[0].counts["hits"] == 9
            ops = Counter(type(op).__name__ for request in tap.requests("scheduler") for op in request.ops)
            assert (ops["Expect"], ops["Lookup"], ops["Abandon"]) == (3, 2, 3)
            hints = [
                request for request in tap.requests("scheduler") if isinstance(request.ops[-1], m.Expect)
            ]
            assert len(hints) == 1, "all in the message of their step"
    eventually(lambda: server.leases() == 0)
