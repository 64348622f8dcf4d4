"""A server that speaks RESP and says what it is told to: for faults that no real one can be brought to."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import BinaryIO


class Liar:
    """`reply(words)` is what it says to a command; None: it does not read on. Until it is told, it knows a
    PING, and itself as the whole cluster.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.slots = cluster((0, 16383, self.port))
        self.reply: Callable[[list[bytes]], bytes | None] = lambda words: b":0\r\n"
        self._open = set[socket.socket]()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    @property
    def connections(self) -> int:
        return len(self._open)

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.port}"

    def __enter__(self) -> "Liar":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads.pop(0).join()  # nobody comes in any more
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in (self._listener, *self._sockets):
            one.close()

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.add(client)
                self._sockets.append(client)
                self._run(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), client.makefile("rb") as asked:
            while words := _command(asked):
                match words[0]:
                    case b"PING":
                        reply: bytes | None = b"+PONG\r\n"
                    case b"CLUSTER":
                        reply = self.slots
                    case _:
                        reply = self.reply(words)
                if reply is None:
                    return
                client.sendall(reply)
        self._open.remove(client)


def _command(asked: BinaryIO) -> list[bytes]:
    words = []
    for _ in range(int(asked.readline()[1:])):
        size = int(asked.readline()[1:])
        words.append(asked.read(size + 2)[:size])
    return words


def cluster(*parts: tuple[int, int, int]) -> bytes:
    """The answer to CLUSTER SLOTS: first slot, last slot, port."""
    said = [
        b"*3\r\n:%d\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (first, last, port)
        for first, last, port in parts
    ]
    return b"*%d\r\n" % len(said) + b"".join(said)
