"""A tap between an engine and its server: passes everything on, descriptors too, and notes what is said.

A test can have something done at a chosen moment (`before_reply`), or descriptors held back. To the server
the tap is the engine's process; that is all it changes.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from kvcellar.wire import CONTROL, client_reader, server_reader
from kvcellar.wire import messages as m

_READ = 1 << 16


class Said(NamedTuple):
    """One message of the engine's."""

    role: str  # "scheduler", "worker", "admin"
    message: m.FromClient


class Tap:
    """In use, from `with` to its end, at `path`."""

    def __init__(self, path: Path, server: Path) -> None:
        self.path = path
        self.said: list[Said] = []
        self.raw = bytearray()  # all that crossed the control connections, both ways
        self.before_reply: Callable[[str, m.Reply], None] = lambda role, reply: None
        self.holds_descriptors = False
        self._server = server
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._open: list[socket.socket] = [self._listener]

    def __enter__(self) -> Self:
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        _start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sock in self._open:
            _hang_up(sock)

    def requests(self, role: str) -> list[m.Request]:
        return [
            said.message for said in self.said if said.role == role and isinstance(said.message, m.Request)
        ]

    def forget(self) -> None:
        self.said.clear()
        self.raw.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed: the test is over
            while True:
                engine, _ = self._listener.accept()
                self._open.append(engine)
                _start(self._join, engine)

    def _join(self, engine: socket.socket) -> None:
        kind = engine.recv(1)
        if kind != CONTROL and self.holds_descriptors:
            return  # open and silent
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._open.append(server)
        try:
            server.connect(str(self._server))
            server.sendall(kind)
        except OSError:  # no server: the engine must see that too
            _hang_up(engine)
            return
        stream = _Stream(self) if kind == CONTROL else None
        _start(_pass_on, engine, server, stream.hear_engine if stream else None)
        _start(_pass_on, server, engine, stream.hear_server if stream else None)


class _Stream:
    """Both ways of one control connection."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._role = ""
        self._engine = server_reader()
        self._server = client_reader()

    def hear_engine(self, data: bytes) -> None:
        self._tap.raw += data
        self._engine.feed(data)
        for message in self._engine.messages():
            if isinstance(message, m.Hello):
                self._role = message.role
            self._tap.said.append(Said(self._role, message))

    def hear_server(self, data: bytes) -> None:
        self._tap.raw += data
        self._server.feed(data)
        for message in self._server.messages():
            if isinstance(message, m.Reply):
                self._tap.before_reply(self._role, message)


def _pass_on(source: socket.socket, target: socket.socket, hear: Callable[[bytes], None] | None) -> None:
    with contextlib.suppress(OSError):
        while True:
            data, descriptors, _, _ = socket.recv_fds(source, _READ, 4)
            if not data:
                break
            if hear is not None:
                hear(data)
            _send(target, data, descriptors)
    _hang_up(source)
    _hang_up(target)


def _send(target: socket.socket, data: bytes, descriptors: list[int]) -> None:
    try:
        sent = socket.send_fds(target, [data], descriptors) if descriptors else 0
    finally:
        for descriptor in descriptors:
            socket.close(descriptor)
    target.sendall(data[sent:])


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # wakes whoever reads it
    sock.close()


def _start(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()
