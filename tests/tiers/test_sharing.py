"""Two servers, as on two hosts, that share nothing but a tier: what one stores the other brings up."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.conftest import ServerProcess
from tests.server.engine import Engine, eventually
from tools import backends

CHUNKS = 12


@contextmanager
def host(home: Path, tier: str) -> Iterator[ServerProcess]:
    home.mkdir()
    folder = Path(tempfile.mkdtemp(prefix="kvcellar-served-", dir="/dev/shm"))
    server = ServerProcess(home, folder)
    server.flags |= {"--tier": tier}
    try:
        server.start()
        eventually(lambda: server.status().tiers[0].state == "up")
        yield server
        assert server.stop() == 0, server.log.read_text()
        assert "Traceback" not in server.log.read_text(), server.log.read_text()
    finally:
        if server.process is not None:
            server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def share(home: Path, tier: str, name: str) -> None:
    with host(home / "a", tier) as first, host(home / "b", tier) as second:
        writer = Engine(first.socket, name, session="a").ready()
        reader = Engine(second.socket, name, session="b").ready()
        writer.store(CHUNKS)
        eventually(lambda: not first.status().tiers[0].queued)
        assert reader.hit(CHUNKS) == 0, "memory alone has nothing"
        grant = reader.bring(CHUNKS)
        assert grant.chunks == CHUNKS, [server.status().tiers for server in (first, second)]
        for rank in reader.workers:
            assert reader.read(grant, rank) == []
        reader.release(grant)
        assert second.status().tiers[0].counts["hits"] >= CHUNKS
        for engine in (writer, reader):
            engine.close()


@pytest.mark.parametrize("name", ["one", "tp2", "hybrid"])
def test_through_valkey(valkey, tmp_path, name):
    valkey.say("FLUSHALL")
    share(tmp_path, valkey.url, name)


def test_through_a_valkey_cluster(cluster, tmp_path):
    share(tmp_path, cluster.url, "tp2")


def test_through_s3(seaweedfs, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", backends.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", backends.SECRET_KEY)
    share(tmp_path, seaweedfs.url.replace("/kv?", "/sharing?"), "tp2")


def test_through_mooncake(needs_backends, tmp_path, monkeypatch):
    if os.geteuid():
        pytest.skip("Mooncake listens on all interfaces, and a network of its own needs root")
    monkeypatch.setenv("PYTHONPATH", str(backends.install()), prepend=":")
    with backends.private_network(), backends.Mooncake(tmp_path / "store") as store:
        share(tmp_path, store.url, "tp2")


@pytest.mark.parametrize(
    ("tier", "reason"),
    [
        ("redis://127.0.0.1:1", "is the server running, and is the port right?"),
        ("redis+cluster://127.0.0.1:1,127.0.0.1:2", "is the server running, and is the port right?"),
        ("s3://bucket?endpoint=http://127.0.0.1:1", "it cannot be reached; is it running"),
        ("mooncake://127.0.0.1:1", "is mooncake_master running there"),
    ],
)
def test_a_tier_that_is_away_is_shown_as_down_with_the_reason(stopped_server, tier, reason, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    stopped_server.start(tier=tier)
    eventually(lambda: reason in stopped_server.status().tiers[0].reason)  # until then: not opened yet
    assert stopped_server.status().tiers[0].state == "down"


def test_a_tier_that_dies_and_comes_back_needs_no_restart(start_valkey, stopped_server, engine):
    valkey = start_valkey()
    server = stopped_server.start(tier=valkey.url)
    one = engine()
    one.store(4, seed=1)
    eventually(lambda: not server.status().tiers[0].queued)
    valkey.kill()
    one.store(4, seed=2)
    eventually(lambda: server.status().tiers[0].state != "up")
    assert one.bring(8, seed=1).chunks == 4, "memory is not touched by that"
    valkey.start()

    def is_written() -> bool:
        one.store(1, seed=os.urandom(4).hex())
        return bool(int(valkey.say("DBSIZE")[1:]))

    eventually(is_written)
