"""How an engine's process begins, and how one hears of its end: started by itself, or in the nursery.

Imports neither vLLM nor torch.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import IO, NamedTuple

_BORN_S = 120.0  # the first one waits for vLLM to be imported


class Process(NamedTuple):
    """An engine's: it leads a process group of its own."""

    pid: int
    pidfd: int
    stdin: IO[bytes]
    stdout: IO[bytes]
    child: "subprocess.Popen[bytes] | None"  # if it is ours, and not the nursery's

    def has_ended(self, within: float) -> bool:
        return bool(select.select([self.pidfd], [], [], within)[0])

    def kill(self) -> None:
        """It and its group, now; harmless if they ended before."""
        with contextlib.suppress(ProcessLookupError):  # the last rank has ended
            os.killpg(self.pid, signal.SIGKILL)
        if self.child is not None:
            self.child.wait()
        else:
            self.has_ended(_BORN_S)
        self.stdout.close()
        os.close(self.pidfd)


def start(python: Path, log: IO[bytes]) -> Process:
    """For an engine whose ranks import vLLM themselves, as they do by default."""
    child = subprocess.Popen(
        [python, "-m", "tests.vllm.engine"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        process_group=0,  # no session: Linux weighs processes of one against those of another alike
    )
    assert child.stdin is not None
    assert child.stdout is not None
    return Process(child.pid, os.pidfd_open(child.pid), child.stdin, child.stdout, child)


def bear(python: Path, log: IO[bytes]) -> Process:
    """Ranks beside the first are forked from the engine."""
    its_stdin, stdin = os.pipe()
    stdout, its_stdout = os.pipe()
    try:
        pid = _nursery(python).bear([its_stdin, its_stdout, log.fileno()])
    finally:
        os.close(its_stdin)
        os.close(its_stdout)
    return Process(pid, os.pidfd_open(pid), os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb", 0), None)


class _Nursery:
    def __init__(self, python: Path) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(_BORN_S)
        self._asking = threading.Lock()
        root = Path(__file__).parents[2]
        with theirs:
            self._process = subprocess.Popen(
                [python, "-m", "tests.vllm.nursery"], stdin=theirs.fileno(), cwd=root, process_group=0
            )
        atexit.register(self.close)

    def bear(self, fds: list[int]) -> int:
        with self._asking:
            socket.send_fds(self._sock, [json.dumps(dict(os.environ)).encode()], fds)
            return int.from_bytes(self._sock.recv(4), "little")

    def close(self) -> None:
        self._sock.close()
        self._process.wait(_BORN_S)


@functools.cache
def _nursery(python: Path) -> _Nursery:
    return _Nursery(python)
