"""The KVCellar server of the demo: `kvcellar serve` on a socket and in a folder of its own."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from programs import DemoError, Program, Programs, wait_until

from kvcellar.client import AdminClient
from kvcellar.errors import CellarError, Unavailable
from kvcellar.wire.report import StatusReport

_START_S, _SETTLE_S = 20.0, 20.0


class Server:
    def __init__(self, programs: Programs, place: Path, folder: Path, memory: int) -> None:
        self.socket = place / "socket"
        self._programs = programs
        self._log = place / "server.log"
        self._command = [sys.executable, "-m", "kvcellar", "serve", "--name", "demo"]
        self._command += ["--socket", str(self.socket), "--folder", str(folder), "--memory", str(memory)]
        self._program: Program

    def start(self) -> None:
        self._program = self._programs.start(self._command, self._log)
        if not wait_until(lambda: self._program.has_ended() or self._answers(), _START_S):
            raise DemoError("The server does not answer.", self._log)
        if self._program.has_ended():
            raise DemoError("The server did not start.", self._log)

    def kill(self) -> None:
        self._program.kill()

    def wait_attached(self, engines: int) -> None:
        """Until every engine's scheduler (-1) and worker (0) are connected, and have said for what."""

        def attached(now: StatusReport) -> bool:
            return [one.connected for one in now.sessions] == [[-1, 0]] * engines and all(
                one.counts.get("messages", 0) >= len(one.connected) for one in now.sessions
            )

        self._wait(attached, "found it")

    def wait_stored(self, chunks: int) -> None:
        """Until so many chunks are there to be found."""

        def stored(now: StatusReport) -> bool:
            there = sum(group.stripes for space in now.namespaces for group in space.groups)
            return there == chunks and not any(one.held_bytes for one in now.sessions)

        self._wait(stored, "stored what they computed")

    def _wait(self, condition: Callable[[StatusReport], bool], what: str) -> None:
        try:
            if wait_until(lambda: condition(self._status()), _SETTLE_S):
                return
        except CellarError as error:
            raise DemoError(f"The server is in trouble: {error}", self._log) from None
        raise DemoError(f"After {_SETTLE_S:.0f} s the engines have not {what}.", self._log)

    def _answers(self) -> bool:
        with contextlib.suppress(Unavailable):
            self._status()
            return True
        return False

    def _status(self) -> StatusReport:
        with AdminClient(self.socket) as admin:
            return admin.status()
