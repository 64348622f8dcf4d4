"""Servers and engines, as the server's own tests have them, with tiers."""

import shutil
from pathlib import Path

import pytest

from kvcellar.client import AdminClient
from kvcellar.wire.report import TierReport
from tests.server.conftest import ServerProcess, engine, raw, server, stopped_server
from tests.server.engine import eventually
from tests.tiers.fixtures import cluster, needs_backends, opened, seaweedfs, start_valkey, valkey

__all__ = ["engine", "raw", "server", "stopped_server"]
__all__ += ["cluster", "needs_backends", "opened", "seaweedfs", "start_valkey", "valkey"]


class ColdServer:
    """A server whose tiers matter: its memory can be wiped."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server

    def start(self, **flags: str) -> "ColdServer":
        self.server.start(**flags)
        # A disk is looked through in the background: until then what it has is a miss.
        eventually(lambda: all(one.state == "up" for one in self.server.status().tiers))
        return self

    def tier(self, number: int = 0) -> TierReport:
        return self.server.status().tiers[number]

    def settled(self, number: int = 0) -> TierReport:
        """When everything is written back."""
        eventually(lambda: not self.tier(number).queued)
        return self.tier(number)

    def has_grown(self, chunks: int) -> None:
        """When memory for so many is there. A reserve does not wait for it longer than a second: then it is
        granted what fits.
        """
        eventually(lambda: self.server.status().namespaces[0].groups[0].slots >= chunks)

    def wipe(self, **flags: str) -> None:
        """Stop in order, lose the memory, start again."""
        assert self.server.stop() == 0
        shutil.rmtree(self.server.folder)
        self.start(**flags)

    def forget(self) -> None:
        """Lose the memory without a restart."""
        with AdminClient(self.server.socket) as admin:
            admin.clear()


@pytest.fixture
def cold(stopped_server: ServerProcess, tmp_path: Path) -> ColdServer:
    """With a disk of 64 MiB, started."""
    stopped_server.flags |= {"--disk": str(tmp_path / "disk"), "--disk-size": "64MiB"}
    return ColdServer(stopped_server).start()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """install(scheme, module file, factory): as pip would install a package with this entry point."""

    def install(scheme: str, module: Path, factory: str) -> None:
        site = tmp_path / f"site-{scheme}"
        info = site / f"{module.stem}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.stem}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kvcellar.tiers]\n{scheme} = {module.stem}:{factory}\n")
        (site / module.name).write_text(module.read_text())
        monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")

    return install


@pytest.fixture
def gate(install, stopped_server: ServerProcess, tmp_path: Path) -> Path:
    """A folder that decides what the server's gated tier does; the server has it as its first tier."""
    install("gated", Path(__file__).parent / "gated_tier.py", "open_gated")
    folder = tmp_path / "gate"
    folder.mkdir()
    stopped_server.flags |= {"--tier": f"gated://{folder}"}
    return folder
