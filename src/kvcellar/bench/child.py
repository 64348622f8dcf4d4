"""Processes that live as long as a measurement lasts: a real server, and whatever else is measured beside it.

Nothing of them stays behind, neither process nor shared memory, whatever ends the measurement. Should this
process be killed, they stop with it.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvcellar.client.link import Link
from kvcellar.errors import CellarError, Disconnected, Unavailable
from kvcellar.wire import messages as m

_START_S = 30.0
_POLL_S = 0.002
_STOP_S = 15.0


class ThreadTimes(NamedTuple):
    """Of a process's first thread, the one that decides everything in a server."""

    on_core_s: float
    waiting_s: float  # ready to run while all cores were taken


class ServerProcess(NamedTuple):
    process: subprocess.Popen[bytes]
    socket: Path
    ready_s: float  # from the spawn to the answer to the first request

    def rss_bytes(self) -> int:
        """Memory mapped and touched, the stripe tables included; slabs are not mapped by the server."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))) << 10

    def thread_times(self) -> ThreadTimes:
        return thread_times(self.process.pid)

    def connect(self) -> Link:
        """An operator's connection, which may ping."""
        return Link.open(self.socket, m.Hello(m.PROTOCOL_VERSION, "admin"), _START_S)


@contextlib.contextmanager
def running_server(memory: int, flags: Sequence[str] = ()) -> Iterator[ServerProcess]:
    prefix = f"kvcellar-bench-{os.getpid()}-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix) as folder,
        tempfile.TemporaryDirectory(prefix=prefix, dir="/dev/shm") as slabs,
        Path(folder, "log").open("w+b") as log,
    ):
        socket = Path(folder, "socket")
        command = [sys.executable, "-m", "kvcellar", "serve", "--name", "bench", "--memory", str(memory)]
        command += ["--folder", slabs, "--socket", str(socket), "--hold-percent", "50"]
        command += ["--drain-seconds", "0", "--log-level", "warning", *flags]
        start = time.perf_counter()
        with child(command, stdout=log.fileno(), stderr=log.fileno()) as process:
            _wait_ready(process, socket, Path(folder, "log"))
            yield ServerProcess(process, socket, time.perf_counter() - start)


@contextlib.contextmanager
def child(
    command: list[str], *, stdin: int = subprocess.DEVNULL, stdout: int, stderr: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    # A session of its own: Ctrl-C reaches us alone, and we stop it in order.
    with subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=_die_with_parent(),
    ) as process:
        try:
            yield process
        finally:
            _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    hello = m.Hello(m.PROTOCOL_VERSION, "admin")
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(Disconnected):
            link = Link.open(socket, hello, _START_S)
            link.call(m.Ping(), _START_S, m.Pong)
            link.close()
            return
        time.sleep(_POLL_S)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    raise Unavailable(f"the server did not start: {lines[-1] if lines else 'it said nothing'}")


def thread_times(pid: int) -> ThreadTimes:
    on_core, waiting, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    return ThreadTimes(int(on_core) / 1e9, int(waiting) / 1e9)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
            return


def _die_with_parent() -> Callable[[], None]:
    """For Popen: the child gets SIGTERM when we die, even by SIGKILL (Linux's PR_SET_PDEATHSIG)."""
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, int(signal.SIGTERM))


def must(condition: bool, what: str) -> None:
    """A figure of something that did not happen is worse than none."""
    if not condition:
        raise CellarError(f"the measurement went wrong: {what}")
