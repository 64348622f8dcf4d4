"""Where the kernel cannot tell who lives, or who is who."""

import asyncio
import os
import socket

import pytest

from kvcellar.errors import Forbidden
from kvcellar.ledger import Ledger
from kvcellar.server import members
from kvcellar.wire import peer
from tests.server.raw import hello


class NoLink:
    def send(self, _message): ...
    def close(self): ...


def test_without_a_pidfd_a_lost_connection_is_waited_out(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "QUARANTINE_S", 0.05)
    monkeypatch.setattr(peer, "_peer_pidfd", lambda _sock, _pid: None)

    async def live():
        ledger, link = Ledger(epoch=1, hold_limit=1 << 20), NoLink()
        everybody = members.Members(ledger, tmp_path / "roster")
        for _ in range(2):  # the second time as somebody who came back
            rank = everybody.attach(hello("worker"), peer.Peer(near), link)
            everybody.lost(rank, link)
            assert "raw" in ledger.sessions
        await asyncio.sleep(0.1)
        assert ledger.sessions == {}

    near, far = socket.socketpair()
    with near, far:
        asyncio.run(live())


def test_a_process_that_cannot_be_told_from_others_is_refused_with_advice(tmp_path, monkeypatch):
    """One in a pid namespace that the server cannot see, where a pidfd has no inode of its own."""
    monkeypatch.setattr(peer, "_is_of_pidfs", lambda _fd: False)
    monkeypatch.setattr(peer, "_credentials", lambda _sock: (0, os.geteuid()))

    async def meet():
        ledger = Ledger(epoch=1, hold_limit=1 << 20)
        everybody = members.Members(ledger, tmp_path / "roster")
        stranger = peer.Peer(near)
        for role in ("worker", "scheduler"):
            with pytest.raises(Forbidden, match="share a pid namespace"):
                everybody.attach(hello(role), stranger, NoLink())
        stranger.close()
        assert not ledger.sessions
        assert not everybody.all

    near, far = socket.socketpair()
    with near, far:
        asyncio.run(meet())
