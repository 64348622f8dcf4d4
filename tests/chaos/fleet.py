"""The processes of a fault run, as whoever directs it holds them: the server, and engines of several
processes.

Every process gets its orders on stdin and ends when stdin does, so nothing outlives the run. Knows how to
start, stop, wake and kill; when to do it is for others to say.
"""

import contextlib
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvcellar.client import AdminClient
from kvcellar.errors import Unavailable
from tests.chaos.report import News
from tests.chaos.world import DISK, MEMORY, SPACES, Plan

REPOSITORY = Path(__file__).parents[2]
_READY_S, _EXIT_S = 60.0, 30.0  # on a busy machine

OnNews = Callable[["Child", News], None]


class Child:
    """One process, and when it was stopped."""

    def __init__(self, name: str, command: list[str], log: Path, on_news: OnNews | None = None) -> None:
        self.name = name
        self._born = time.monotonic()
        self._naps: list[list[float]] = []  # from, to
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if on_news else errors,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for whoever directs
            )
        self._reader: threading.Thread | None = None
        if on_news is not None:
            self._reader = threading.Thread(target=self._listen, args=(on_news,), daemon=True)
            self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def age(self) -> float:
        return time.monotonic() - self._born

    @property
    def asleep(self) -> bool:
        return bool(self._naps) and self._naps[-1][1] == float("inf")

    def say(self, order: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone; whoever waits for it will see
            self._process.stdin.write(order.encode() + b"\n")
            self._process.stdin.flush()

    def stop(self) -> None:
        self._naps.append([time.monotonic(), float("inf")])
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        if self.asleep and self.alive:
            self._process.send_signal(signal.SIGCONT)
            self._naps[-1][1] = time.monotonic()

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, timeout: float = _EXIT_S) -> int | None:
        """Its exit code; None when it is still there after the timeout."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        if self._reader is not None:
            self._reader.join(_EXIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return code

    def awake_between(self, began: float, ended: float) -> float:
        """Seconds of that time in which it could run."""
        napped = sum(max(0.0, min(ended, to) - max(began, at)) for at, to in list(self._naps))
        return ended - began - napped

    def _listen(self, on_news: OnNews) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                news = msgspec.json.decode(line, type=News)
            except msgspec.DecodeError:
                continue  # cut off by a kill
            on_news(self, news)


class Server:
    def __init__(self, home: Path, folder: Path) -> None:
        self.socket = home / "server"
        self.folder = folder
        self.log = home / "server.log"
        self.child: Child | None = None
        self.slowest_start = 0.0

    def start(self) -> None:
        """Returns when it answers."""
        began = time.monotonic()
        flags = {"socket": self.socket, "folder": self.folder, "memory": MEMORY, "drain-seconds": 1}
        flags |= {"disk": self.socket.with_name("disk"), "disk-size": DISK}
        pairs = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
        self.child = Child("server", ["kvcellar", "serve", *pairs], self.log)
        while not self._answers():
            if not self.child.alive or time.monotonic() > began + _READY_S:
                raise RuntimeError(f"the server did not start; see {self.log}")
            time.sleep(0.01)
        self.slowest_start = max(self.slowest_start, time.monotonic() - began)

    def _answers(self) -> bool:
        try:
            with AdminClient(self.socket, 1.0) as admin:
                admin.ping()
        except Unavailable:
            return False
        return True


class Engine:
    """One engine through all its lives: a new session whenever its scheduler had to be replaced."""

    def __init__(self, plan: Plan, server: Path, home: Path, on_news: OnNews) -> None:
        self.plan = plan
        self.scheduler: Child | None = None
        self.ranks: dict[int, Child] = {}  # empty where the scheduler's process is the rank
        self._server, self._home, self._on_news = server, home, on_news
        self._lives = itertools.count(1)
        self.session, self._door = "", Path()

    @property
    def world(self) -> range:
        return range(SPACES[self.plan.space].parallel.world_size)

    @property
    def children(self) -> list[Child]:
        return [*([self.scheduler] if self.scheduler else []), *self.ranks.values()]

    def start(self) -> None:
        self.session = f"{self.plan.name}-{next(self._lives)}"
        self._door = self._home / self.session
        self.scheduler = self._spawn("both" if self.plan.one_process else "scheduler", self.plan.one_process)
        if not self.plan.one_process:
            for rank in self.world:
                self.start_rank(rank)

    def start_rank(self, rank: int) -> None:
        self.ranks[rank] = self._spawn("rank", True, rank)

    def _spawn(self, role: str, has_rank: bool, rank: int = 0) -> Child:
        command = [
            "tests.chaos.engine",
            role,
            str(self._server),
            self.session,
            self.plan.space,
            str(self._door),
        ]
        command += [str(rank)] if has_rank else []
        name = f"{self.session} {role}" + (f" {rank}" if role == "rank" else "")
        return Child(name, command, self._home / "engines.log", self._on_news)
