"""A connection without manners: says whatever it is told to, in any order."""

import itertools
import socket
from pathlib import Path

from kvcellar.client import Grant
from kvcellar.client.grants import granted
from kvcellar.identity import Namespace
from kvcellar.wire import CONTROL, client_reader, encode
from kvcellar.wire import messages as m
from tests.server.engine import PATIENCE
from tests.support import keys


class Raw:
    def __init__(self, path: Path, hello: m.Hello | None = None) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(str(path))
        self._reader = client_reader()
        self._arrived: list[m.FromServer] = []
        self._ids = itertools.count(1)
        self.sock.sendall(CONTROL)
        if hello is not None:
            self.say(hello)
            assert isinstance(self.hear(), m.Welcome)

    def say(self, *messages: m.Message) -> None:
        self.sock.sendall(b"".join(map(encode, messages)))

    def hear(self) -> m.FromServer | None:
        """The next message; None when the server has closed the connection."""
        while not self._arrived:
            data = self.sock.recv(1 << 16)
            if not data:
                return None
            self._reader.feed(data)
            self._arrived += self._reader.messages()
        return self._arrived.pop(0)

    def ask(self, *ops: m.Operation) -> tuple[m.Result, ...]:
        """One request; what is pushed before the reply is dropped."""
        request_id = next(self._ids)
        self.say(m.Request(request_id, 10_000, ops))
        while not isinstance(message := self.hear(), m.Reply):
            assert message is not None, "closed instead of answered"
        assert message.id == request_id
        return message.results

    def refusal(self) -> str:
        """The code with which the server closes this connection."""
        message = self.hear()
        assert isinstance(message, m.Refused), message
        assert self.hear() is None
        return message.code

    def close(self) -> None:
        self.sock.close()

    # -- a scheduler's or worker's words -----------------------------------------------------------------

    def register(self, namespace: Namespace) -> m.Result:
        return self.ask(m.Register(namespace))[0]

    def lookup(self, namespace: Namespace, count: int, seed: int = 0) -> Grant:
        return granted(self.ask(m.Lookup(namespace.id, b"".join(keys(count, seed))))[0])

    def reserve(self, namespace: Namespace, count: int, seed: int = 0) -> Grant:
        return granted(self.ask(m.Reserve(namespace.id, b"".join(keys(count, seed))))[0])


def hello(role: str = "scheduler", session: str = "raw", rank: int = 0, **more: object) -> m.Hello:
    return m.Hello(m.PROTOCOL_VERSION, role, session, rank, **more)  # type: ignore[arg-type]
