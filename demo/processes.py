"""The processes of the demo, as whoever directs it holds them: a server, and engines that are asked.

Every wait has an end, and what goes wrong is a DemoError: a sentence for the person in front of the screen.
"""

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from engine import Answer, Event, Progress, Prompt, Ready, Storing

from kvcellar.client import AdminClient
from kvcellar.errors import Unavailable
from kvcellar.wire.report import StatusReport

_START_S, _ANSWER_S, _SETTLE_S = 10.0, 30.0, 10.0


class DemoError(Exception):
    """The show cannot go on."""


def check_room(folder: Path, wanted: int) -> None:
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise DemoError(f"{folder} is not a folder I can write to; choose another with --folder.")
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < wanted:
        raise DemoError(
            f"The demo needs {wanted >> 20} MiB in {folder}, and {free >> 20} MiB are free. Make room, "
            "enlarge it (docker run --shm-size=1g), or choose another folder with --folder."
        )


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _SETTLE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Server:
    def __init__(self, place: Path, memory: int) -> None:
        self.socket = place / "socket"
        self.status: StatusReport | None = None  # as last seen; None while there is no server
        self._place = place
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> StatusReport:
        flags = {
            "name": "demo",
            "memory": self._memory,
            "folder": self._place / "cellar",
            "socket": self.socket,
        }
        command = [sys.executable, "-m", "kvcellar", "serve"]
        command += [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
        log = self._place / "server.log"
        self._process = _spawn(command, log)
        deadline = time.monotonic() + _START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(Unavailable):
                return self.look()
            time.sleep(0.02)
        raise DemoError(f"The server did not start. {_last_line(log)}")

    def look(self) -> StatusReport:
        with AdminClient(self.socket) as admin:
            self.status = admin.status()
        return self.status

    def knows(self, engine: str) -> bool:
        return any(one.label == engine for one in self.look().sessions)

    def is_idle(self) -> bool:
        """Nobody holds anything, to read or to write."""
        return not any(one.leases or one.held_bytes for one in self.look().sessions)

    def chunks(self) -> int:
        return sum(group.stripes for space in self.look().namespaces for group in space.groups)

    def kill(self) -> None:
        self.status = None
        if self._process is not None:
            _kill(self._process)


class EngineProcess:
    def __init__(self, name: str, server: Server, place: Path, tokens_per_s: float) -> None:
        self.name = name
        self.doing: tuple[str, int, int] = ("starting", 0, 0)  # and tokens reused and computed
        self._log = place / f"engine-{name}.log"
        program = Path(__file__).with_name("engine.py")
        command = [sys.executable, str(program), str(server.socket), name, str(tokens_per_s)]
        self._process = _spawn(command, self._log, subprocess.PIPE)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def wait_attached(self) -> None:
        self.doing = ("looking for a server", 0, 0)
        self.ask(Prompt(()))
        while not isinstance(self.next_event(_START_S), Ready):
            pass
        self.doing = ("idle", 0, 0)

    def ask(self, prompt: Prompt) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone; next_event says so
            self._process.stdin.write(msgspec.json.encode(prompt) + b"\n")
            self._process.stdin.flush()

    def answer(self) -> Answer:
        deadline = time.monotonic() + _ANSWER_S
        while not isinstance(event := self.next_event(deadline - time.monotonic()), Answer):
            pass
        self.doing = ("idle", event.reused, event.tokens - event.reused)
        return event

    def wait_storing(self) -> Storing:
        """Until half of a store is copied."""
        while True:
            event = self.next_event(_ANSWER_S)
            if isinstance(event, Storing) and 2 * event.copied >= event.chunks:
                return event

    def next_event(self, timeout: float) -> Event:
        try:
            event = self._events.get(timeout=max(0.0, timeout))
        except queue.Empty:
            raise DemoError(f"Engine {self.name} says nothing.") from None
        if event is None:
            raise DemoError(f"Engine {self.name} ended. {_last_line(self._log)}")
        if isinstance(event, Progress):
            self.doing = ("computing", event.reused, event.computed)
        elif isinstance(event, Storing):
            self.doing = (f"storing chunk {event.copied + 1} of {event.chunks}", *self.doing[1:])
        return event

    def kill(self) -> None:
        self.doing = ("killed", 0, 0)
        _kill(self._process)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put(msgspec.json.decode(line, type=Event))
        self._events.put(None)


def _spawn(command: list[str], log: Path, pipe: int | None = None) -> subprocess.Popen[bytes]:
    """A process that Ctrl-C does not reach: cleaning up is for the demo to do."""
    with log.open("ab") as errors:
        output = errors if pipe is None else pipe
        return subprocess.Popen(
            command, stdin=pipe or subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(_START_S)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"Its last words: {lines[-1]}" if lines else "It left no word."
