"""The example of docs/tiers.md: it passes the suite, and a server finds it by its entry point."""

import importlib.util
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.server.conftest import ServerProcess
from tests.server.engine import Engine, eventually
from tests.tiers.conformance import EngineConformance

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/folder_tier.py"


def load():
    spec = importlib.util.spec_from_file_location("folder_tier", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestFolderEngine(EngineConformance):
    @pytest.fixture
    def make(self, tmp_path):
        return lambda: load().FolderEngine(tmp_path)


def test_it_is_as_short_as_the_docs_say():
    code = [line for line in EXAMPLE.read_text().splitlines() if line.strip()]
    assert len(code) <= 50


@pytest.fixture
def other_home(tmp_path):
    """Where a second server lives: its own socket, its own memory."""
    home = tmp_path / "b"
    home.mkdir()
    memory = Path(tempfile.mkdtemp(prefix="kvcellar-served-", dir="/dev/shm"))
    yield home, memory
    shutil.rmtree(memory, ignore_errors=True)


def test_a_server_uses_it(install, stopped_server, engine, tmp_path):
    install("folder", EXAMPLE, "open_folder")
    folder = tmp_path / "shared"
    folder.mkdir()
    server = stopped_server.start(tier=f"folder://{folder}")
    engine(session="first").store(5)
    eventually(lambda: len(list(folder.iterdir())) == 5 and not server.status().tiers[0].queued)
    assert server.status().tiers[0].state == "up"
    assert engine(session="second").hit(5) == 5


def test_two_servers_share_by_it_without_knowing_of_each_other(
    install, stopped_server, engine, tmp_path, other_home
):
    install("folder", EXAMPLE, "open_folder")
    folder = tmp_path / "shared"
    folder.mkdir()
    stopped_server.start(tier=f"folder://{folder}")
    engine("tp2", session="on host a").store(7)
    eventually(lambda: not stopped_server.status().tiers[0].queued)
    other = ServerProcess(*other_home).start(tier=f"folder://{folder}")
    reader = Engine(other.socket, "tp2", session="on host b").ready()
    grant = reader.bring(7)
    assert grant.chunks == 7
    for rank in reader.workers:
        assert reader.read(grant, rank) == []
    reader.release(grant)
    reader.close()
    assert other.stop() == 0
