"""Link: one control connection from an engine's side, with a deadline on everything.

Plain blocking sockets and no thread of its own: the caller's thread sends and reads, so a round trip costs no
hand-over. Any trouble raises Unavailable, a refusal raises what the server said, and after either the link is
of no more use. Knows nothing of leases.
"""

import contextlib
import itertools
import math
import select
import socket
import time
from pathlib import Path
from typing import TypeVar

from kvcellar.client.dial import dial
from kvcellar.errors import BadRequest, CellarError, DeadlineExceeded, Disconnected, from_code
from kvcellar.sketch import Sketch
from kvcellar.wire import CONTROL, FrameReader, client_reader, encode
from kvcellar.wire import messages as m

# Below malloc's mmap threshold: a buffer of 256 KiB can cost two system calls and page faults, 18 us a time.
_RECEIVE = 1 << 16

_ids = itertools.count(1)

_Wanted = TypeVar("_Wanted", bound=m.Message)


class Link:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.epoch = 0
        self.newest_lease = 0
        self.has_tiers = False
        self.sketch: Sketch | None = None  # of what the server's memory may hold
        self.silent_since = 0.0  # time.monotonic(); 0: nothing is asked that it has not answered
        self._poll = select.poll()
        self._reader: FrameReader[m.FromServer] = client_reader()
        self._backlog: list[m.FromServer] = []  # arrived beside what a `call` waited for

    @classmethod
    def open(cls, path: Path, hello: m.Hello, timeout: float) -> "Link":
        deadline = time.monotonic() + timeout
        try:
            sock = dial(path, timeout)
        except OSError as error:
            raise Disconnected(f"no server on {path}: {error.strerror or error}") from None
        except Disconnected as error:
            raise Disconnected(f"{path} is not to be trusted: {error}") from None
        link = cls(sock)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused already: it says why
                sock.sendall(CONTROL + encode(hello))
            # From here on poll() does the waiting: settimeout() would cost a system call at every change.
            sock.setblocking(False)
            link._poll.register(sock, select.POLLIN)
            answer = link.receive_one(deadline)
            if not isinstance(answer, m.Welcome):
                raise Disconnected(f"it began with {type(answer).__name__}")
            link.epoch, link.newest_lease = answer.epoch, answer.newest_lease
            link.has_tiers = answer.has_tiers
        except OSError as error:
            link.close()
            raise Disconnected(f"no server on {path}: {error.strerror or error}") from None
        except (Disconnected, DeadlineExceeded) as error:
            link.close()
            raise type(error)(f"no kvcellar server answers on {path}: {error}") from None
        except CellarError:
            link.close()
            raise
        return link

    def close(self) -> None:
        self.sock.close()

    def send(self, ops: tuple[m.Operation, ...], timeout: float) -> int:
        """Send a request and return its id. A server that takes no more bytes is as good as none."""
        request_id = next(_ids)
        frame = encode(m.Request(request_id, max(1, int(timeout * 1000)), ops))
        try:
            sent = self._send_some(frame)
            if sent < len(frame):
                self._send_rest(memoryview(frame)[sent:], timeout)
        except OSError as error:
            # The frame may be out in part: nothing sensible can follow it.
            raise Disconnected(f"the server went away: {error}") from None
        return request_id

    def _send_some(self, frame: bytes) -> int:
        try:
            return self.sock.send(frame)
        except BlockingIOError:
            return 0

    def _send_rest(self, rest: memoryview, timeout: float) -> None:
        """The socket's buffer is full: wait for the server to read, but not forever."""
        self.sock.settimeout(timeout)
        try:
            self.sock.sendall(rest)
        finally:
            self.sock.setblocking(False)

    def receive(self, deadline: float) -> list[m.FromServer]:
        """Whatever has arrived, waiting until the deadline for the first message. Empty if there is none by
        then.
        """
        messages = self._take()
        while not messages:
            left = deadline - time.monotonic()
            if not self._read(max(0.0, left)) and left <= 0:
                return []
            messages = self._take()
        return messages

    def receive_one(self, deadline: float) -> m.FromServer:
        messages = self.receive(deadline)
        if not messages:
            raise DeadlineExceeded("no answer in time")
        return messages[0]

    def call(self, op: m.Operation, timeout: float, wanted: type[_Wanted]) -> _Wanted:
        """One operation, one result. What else arrives meanwhile is kept for `receive`."""
        deadline = time.monotonic() + timeout
        request_id = self.send((op,), timeout)
        beside: list[m.FromServer] = []
        result: m.Result | None = None
        while result is None:
            messages = self.receive(deadline)
            if not messages:
                raise DeadlineExceeded("no answer in time")
            for message in messages:
                if isinstance(message, m.Reply) and message.id == request_id:
                    result = message.results[0]
                else:
                    beside.append(message)
        self._backlog = beside
        answer = checked(result)
        if not isinstance(answer, wanted):
            raise Disconnected(f"the server answered {type(answer).__name__} to {type(op).__name__}")
        return answer

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def _take(self) -> list[m.FromServer]:
        backlog, self._backlog = self._backlog, []
        try:
            messages = backlog + list(self._reader.messages())
        except BadRequest as error:
            raise Disconnected(f"the server sent nonsense: {error}") from None
        for message in messages:
            if isinstance(message, m.Refused):
                raise from_code(message.code, message.message)
        return messages

    def _read(self, timeout: float) -> bool:
        if not self._poll.poll(math.ceil(timeout * 1000)):
            return False
        try:
            data = self.sock.recv(_RECEIVE)
        except OSError as error:
            raise Disconnected(f"the server went away: {error}") from None
        if not data:
            raise Disconnected("the server closed the connection")
        self._reader.feed(data)
        return True


def checked(result: m.Result) -> m.Result:
    if isinstance(result, m.Failure):
        raise from_code(result.code, result.message)
    return result
