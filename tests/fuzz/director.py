"""Directs a fuzz run: a server, the client that behaves, fuzzers beside it, and a look at the server before
and after.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvcellar.client import AdminClient
from kvcellar.errors import Unavailable
from kvcellar.wire.report import StatusReport
from tests.fuzz.fuzzer import Progress
from tests.fuzz.healthy import CHURN, KEPT, Pulse
from tests.fuzz.score import Score

REPOSITORY = Path(__file__).parents[2]
_FUZZERS = 2  # at a time
_FRAMES_EACH = 50_000  # then another takes its place: what a live process holds in silence is never freed
_READY_S, _EXIT_S, _SETTLE_S = 60.0, 30.0, 30.0  # on a busy machine
_MEMORY = 64 << 20


class Director:
    def __init__(self, seed: int, tell: Callable[[str], None]) -> None:
        self.score = Score(seed)
        self.logs = Path(tempfile.mkdtemp(prefix="kvcellar-fuzz-"))
        self._tell = tell
        self._folder = Path(tempfile.mkdtemp(prefix="kvcellar-fuzz-", dir="/dev/shm"))
        self._socket = self.logs / "server"
        self._children: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._lock = threading.Lock()  # guards the score against the threads that read

    def run(self, frames: int, seconds: float) -> None:
        """`close` must follow, whatever happens."""
        server = self._start_server()
        healthy = self._spawn(["tests.fuzz.healthy", str(self._socket)], self._on_pulse)
        self._wait_for(lambda: self.score.counts["lookups"] > 0, _READY_S, "the healthy client did not start")
        self._look(server, "at the start")
        began = time.monotonic()
        self._watch(server, healthy, frames, began + seconds)
        self.score.seconds = time.monotonic() - began
        if not self.score.broken:
            self.score.cpu_seconds = _cpu_seconds(server.pid)
            self._look(server, "after the last")
            self._end(server, healthy)

    def close(self) -> None:
        """Nothing is left: no process, no file."""
        for child in self._children:
            if child.poll() is None:
                child.kill()
            child.wait(_EXIT_S)
        for reader in self._readers:
            reader.join(_EXIT_S)
        for child in self._children:
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if not self.score.violations():
            shutil.rmtree(self.logs, ignore_errors=True)

    # -- processes ---------------------------------------------------------------------------------------

    def _start_server(self) -> subprocess.Popen[bytes]:
        command = ["kvcellar", "serve", "--socket", str(self._socket), "--folder", str(self._folder)]
        server = self._spawn([*command, "--memory", str(_MEMORY), "--log-level", "warning"])
        self._wait_for(self._answers, _READY_S, "the server did not start")
        return server

    def _start_fuzzer(self, number: int, frames: int) -> subprocess.Popen[bytes]:
        seed, foreign = f"{self.score.seed}-{number}", [KEPT.id.hex(), CHURN.id.hex()]
        command = ["tests.fuzz.fuzzer", str(self._socket), seed, str(frames), *foreign]
        return self._spawn(command, self._on_progress)

    def _spawn(
        self, command: list[str], hear: Callable[[bytes], None] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self.logs / f"{command[0]}.log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if hear else log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"PYTHONFAULTHANDLER": "1"},  # last words, should it crash
            )
        self._children.append(child)
        if hear is not None:
            reader = threading.Thread(target=self._listen, args=(child, hear), daemon=True)
            reader.start()
            self._readers.append(reader)
        return child

    def _listen(self, child: subprocess.Popen[bytes], hear: Callable[[bytes], None]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            with self._lock:
                hear(line)

    def _on_progress(self, line: bytes) -> None:
        progress, score = msgspec.json.decode(line, type=Progress), self.score
        for kind, outcome, count in progress.outcomes:
            score.outcomes[kind, outcome] += count
        score.counts.update(connections=progress.connections, silent=progress.silent)
        score.complaints += progress.complaints

    def _on_pulse(self, line: bytes) -> None:
        pulse = msgspec.json.decode(line, type=Pulse)
        self.score.counts.update(lookups=pulse.lookups, stores=pulse.stores, objects=pulse.objects)
        self.score.counts["crowded_out"] += pulse.crowded_out
        self.score.slowest_ms = max(self.score.slowest_ms, pulse.slowest_ms)
        self.score.unhealthy += pulse.complaints

    # -- watching ----------------------------------------------------------------------------------------

    def _watch(
        self,
        server: subprocess.Popen[bytes],
        healthy: subprocess.Popen[bytes],
        frames: int,
        give_up: float,
    ) -> None:
        """Let fuzzers say it all, a few at a time."""
        score, waiting = self.score, list(enumerate(_portions(frames)))
        running: list[subprocess.Popen[bytes]] = []
        while (waiting or running) and not score.broken:
            while waiting and len(running) < _FUZZERS:
                running.append(self._start_fuzzer(*waiting.pop(0)))
            time.sleep(0.1)
            self._tell(f"{score.frames:,} of {frames:,} frames, {len(score.violations())} violations")
            if len(score.memory) == 1 and score.frames > frames // 10:
                self._look(server, "after a tenth")
            for name, child in [("server", server), ("healthy client", healthy)]:
                if child.poll() is not None:
                    score.broken.append(f"the {name} died: {child.returncode}")
            for child in running:
                if child.poll():
                    score.broken.append(f"a fuzzer died: {child.returncode}")
            running = [child for child in running if child.poll() is None]
            if time.monotonic() > give_up:
                score.broken.append("not done in time")

    def _end(self, server: subprocess.Popen[bytes], healthy: subprocess.Popen[bytes]) -> None:
        """Only the healthy client is left, and then nobody: everything is as at the start."""
        self._complain_until(lambda: self._leaks(2))
        self._wait_until(lambda: self._open_files(server) <= self.score.files[0][1], 5.0)
        self._look(server, "when only the healthy client is left")
        assert healthy.stdin is not None
        healthy.stdin.close()
        if healthy.wait(_EXIT_S) != 0:
            self.score.broken.append(f"the healthy client ended with {healthy.returncode}")
        self._complain_until(lambda: self._leaks(0))
        self.score.counts["namespaces"] = len(self._status().namespaces)
        server.terminate()
        if server.wait(_EXIT_S) != 0:
            self.score.broken.append(f"the server ended with {server.returncode}")
        for log in self.logs.glob("*.log"):
            for sign in ("Traceback", "an operation broke", "never awaited", "never retrieved"):
                if sign in (text := log.read_text(errors="replace")):
                    self.score.broken.append(f"{log.name}: {text[text.index(sign) :][:2000]}")

    def _leaks(self, sessions: int) -> list[str]:
        status = self._status()
        found = [f"session {one.name}: {one.leases} leases" for one in status.sessions][sessions:]
        if sessions == 0:
            found += [f"{one.name} holds {one.leases} leases" for one in status.sessions if one.leases]
        for space in status.namespaces:
            for group in space.groups:
                if sessions == 0 and group.stripes + group.free != group.slots:
                    found.append(
                        f"{space.identity['model']}: {group.stripes} + {group.free} of {group.slots} slots"
                    )
        return found

    def _complain_until(self, leaks: Callable[[], list[str]]) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while (found := leaks()) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.score.broken += found[:20]

    def _look(self, server: subprocess.Popen[bytes], when: str) -> None:
        lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
        size = next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
        self.score.memory.append((when, size))
        if when != "after a tenth" and when != "after the last":
            self.score.files.append((when, self._open_files(server)))

    def _open_files(self, server: subprocess.Popen[bytes]) -> int:
        """But for slabs: what was registered may stay."""
        links = []
        for entry in Path(f"/proc/{server.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(entry))
        return sum(not link.startswith(str(self._folder)) for link in links)

    def _status(self) -> StatusReport:
        with AdminClient(self._socket) as admin:
            return admin.status()

    def _answers(self) -> bool:
        try:
            return bool(self._status().pid)
        except Unavailable:
            return False

    def _wait_for(self, predicate: Callable[[], bool], timeout: float, otherwise: str) -> None:
        if not self._wait_until(predicate, timeout):
            raise RuntimeError(f"{otherwise}; see {self.logs}")

    def _wait_until(self, predicate: Callable[[], bool], timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not predicate():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def _portions(frames: int) -> list[int]:
    count = max(_FUZZERS, -(-frames // _FRAMES_EACH))
    return [-(-frames // count)] * count


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
