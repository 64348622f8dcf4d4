"""The programs of the demo: each in a session of its own, so that Ctrl-C reaches only the demo, which then
ends them all and waits until they are gone. Knows nothing of what they do.

What goes wrong is a DemoError: a sentence for the person in front of the screen, and the log that has more.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Self

_GONE_S = 10.0


class DemoError(Exception):
    """The show cannot go on."""

    def __init__(self, sentence: str, log: Path | None = None) -> None:
        super().__init__(sentence)
        self.log = log


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Interrupts:
    """Ctrl-C, SIGTERM and a closed terminal, as one SystemExit. Once: cleaning up is not interrupted."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._held = False
        self._number: int | None = None
        for one in self.SIGNALS:
            signal.signal(one, self._handle)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Not now: what happens in here happens as a whole."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._number is not None:
            raise SystemExit(128 + self._number)

    def ignore(self) -> None:
        """From here on: everything is being cleaned up already."""
        self._number = self._number or 0

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._number is None:
            self._number = number
            if not self._held:
                raise SystemExit(128 + number)


class Program:
    def __init__(self, command: Sequence[str | Path], log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        """Without reaping it, so that its number stays its own while we look for what it started."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def exit_code(self, seconds: float) -> int | None:
        """None: it is still at it."""
        return self._process.wait() if wait_until(self.has_ended, seconds) else None

    def kill(self) -> None:
        """kill -9, and wait until it is gone. For a program without children."""
        self._process.kill()
        self._process.wait()

    def family(self) -> list[int]:
        """Its process group, as far as it lives."""
        return [] if self._process.returncode is not None else list(_group(self.pid))

    def reap(self) -> None:
        self._process.wait()


class Programs:
    """All that were started, from `with` to its end; then they are gone, whatever happened. `place` is for
    their temporary files: vLLM leaves sockets there, and whoever is killed leaves anything.
    """

    def __init__(self, interrupts: Interrupts, place: Path) -> None:
        self._interrupts = interrupts
        self._place = place
        self._started: list[Program] = []

    def start(self, command: Sequence[str | Path], log: Path) -> Program:
        with self._interrupts.held():  # or a program might be started that nobody knows of
            self._started.append(Program(["env", f"TMPDIR={self._place}", *command], log))
        return self._started[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """SIGKILL: an engine that is starting does not listen to anything less, and what it has started would
        outlive it. Python's resource trackers are spared: they remove what the killed ones had in /dev/shm,
        and then end by themselves.
        """
        if not wait_until(lambda: self._kill(spared=_is_tracker), _GONE_S):
            wait_until(lambda: self._kill(spared=lambda _pid: False), _GONE_S)
        for program in self._started:
            program.reap()

    def _kill(self, spared: Callable[[int], bool]) -> bool:
        """True when nobody is left."""
        left = [pid for program in self._started for pid in program.family()]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                if not spared(pid):
                    os.kill(pid, signal.SIGKILL)
        return not left


def _group(leader: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _parent, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state not in "ZX":
                yield int(folder.name)


def _is_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
