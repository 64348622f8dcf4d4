"""What the processes of a run tell each other: jobs from scheduler to rank, news to whoever directs the run.

One JSON message a line.
"""

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

# How late an answer may be on a machine with more processes than cores, which others may hold up, too.
SLACK_S = 5.0

S = TypeVar("S", bound=msgspec.Struct)


class Job(msgspec.Struct):
    """What a rank shall copy: all of `keys`, at the places of a lease, `places[group][chunk]`."""

    writing: bool
    lease: int
    keys: list[str]
    places: list[list[int]]


class Done(msgspec.Struct):
    rank: int
    lease: int
    stored: bool = False  # all of it, and the server has said so


class Late(msgspec.Struct):
    """A call that took longer than it may; whoever knows when the process was stopped decides."""

    call: str
    began: float
    ended: float
    limit: float


class News(msgspec.Struct, omit_defaults=True):
    counts: dict[str, int] = {}
    stored: list[str] = []  # chunk keys
    late: list[Late] = []
    wrong: list[str] = []  # what was loaded and is not the truth
    broken: list[str] = []  # promises of the clients that were not kept
    idle: bool = False  # told to stop asking, and nothing is under way any more


class Reporter:
    """Collects what happened in this process and prints it now and then. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._news = News()
        self._next = 0.0

    def count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)

    def stored(self, keys: list[str]) -> None:
        with self._lock:
            self._news.stored += keys

    def wrong(self, what: str) -> None:
        with self._lock:
            self._news.wrong.append(what)
        self.publish()

    def broken(self, what: str) -> None:
        with self._lock:
            self._news.broken.append(what)

    @contextmanager
    def timed(self, call: str, limit: float) -> Iterator[None]:
        """Counts a request and notices when it comes back after its limit."""
        began = time.monotonic()
        yield
        ended = time.monotonic()
        with self._lock:
            self._counts["requests"] += 1
            if ended - began > limit + SLACK_S:
                self._news.late.append(Late(call, began, ended, limit))

    def publish_sometimes(self) -> None:
        if time.monotonic() >= self._next:
            self.publish()

    def publish(self, *, idle: bool = False) -> None:
        with self._lock:
            self._next = time.monotonic() + 0.2
            self._news.counts, self._news.idle = dict(self._counts), idle
            line = msgspec.json.encode(self._news) + b"\n"
            self._counts.clear()
            self._news = News()
        os.write(1, line)  # whole, and at once: a kill must not cut it in two


class Lines:
    """Messages over a stream socket, one a line."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._rest = b""

    def send(self, *messages: msgspec.Struct) -> bool:
        """False when there is nobody at the other end any more."""
        try:
            self.sock.sendall(b"".join(msgspec.json.encode(message) + b"\n" for message in messages))
        except ConnectionError:
            return False
        return True

    def receive(self, kind: type[S]) -> list[S] | None:
        """What one read brings; None at the end of the stream."""
        try:
            data = self.sock.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [msgspec.json.decode(line, type=kind) for line in lines]
