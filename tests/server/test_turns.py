"""One connection with much to say, on a real socket and by a clock that only its messages move."""

import asyncio
import socket

import pytest

from kvcellar.server.connection import Connection
from kvcellar.server.operations import Caller
from kvcellar.wire import Peer, client_reader, encode
from kvcellar.wire import messages as m
from tests.server.raw import hello

MESSAGES = 200


class Busy:
    """Operations that take their time. Notes how many were done before the others had their turn."""

    def __init__(self, now: float, takes: float) -> None:
        self.now = now
        self.turns = [0]
        self._takes = takes

    def perform(self, *_: object) -> m.Message:
        self.now += self._takes
        self.turns[-1] += 1
        return m.Pong()

    async def done(self) -> None:
        while sum(self.turns) < MESSAGES:
            await asyncio.sleep(0)
            self.turns.append(0)


@pytest.mark.parametrize(("takes", "most"), [(0.0, 64), (0.003, 2), (1.0, 1)])
def test_the_others_have_their_turn_after_some_messages_or_some_time(takes, most, monkeypatch):
    ours, theirs = socket.socketpair()

    async def talk() -> Busy:
        loop = asyncio.get_running_loop()
        busy = Busy(loop.time(), takes)
        monkeypatch.setattr(loop, "time", lambda: busy.now)
        connection = Connection(
            Peer(ours),
            busy,  # type: ignore[arg-type]
            lambda *_: (Caller("admin", None), m.Welcome(m.PROTOCOL_VERSION, 1, "")),
            lambda lost: lost.peer.close(),
        )
        await loop.connect_accepted_socket(lambda: connection, ours)
        requests = [m.Request(number, 1000, (m.Ping(),)) for number in range(MESSAGES)]
        theirs.sendall(b"".join(map(encode, [hello(), *requests])))
        await busy.done()
        connection.close()
        return busy

    with theirs:
        busy = asyncio.run(talk())
        reader = client_reader()
        while data := theirs.recv(1 << 16):
            reader.feed(data)
    assert max(busy.turns) == most
    welcome, *replies = reader.messages()
    assert isinstance(welcome, m.Welcome)
    assert replies == [m.Reply(number, (m.Pong(),)) for number in range(MESSAGES)]
