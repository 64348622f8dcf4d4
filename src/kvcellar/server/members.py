"""Members: the processes behind sessions and ranks, and whether they live.

A member is a rank's process. It stays one when its connection is lost; it ends when the process is gone
(pidfd), when it says Leave, or, where the kernel gives no pidfd, a quarantine after its connection was lost.
Only then does the ledger free what it held.

The roster file remembers the processes for the next server: until each of them has attached again or died, or
the grace time is over, an engine may still be copying on the word of the earlier server.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from kvcellar.arena import RackKey
from kvcellar.errors import Forbidden, Overloaded, RankTaken, Unavailable, WrongOwner
from kvcellar.ledger import SCHEDULER, LeaseId, Ledger, Session
from kvcellar.server.sweep import sweep
from kvcellar.wire import Peer, Process, open_process
from kvcellar.wire.messages import Hello, Message

log = logging.getLogger(__name__)

# Longer than any copy takes: the only guess in the system, and only where the kernel cannot tell.
QUARANTINE_S = 30.0
# An engine's process is a few ranks. What it leaves behind stays as long as it lives, with a descriptor each.
MAX_OF_A_PROCESS = 256


class Entry(NamedTuple):
    """A line of the roster: a worker that may be copying on this server's word."""

    session: str
    rank: int
    process: Process

    def is_of(self, session: str, rank: int, process: Process) -> bool:
        return (self.session, self.rank) == (session, rank) and self.process.same_as(process)


class Link(Protocol):
    """A member's connection, as far as members need it."""

    def send(self, message: Message) -> None: ...

    def close(self) -> None: ...


class Member:
    def __init__(self, session: Session, rank: int, peer: Peer, label: str, link: Link) -> None:
        self.session = session
        self.rank = rank
        self.peer = peer
        self.label = label
        self.link: Link | None = link
        self.maps: set[RackKey] = set()  # slabs whose descriptor it was given


