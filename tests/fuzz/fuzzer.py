"""A fuzzing process: says acts, many connections at a time, until it has said enough frames.

    python -m tests.fuzz.fuzzer SERVER SEED FRAMES FOREIGN_NAMESPACE...

Prints what became of them, one JSON line now and then. Ends when stdin does.
"""

import contextlib
import hashlib
import os
import select
import socket
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path

import msgspec

from kvcellar.wire import CONTROL
from tests.fuzz.talk import Talk
from tests.fuzz.words import PROPER, Words

_AT_A_TIME = 16
_SILENT = 24  # connections that say nothing, or next to nothing; the server allows 256 that are opening
_SILENCE_S = 5.0  # after which the server ends them
_SLACK_S = 5.0


class Progress(msgspec.Struct):
    """Since the last one."""

    connections: int
    silent: int
    outcomes: list[tuple[str, str, int]]  # kind, outcome, how many
    complaints: list[str]


class Silence:
    """Connections that open and say nothing. The server has to end them by itself."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: deque[tuple[float, socket.socket]] = deque()
        self.ended = 0

    def tend(self) -> list[str]:
        complaints = []
        while self._open and self._open[0][0] < time.monotonic() - _SILENCE_S - _SLACK_S:
            _, sock = self._open.popleft()
            with contextlib.suppress(ConnectionResetError, BlockingIOError):
                while data := sock.recv(4096):  # it may be told why
                    assert data
                self.ended += 1
                sock.close()
                continue
            complaints.append("a silent connection was left open")
            sock.close()
        while len(self._open) < _SILENT:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(str(self._path))
            if len(self._open) % 2:
                sock.send(CONTROL)
            sock.setblocking(False)
            self._open.append((time.monotonic(), sock))
        return complaints


class Fuzzer:
    def __init__(self, path: Path, seed: str, foreign: list[bytes]) -> None:
        self._path = path
        self._words = Words(seed, foreign)
        self._name = f"fuzz-{seed}"
        self._silence = Silence(path)
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._complaints: list[str] = []
        self._connections = 0
        self._said = 0  # frames told of already

    def run(self, frames: int) -> None:
        told, talks = time.monotonic(), [self._begin(number) for number in range(_AT_A_TIME)]
        while self._said + self._wrongs() < frames:
            self._wait(talks)
            for number, talk in enumerate(talks):
                if talk.is_over:
                    self._end(talk)
                    talks[number] = self._begin(number)
            if time.monotonic() > told + 0.3:
                told = time.monotonic()
                self._complaints += self._silence.tend()
                self._tell()
        for talk in talks:
            while not talk.is_over:
                self._wait([talk])
            self._end(talk)
        self._tell()

    def _begin(self, number: int) -> Talk:
        """A session of its own: a process that attaches twice as the same rank ends its first connection.

        Its name is more than a few flipped bits away from all others, or mutated words would do just that.
        """
        session = hashlib.blake2b(f"{self._name}/{number}".encode(), digest_size=8).hexdigest()
        return Talk(self._path, self._words.act(session), self._words)

    def _wait(self, talks: list[Talk]) -> None:
        poll, by_fd = select.poll(), {talk.sock.fileno(): talk for talk in talks}
        for fd, talk in by_fd.items():
            poll.register(fd, talk.events)
        for fd, _ in poll.poll(1000):
            by_fd[fd].go_on()

    def _end(self, talk: Talk) -> None:
        self._complaints += talk.judge(self._outcomes)
        self._connections += 1

    def _wrongs(self) -> int:
        return sum(count for (kind, _), count in self._outcomes.items() if kind not in PROPER)

    def _tell(self) -> None:
        outcomes = [(kind, outcome, count) for (kind, outcome), count in self._outcomes.items()]
        silent, self._silence.ended = self._silence.ended, 0
        progress = Progress(self._connections, silent, outcomes, self._complaints[:20])
        self._said += self._wrongs()
        self._outcomes.clear()
        self._complaints, self._connections = [], 0
        os.write(1, msgspec.json.encode(progress) + b"\n")


def main() -> None:
    path, seed, frames, *foreign = sys.argv[1:]
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    Fuzzer(Path(path), seed, [bytes.fromhex(one) for one in foreign]).run(int(frames))


if __name__ == "__main__":
    main()
