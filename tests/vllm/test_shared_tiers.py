"""Real vLLM on two hosts (servers with other sockets and other memory) that share nothing but a tier: the
tokens that come through Valkey, a Valkey cluster, S3 and Mooncake are those of computing.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcellar.client import AdminClient
from tests.server.conftest import ServerProcess
from tests.server.engine import eventually
from tests.tiers.test_sharing import host
from tests.vllm.harness import VllmEngine, prompts_around_borders
from tests.vllm.models import KINDS
from tools import backends

pytestmark = pytest.mark.timeout(900)

CHUNK = 128
KIND = "demo"  # takes long enough to compute that any tier is worth waiting for


@pytest.fixture
def tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The URL of each, in a network of their own."""
    if reason := backends.missing():
        pytest.skip(reason)
    if os.geteuid():
        pytest.skip("Mooncake listens on all interfaces, and a network of its own needs root")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", backends.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", backends.SECRET_KEY)
    monkeypatch.setenv("PYTHONPATH", str(backends.install()), prepend=":")
    makers = {
        "valkey": backends.Valkey,
        "cluster": backends.ValkeyCluster,
        "s3": backends.SeaweedFS,
        "mooncake": backends.Mooncake,
    }
    with ExitStack() as stack:
        stack.enter_context(backends.private_network())
        yield {name: patient(stack.enter_context(make(tmp_path / name)).url) for name, make in makers.items()}


def patient(url: str) -> str:
    """Engines of all kinds and two of vLLM share a small machine."""
    return f"{url}{'&' if '?' in url else '?'}timeout=20"


def tier_chunks(server: ServerProcess) -> int:
    return sum(session.counts.get("tier_chunks", 0) for session in server.status().sessions)


def test_tokens_through_each_shared_tier_are_those_of_computing(
    tiers: dict[str, str], tmp_path: Path
) -> None:
    prompts = [p for p in prompts_around_borders(KINDS[KIND].block, CHUNK, seed=17) if len(p) > CHUNK]
    with host(tmp_path / "a", " ".join(tiers.values())) as server_a:
        connector = {"socket": str(server_a.socket), "lookup_timeout_ms": 5000}
        with VllmEngine(KIND, tmp_path / "engine-a", connector=connector) as first:
            truth = [first.round([p], salt=f"alone {n}").tokens[0] for n, p in enumerate(prompts)]
            assert first.round(prompts).tokens == truth
        eventually(lambda: not any(tier.queued for tier in server_a.status().tiers))
        assert all(tier.written_bytes for tier in server_a.status().tiers)

    (tmp_path / "b").mkdir()
    folder = Path("/dev/shm") / f"kvcellar-served-{os.getpid()}-b"
    server_b = ServerProcess(tmp_path / "b", folder)
    connector = {"socket": str(server_b.socket), "lookup_timeout_ms": 5000}
    try:
        server_b.start(memory="512MiB", tier=tiers["valkey"])
        with VllmEngine(KIND, tmp_path / "engine-b", connector=connector) as second:
            for name, url in tiers.items():
                server_b.stop()
                shutil.rmtree(folder, ignore_errors=True)
                server_b.start(tier=url)
                read_through(name, second, server_b, prompts, truth)
    finally:
        if server_b.process is not None:
            server_b.kill()
        shutil.rmtree(folder, ignore_errors=True)


def read_through(
    name: str,
    engine: VllmEngine,
    server: ServerProcess,
    prompts: list[list[int]],
    truth: list[tuple[int, ...]],
) -> None:
    """Until something came from the tier: whether waiting pays is for the connector to decide."""
    for _ in range(30):
        assert engine.round(prompts).tokens == truth, name
        if tier_chunks(server):
            break
        with AdminClient(server.socket) as admin:
            admin.clear()
    assert tier_chunks(server) > 0, f"{name} was never worth waiting for"
    status = server.status()
    assert status.tiers[0].counts.get("corrupt", 0) == 0, name
    assert status.counts.get("corrupt", 0) == 0, name