class Members:
    def __init__(self, ledger: Ledger, roster: Path) -> None:
        self.all: dict[tuple[str, int], Member] = {}
        self._ledger = ledger
        self._roster = roster
        self.changed: Callable[[], None] = lambda: None  # told when somebody left or gave up a mapping
        self._awaited: dict[Entry, int | None] = {}  # workers of an earlier server, with their pidfd
        self._listed: set[Entry] | None = None  # what the roster says; None: nobody knows
        self._loop = asyncio.get_running_loop()
        self._grace_timer: asyncio.TimerHandle | None = None
        self._sweeping: asyncio.Task[None] | None = None  # kept, or it might be collected

    # -- coming and going -------------------------------------------------------------------------------

    def attach(self, hello: Hello, peer: Peer, link: Link) -> Member:
        if not peer.process.same_as(peer.process):
            raise Forbidden(
                "the server cannot tell this process from others: let them share a pid namespace (docker run "
                "--pid=host), run the server outside of containers, or use Linux 6.9"
            )
        rank = SCHEDULER if hello.role == "scheduler" else hello.rank
        is_back = self._admit(hello.session, rank, peer)
        if rank != SCHEDULER:
            self._enlist(Entry(hello.session, rank, peer.process))
        session = self._ledger.join(hello.session, rank)
        if rank == SCHEDULER and is_back:  # another process does not know what ranks were told
            self._ledger.keep_leases(session, map(LeaseId, hello.leases))
        member = Member(session, rank, peer, hello.label, link)
        self.all[hello.session, rank] = member
        if peer.pidfd is not None:
            self._loop.add_reader(peer.pidfd, self._on_death, member)
        if rank != SCHEDULER:  # the scheduler side of the same process says nothing of copies under way
            self._settle_awaited(lambda entry: entry.is_of(hello.session, rank, peer.process))
        self.changed()
        return member

    def _admit(self, name: str, rank: int, peer: Peer) -> bool:
        """Refuse an intruder; make room if the rank's earlier process, or connection, is superseded. Returns
        whether it is the same process that comes back.
        """
        its = sum(member.peer.process.same_as(peer.process) for member in self.all.values())
        if its >= MAX_OF_A_PROCESS and (name, rank) not in self.all:
            raise Overloaded(f"this process is attached {its} times already")
        if any(member.peer.uid != peer.uid for (other, _), member in self.all.items() if other == name):
            raise WrongOwner(f"session {name} belongs to another user")
        known = self.all.get((name, rank))
        if known is None:
            return False
        if known.peer.is_gone():
            self.end(known)
            return False
        if not known.peer.process.same_as(peer.process):
            raise RankTaken(f"rank {rank} of session {name} is a live process, pid {known.peer.process.pid}")
        if known.link is not None:
            known.link.close()
        self._unwatch(known)
        return True

    def lost(self, member: Member, link: Link) -> None:
        """A connection is gone. That says nothing about the process, but one that holds nothing need not
        stay.
        """
        if self.all.get((member.session.name, member.rank)) is not member or member.link is not link:
            return
        member.link = None
        if member.peer.pidfd is None:
            self._loop.call_later(QUARANTINE_S, self._end_quarantine, member)
        elif not self._holds_something(member):
            self.end(member)

    def _holds_something(self, member: Member) -> bool:
        leases = member.session.leases.values()
        if member.rank == SCHEDULER:
            return bool(leases)
        return bool(member.maps) or any(lease.left.get(member.rank) for lease in leases)

    def end(self, member: Member) -> None:
        """The process is gone, or has left: free what it held."""
        key = (member.session.name, member.rank)
        if self.all.get(key) is not member:
            return
        del self.all[key]
        self._unwatch(member)
        self._ledger.part(member.session, member.rank)
        self._shorten_roster()
        self.changed()

    def _on_death(self, member: Member) -> None:
        who = "the scheduler" if member.rank == SCHEDULER else f"rank {member.rank}"
        log.info("%s of session %r is gone", who, member.session.name)
        link = member.link
        self.end(member)
        if link is not None:
            link.close()

    def _end_quarantine(self, member: Member) -> None:
        if member.link is None:
            self.end(member)

    def _unwatch(self, member: Member) -> None:
        if member.peer.pidfd is not None:
            self._loop.remove_reader(member.peer.pidfd)
        member.peer.close()

    # -- what others need to know -----------------------------------------------------------------------

    def tell(self, namespace: bytes, event: Message) -> None:
        """Send an event to every connected worker that uses a namespace."""
        for member in list(self.all.values()):
            if (
                member.link is not None
                and member.rank != SCHEDULER
                and namespace in member.session.namespaces
            ):
                member.link.send(event)

    def is_reachable(self, member: Member) -> bool:
        """Has it a connection, and is it the one that answers for its rank?"""
        known = self.all.get((member.session.name, member.rank))
        return known is member and member.link is not None

    def mapping(self, key: RackKey) -> list[Member]:
        return [member for member in self.all.values() if key in member.maps]

    def unmapped(self, member: Member, key: RackKey) -> None:
        member.maps.discard(key)
        self.changed()

    # -- after a restart --------------------------------------------------------------------------------

    def begin_grace(self, seconds: float) -> None:
        """Wait for the processes that an earlier server knew."""
        self._ledger.set_grace(True)
        entries = self._read_roster()
        if entries is None:
            entries = [Entry("", 0, Process(0, 0, 0))]  # somebody, of whom nothing is known
        else:
            self._listed = set(entries)
        for entry in entries:
            pidfd = open_process(entry.process.pid, entry.process.started) if entry.process.pid else None
            if pidfd is None and entry.process.pid:
                continue  # gone
            self._awaited[entry] = pidfd
            if pidfd is not None:
                self._loop.add_reader(pidfd, self._settle_awaited, entry.__eq__)
        self._grace_timer = self._loop.call_later(seconds, self._end_grace)
        if not self._awaited:
            self._end_grace()

    def _settle_awaited(self, is_settled: Callable[[Entry], bool]) -> None:
        """These hold nothing of an earlier server's any more: they attached again, or they are gone."""
        for entry in [entry for entry in self._awaited if is_settled(entry)]:
            pidfd = self._awaited.pop(entry)
            if pidfd is not None:
                self._loop.remove_reader(pidfd)
                os.close(pidfd)
        if not self._awaited:
            self._end_grace()

    def _end_grace(self) -> None:
        if self._grace_timer is None:
            return
        self._grace_timer.cancel()
        self._grace_timer = None
        self._settle_awaited(lambda _: True)
        self._ledger.set_grace(False)
        self._sweeping = self._loop.create_task(sweep(self._ledger))
        self._shorten_roster()

    def _enlist(self, newcomer: Entry) -> None:
        """Before it may copy on our word. It is not let in otherwise: a successor would not wait for it. Who
        is listed already can come back, even if nothing can be written.
        """
        if self._listed is not None and newcomer in self._listed:
            return
        try:
            self._write_roster(newcomer)
        except OSError as error:
            raise Unavailable(f"the server cannot write its roster: {error.strerror}") from None

    def _shorten_roster(self) -> None:
        """Whoever is listed in vain costs a successor a look."""
        try:
            self._write_roster()
        except OSError as error:
            log.warning("cannot write the roster: %s", error.strerror)

    def _write_roster(self, *newcomers: Entry) -> None:
        """It lies on a file system that may be full."""
        workers = {
            Entry(name, rank, member.peer.process)
            for (name, rank), member in self.all.items()
            if rank != SCHEDULER
        }
        workers |= {*self._awaited, *newcomers}
        if workers == self._listed:
            return
        draft = self._roster.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(workers))
        draft.replace(self._roster)
        self._listed = workers

    def _read_roster(self) -> list[Entry] | None:
        """None if it cannot be read."""
        try:
            return msgspec.json.decode(self._roster.read_bytes(), type=list[Entry])
        except FileNotFoundError:
            return []
        except msgspec.MsgspecError as error:
            log.warning("the roster cannot be read, waiting out the grace time: %s", error)
            return None
