"""Real vLLM over the disk tier: server and engine are both restarted and memory is wiped, and the tokens that
come from disk are those of computing.
"""

import shutil
from pathlib import Path

import pytest

from kvcellar.client import AdminClient
from tests.server.conftest import ServerProcess
from tests.server.engine import eventually
from tests.vllm.harness import VllmEngine, prompts_around_borders
from tests.vllm.models import KINDS

pytestmark = pytest.mark.timeout(600)

CHUNK = 128


def tier_chunks(server: ServerProcess) -> int:
    return sum(session.counts.get("tier_chunks", 0) for session in server.status().sessions)


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
    assert all(session.leases == 0 for session in status.sessions)
