"""A real `kvcellar serve` for each test, and engines that use it.

Whatever a test does, at its end the server must still stop in order and must have broken nothing inside.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcellar.client import AdminClient
from kvcellar.errors import Unavailable
from kvcellar.wire import messages as m
from kvcellar.wire.report import SessionReport, StatusReport
from tests.server.engine import PATIENCE, Child, Engine, eventually
from tests.server.raw import Raw


class ServerProcess:
    def __init__(self, home: Path, folder: Path) -> None:
        self.socket = home / "s"
        self.folder = folder
        self.log = home / "log"
        self.flags: dict[str, str] = {"--memory": "16MiB", "--drain-seconds": "1"}
        self.wrapper: list[str] = []  # a command that runs it with fewer rights
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **flags: str) -> "ServerProcess":
        """Returns when it answers. Flags last until the next start that changes them: memory="64MiB"."""
        self.flags |= {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
        pairs = [text for pair in self.flags.items() for text in pair]
        with self.log.open("ab") as log:
            command = [*self.wrapper, sys.executable, "-m", "kvcellar", "serve", *self.where(), *pairs]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        eventually(self.answers)
        return self

    def where(self) -> list[str]:
        return ["--socket", str(self.socket), "--folder", str(self.folder)]

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        try:
            with AdminClient(self.socket) as admin:
                admin.ping()
        except Unavailable:
            return False
        return True

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Its exit code."""
        assert self.process is not None
        code = self.process.wait(PATIENCE)
        self.process = None
        return code

    def restart(self, **flags: str) -> "ServerProcess":
        """As after a crash."""
        self.kill()
        return self.start(**flags)

    def status(self) -> StatusReport:
        with AdminClient(self.socket, PATIENCE) as admin:
            return admin.status()

    def session(self, name: str = "engine") -> SessionReport | None:
        return next((session for session in self.status().sessions if session.name == name), None)

    def leases(self) -> int:
        return sum(session.leases for session in self.status().sessions)

    def resident_bytes(self) -> int:
        """Memory of its own: slabs, which it shares, do not count."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

    def slab_bytes(self) -> int:
        total = 0
        for path in [path for path in self.folder.rglob("*") if path.suffix in (".slab", ".table")]:
            with contextlib.suppress(FileNotFoundError):  # given back while we look
                total += path.stat().st_size
        return total


@contextlib.contextmanager
def server_in(home: Path) -> Iterator[ServerProcess]:
    """A server that is not started yet. At the end it must stop in order, if it runs."""
    folder = Path(tempfile.mkdtemp(prefix="kvcellar-served-", dir="/dev/shm"))
    server = ServerProcess(home, folder)
    try:
        yield server
        if server.process is not None:
            server.signal(signal.SIGCONT)
            assert server.stop() == 0, server.log.read_text()
        log = server.log.read_text()
        assert "an operation broke" not in log, log
        assert "Traceback" not in log, log
    finally:
        if server.process is not None:
            server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def stopped_server(tmp_path: Path) -> Iterator[ServerProcess]:
    with server_in(tmp_path) as server:
        yield server


@pytest.fixture
def server(stopped_server: ServerProcess) -> ServerProcess:
    return stopped_server.start()


@pytest.fixture
def engine(stopped_server: ServerProcess) -> Iterator[Callable[..., Engine]]:
    """engine("tp2", session="a"): clients in this process, connected, closed at the end."""
    made: list[Engine] = []

    def make(*arguments: Any, **options: Any) -> Engine:
        made.append(Engine(stopped_server.socket, *arguments, **options))
        return made[-1].ready()

    yield make
    for one in made:
        one.close()


@pytest.fixture
def raw(stopped_server: ServerProcess) -> Iterator[Callable[..., Raw]]:
    """raw(hello): a connection that says whatever it is told to."""
    made: list[Raw] = []

    def make(hello: m.Hello | None = None) -> Raw:
        made.append(Raw(stopped_server.socket, hello))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def child(stopped_server: ServerProcess, tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """child(session="a"): the same in a process that can be killed."""
    made: list[Child] = []

    def make(**options: Any) -> Child:
        made.append(Child(stopped_server.socket, tmp_path / "children", **options))
        return made[-1]

    yield make
    for one in made:
        if one.process.returncode is None:
            one.kill()
