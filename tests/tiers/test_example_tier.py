"""The example of docs/tiers.md: it passes the suite, and a server finds it by its entry point."""

import importlib.util
from pathlib import Path

import pytest

from tests.server.engine import eventually
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


def test_a_server_uses_it(install, stopped_server, engine, tmp_path):
    install("folder", EXAMPLE, "open_folder")
    folder = tmp_path / "shared"
    folder.mkdir()
    server = stopped_server.start(tier=f"folder://{folder}")
    engine(session="first").store(5)
    eventually(lambda: len(list(folder.iterdir())) == 5 and not server.status().tiers[0].queued)
    assert server.status().tiers[0].state == "up"
    with_tier = engine(session="second")
    assert with_tier.hit(5) == 5
