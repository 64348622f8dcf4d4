"""What each operation does: from wire messages to the ledger and back.

One method per operation; it returns a result, or raises a CellarError that becomes a Failure. Reserve may
have to wait (for memory to be allocated), and a Clear of much takes its time, so these may return a task.
Knows nothing of sockets or frames.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from kvcellar.arena import RackKey
from kvcellar.errors import BadRequest, Draining, Forbidden, NotAttached, UnknownNamespace
from kvcellar.identity import ChunkKey, NamespaceId, slot_bytes
from kvcellar.ledger import NO_LEASE, LeaseId, Ledger
from kvcellar.ledger import Granted as Grant
from kvcellar.server.grants import pack_places
from kvcellar.server.members import Member, Members
from kvcellar.server.prefetch import UNKNOWN, Outlook, Prefetch
from kvcellar.server.steward import Steward
from kvcellar.server.sweep import sweep
from kvcellar.wire import messages as m
from kvcellar.wire.report import StatusReport

# A reserve waits for memory this long at most: its engine has better things to do, and eviction may do as
# well.
_GROWTH_WAIT_S = 1.0


class Caller:
    """Who asks: an attached member, or an administrator; and whether the server is his."""

    def __init__(self, role: str, member: Member | None, *, owns: bool = False) -> None:
        self.role = role
        self._owns = owns
        self._member = member

    @property
    def member(self) -> Member:
        if self._member is None:
            raise NotAttached("only schedulers and workers can do that")
        return self._member

    def count_message(self) -> None:
        if self._member is not None:
            self._member.session.counts["messages"] += 1

    def detach(self) -> None:
        """It has left: what it might still say holds nothing."""
        self._member = None

    def require_admin(self) -> None:
        if self.role != "admin":
            raise Forbidden("only an admin connection can do that")

    def require_owner(self) -> None:
        """For what others would feel: --allow-uids lets engines in, and those who look."""
        self.require_admin()
        if not self._owns:
            raise Forbidden("only the server's own user and root can do that")


class Operations:
    def __init__(
        self, ledger: Ledger, members: Members, steward: Steward, report: Callable[[], StatusReport]
    ) -> None:
        self.draining = False
        self.prefetch: Prefetch | None = None  # without tiers there is none
        self._ledger = ledger
        self._members = members
        self._steward = steward
        self._report = report
        self._reserving: dict[Member, asyncio.Task[m.Message]] = {}  # the last that waits, of each
        self._settles = {m.Release: ledger.release, m.Commit: ledger.commit, m.Abort: ledger.abort}
        self._handlers: dict[type[m.Message], Callable[[Caller, Any], m.Message | Awaitable[m.Message]]] = {
            m.Ping: lambda _caller, _op: m.Pong(),
            m.Register: self._register,
            m.Lookup: self._lookup,
            m.Expect: self._expect,
            m.Abandon: self._abandon,
            m.Release: self._settle,
            m.Commit: self._settle,
            m.Abort: self._settle,
            m.Condemn: self._condemn,
            m.Unmapped: self._unmapped,
            m.Leave: self._leave,
            m.Status: self._status,
            m.Clear: self._clear,
            m.Pin: self._pin,
        }

    def perform(self, caller: Caller, op: m.Operation, patience: float) -> m.Message | Awaitable[m.Message]:
        """`patience`: seconds after which the caller has no use for an answer."""
        if isinstance(op, m.Reserve):
            return self._reserve(caller, op, patience)
        return self._handlers[type(op)](caller, op)

    def _register(self, caller: Caller, op: m.Register) -> m.Message:
        member, namespace = caller.member, op.namespace
        self._refuse_when_draining()
        if member.rank >= namespace.parallel.world_size:
            raise BadRequest(f"rank {member.rank} registers for a world of {namespace.parallel.world_size}")
        self._steward.check_fits(namespace)
        if namespace.id not in self._ledger.rooms:
            self._steward.close_rooms()
        room = self._ledger.register(member.session, member.rank, namespace)
        for group in range(len(namespace.groups)):
            self._steward.grow(room, group, 1)
        sizes = tuple(slot_bytes(namespace, group) for group in range(len(namespace.groups)))
        racks = tuple((group, rack) for group, shelf in enumerate(room.shelves) for rack in shelf.tables)
        return m.Registered(namespace.id, namespace.chunk_tokens, sizes, racks)

    def _lookup(self, caller: Caller, op: m.Lookup) -> m.Message:
        self._refuse_when_draining()
        member, keys = caller.member, m.split_keys(op.keys)
        grant = self._ledger.lookup(member.session, NamespaceId(op.namespace), keys)
        if self.prefetch is None or grant.reason or grant.chunks == len(keys):
            return self._granted(grant)
        namespace, wait_s = NamespaceId(op.namespace), op.wait_ms / 1000
        ticket, outlook = self.prefetch.begin(member, namespace, keys, grant, wait_s)
        return self._granted(grant, ticket, outlook)

    def _expect(self, caller: Caller, op: m.Expect) -> m.Message:
        self._refuse_when_draining()
        member, keys, nothing = caller.member, m.split_keys(op.keys), Grant(NO_LEASE, 0, [])
        if self.prefetch is None or op.namespace not in member.session.namespaces:
            return self._granted(nothing)
        wait_s = op.wait_ms / 1000
        return self._granted(nothing, *self.prefetch.expect(member, NamespaceId(op.namespace), keys, wait_s))

    def _abandon(self, caller: Caller, op: m.Abandon) -> m.Message:
        if self.prefetch is not None:
            self.prefetch.abandon(caller.member, op.ticket)
        return m.Settled(0)

    def _reserve(self, caller: Caller, op: m.Reserve, patience: float) -> m.Message | Awaitable[m.Message]:
        self._refuse_when_draining()
        member, keys = caller.member, m.split_keys(op.keys)
        # In the order in which it asks: what overtakes the reserve of its own parent is an orphan.
        earlier = self._reserving.get(member)
        if earlier is None and not self._growth(op, len(keys)):
            return self._reserve_now(member, op, keys)
        later = self._reserve_later(member, op, keys, min(patience, _GROWTH_WAIT_S), earlier)
        task = self._reserving[member] = asyncio.get_running_loop().create_task(later)
        task.add_done_callback(lambda done: self._reserved(member, done))
        return task

    def _reserved(self, member: Member, task: "asyncio.Task[m.Message]") -> None:
        if self._reserving.get(member) is task:
            del self._reserving[member]

    def _reserve_now(self, member: Member, op: m.Reserve, keys: list[ChunkKey]) -> m.Message:
        parent = ChunkKey(op.parent) if op.parent is not None else None
        grant = self._ledger.reserve(member.session, NamespaceId(op.namespace), keys, parent, op.groups)
        return self._granted(grant)

    async def _reserve_later(
        self,
        member: Member,
        op: m.Reserve,
        keys: list[ChunkKey],
        patience: float,
        earlier: "asyncio.Task[m.Message] | None",
    ) -> m.Message:
        give_up = time.monotonic() + patience
        if earlier is not None:
            await asyncio.wait([earlier], timeout=patience)
        while (growth := self._growth(op, len(keys))) and (left := give_up - time.monotonic()) > 0:
            await asyncio.wait(growth, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not self._members.is_reachable(member):
            raise NotAttached("the client went away while memory was being allocated")
        return self._reserve_now(member, op, keys)

    def _growth(self, op: m.Reserve, stripes: int) -> list[asyncio.Task[None]]:
        room = self._ledger.rooms.get(NamespaceId(op.namespace))
        if room is None:
            raise UnknownNamespace("register the namespace first")
        groups = range(len(room.shelves)) if op.groups is None else op.groups
        tasks = (self._steward.grow(room, group, stripes) for group in groups if group < len(room.shelves))
        return [task for task in tasks if task is not None]

    def _settle(self, caller: Caller, op: m.Release | m.Commit | m.Abort) -> m.Message:
        member, settle = caller.member, self._settles[type(op)]
        return m.Settled(settle(member.session, member.rank, LeaseId(op.lease), op.first, op.stop))

    def _condemn(self, caller: Caller, op: m.Condemn) -> m.Message:
        member = caller.member
        gone = self._ledger.condemn(member.session, member.rank, LeaseId(op.lease), op.group, op.chunk)
        return m.Settled(gone)

    def _unmapped(self, caller: Caller, op: m.Unmapped) -> m.Message:
        self._members.unmapped(caller.member, RackKey(NamespaceId(op.namespace), op.group, op.rack))
        return m.Settled(0)

    def _leave(self, caller: Caller, _op: m.Leave) -> m.Message:
        self._members.end(caller.member)
        caller.detach()
        return m.Settled(0)

    def _status(self, caller: Caller, _op: m.Status) -> m.Message:
        caller.require_admin()
        return m.Report(msgspec.Raw(msgspec.msgpack.encode(self._report())))

    def _clear(self, caller: Caller, op: m.Clear) -> m.Message | Awaitable[m.Message]:
        caller.require_owner()
        count = self._ledger.clear(NamespaceId(op.namespace) if op.namespace is not None else None)
        if self._ledger.sweep():
            return asyncio.get_running_loop().create_task(self._cleared(count))
        return m.Settled(count)  # that was all: answered in its turn, as anything else

    async def _cleared(self, count: int) -> m.Message:
        await sweep(self._ledger)
        return m.Settled(count)

    def _pin(self, caller: Caller, op: m.Pin) -> m.Message:
        caller.require_owner()
        self._ledger.set_pinned(NamespaceId(op.namespace), op.pinned)
        return m.Settled(0)

    @staticmethod
    def _granted(grant: Grant, ticket: int = 0, outlook: Outlook = UNKNOWN) -> m.Granted:
        lead_us, chunk_us = (min(int(seconds * 1e6), m.MAX_OUTLOOK_US) for seconds in outlook)
        places = pack_places(grant)
        return m.Granted(grant.lease, grant.chunks, places, grant.reason, ticket, lead_us, chunk_us)

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise Draining("the server is shutting down")
