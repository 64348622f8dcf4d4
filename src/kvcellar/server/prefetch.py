"""Prefetch: a lookup has had what memory holds; what tiers hold beyond that is brought up, and then pushed.

    lookup --answered at once--> the part in memory, and a ticket
           `--> which of the rest do tiers have? --> read it, chunk after chunk --> Brought(ticket, whole hit)
    expect --its turn comes--> the same, but nobody is told: it is kept for the lookup that will follow

The wait ends when all that can be had is there, at the first chunk that cannot be had, or at the client's
deadline, with as much as has come by then. What was brought is pinned by the server until the waiting lookup
has its lease. An object that several wait for is read once. A place that an engine of storage may still write
to is given to nobody, however long that takes: only the waiting has a deadline.

What is expected are requests in their engines' queues (line.py). No engine waits for them yet, so they stand
aside while a lookup waits.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Coroutine, Sequence
from typing import NamedTuple

from kvcellar.epoch import numbers
from kvcellar.identity import ChunkKey, NamespaceId, fold_windows, needed_chunks
from kvcellar.ledger import NO_LEASE, SCHEDULER, Granted, Ledger, Room, Session, Shelf
from kvcellar.server.fetch import Fetches
from kvcellar.server.grants import pack_places
from kvcellar.server.line import Line
from kvcellar.server.members import Member, Members
from kvcellar.server.wait import Wait
from kvcellar.tiers.tier import Tier
from kvcellar.wire import messages as m

log = logging.getLogger(__name__)


class Outlook(NamedTuple):
    """What a lookup can expect of tiers; both 0 if nobody knows."""

    lead_s: float  # until the first chunk may be there
    chunk_s: float  # for every chunk after that


UNKNOWN = Outlook(0.0, 0.0)

# Lookups that wait at the same time, in all and of one engine; one more is answered from memory alone.
_MAX_WAITS, _MAX_OF_ONE = 256, 64
# The same for what is expected; and for how long anything is.
_MAX_EXPECTED, _EXPECTED_OF_ONE = 1024, 256
_EXPECTED_S = 120.0
# How soon it is noticed that the engine which expects something is gone.
_LOOK_S = 1.0
# Stripes that one lookup has on their way at once: enough to keep every thread of a tier busy.
_AT_ONCE = 8
# Chunks about which tiers are asked in one message.
_BATCH = 128
# A tier that does not even say what it has is passed over after the longest of these: this, ten times what it
# usually takes, a tenth of the time that is left. Not sooner: a busy host has pauses too. One that never
# answered yet may have connections to make.
_SAY_S, _FIRST_SAY_S = 0.25, 1.0

_NOTHING = Granted(NO_LEASE, 0, [])

# A stripe to have in memory: its chunk, its group, and the tiers that may have it.
Needed = tuple[int, int, list[Tier]]


class Prefetch:
    def __init__(self, ledger: Ledger, members: Members, tiers: Sequence[Tier], fetches: Fetches) -> None:
        self.waits: dict[int, Wait] = {}
        self._ledger = ledger
        self._members = members
        self._tiers = tiers
        self._fetches = fetches
        self._tickets = numbers(ledger.epoch)  # an engine may still have one of an earlier server
        self._lines: dict[Room, Line] = {}  # as long as somebody stands in it
        self._quiet = asyncio.Event()  # no lookup waits
        self._quiet.set()

    def begin(
        self,
        member: Member,
        namespace_id: NamespaceId,
        keys: Sequence[ChunkKey],
        granted: Granted,
        wait_s: float,
    ) -> tuple[int, Outlook]:
        """See what tiers have beyond what was granted, if there is time. Returns a ticket, 0 if nobody will
        be asked, and what to expect.
        """
        room, outlook = self._look(namespace_id)
        if room is None or not wait_s or self._is_full(member, expected=False):
            return 0, outlook
        goods = self._fetches.objects.goods(room)
        fits = self._fitting(room, member.session, granted, len(keys))
        if goods is None or fits <= granted.chunks:
            return 0, outlook
        deadline = time.monotonic() + wait_s
        wait = Wait(next(self._tickets), member, goods, keys[:fits], granted, deadline)
        self._quiet.clear()
        self._start(wait, self._serve(wait))
        return wait.ticket, outlook

    def expect(
        self, member: Member, namespace_id: NamespaceId, keys: Sequence[ChunkKey], wait_s: float
    ) -> tuple[int, Outlook]:
        """A request will ask for these when its turn comes: have them in memory by then. `wait_s`: how long
        reading may take. Returns as `begin` does.
        """
        room, outlook = self._look(namespace_id)
        if room is None or not wait_s or self._is_full(member, expected=True):
            return 0, outlook
        goods = self._fetches.objects.goods(room)
        line = self._lines.get(room) or Line(room)
        if goods is None or not line.limit:
            return 0, outlook
        self._lines[room] = line
        wait = Wait(next(self._tickets), member, goods, keys[: line.limit], _NOTHING, 0.0, expected=True)
        self._start(wait, self._serve_expected(wait, line, wait_s))
        return wait.ticket, outlook

    def _look(self, namespace_id: NamespaceId) -> tuple[Room | None, Outlook]:
        """The room, if a tier can be read at all, and what to expect of the fastest."""
        room = self._ledger.rooms.get(namespace_id)
        readable = [tier for tier in self._tiers if tier.can_read]
        if room is None or not readable:
            return None, UNKNOWN
        fastest = max(readable, key=lambda tier: tier.expected_rate)
        if rate := fastest.expected_rate:
            return room, Outlook(fastest.expected_lead_s, room.chunk_bytes / rate)
        return room, UNKNOWN

    def _fitting(self, room: Room, session: Session, granted: Granted, most: int) -> int:
        """Chunks that an engine may hold in place of what it was granted, when the lookups for which it waits
        have all that they were promised.
        """
        promised = sum(wait.promised for wait in self.waits.values() if wait.member.session is session)
        return room.chunks_within(self._ledger.may_hold(session, granted.lease) - promised, most)

    def _is_full(self, member: Member, *, expected: bool) -> bool:
        alike = [wait for wait in self.waits.values() if wait.expected == expected]
        of_one = sum(wait.member is member for wait in alike)
        in_all, each = (_MAX_EXPECTED, _EXPECTED_OF_ONE) if expected else (_MAX_WAITS, _MAX_OF_ONE)
        return len(alike) >= in_all or of_one >= each

    def _start(self, wait: Wait, work: Coroutine[None, None, None]) -> None:
        self.waits[wait.ticket] = wait
        wait.task = asyncio.create_task(work)
        # Not a `finally` in there: a task that is cancelled before its first step never gets so far.
        wait.task.add_done_callback(lambda task: self._finish(wait, task))

    def abandon(self, member: Member, ticket: int) -> None:
        wait = self.waits.get(ticket)
        if wait is not None and wait.member is member and wait.task is not None:
            wait.abandoned = True
            wait.task.cancel()

    def close(self) -> None:
        for wait in list(self.waits.values()):
            if wait.task is not None:
                wait.task.cancel()

    # -- one lookup -------------------------------------------------------------------------------------

    async def _serve(self, wait: Wait) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait.left):
                needed = await self._plan(wait)
                shelves = wait.goods.room.shelves
                wait.promised = sum(shelves[group].stripe_bytes for _, group, _ in needed)
                await self._bring(wait, needed)

    async def _serve_expected(self, wait: Wait, line: Line, wait_s: float) -> None:
        """In its turn bring up what fits, and hold it until the request has asked, or is no more."""
        taken = 0
        try:
            async with asyncio.timeout(_EXPECTED_S):
                async with line.turn:
                    wait.deadline = time.monotonic() + wait_s
                    needed = await self._plan(wait)
                    if not needed or not self._members.is_reachable(wait.member):
                        return
                    taken = await line.take(1 + needed[-1][0])
                    wait.deadline = time.monotonic() + wait_s
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await self._bring(wait, [one for one in needed if one[0] < taken])
                wait.member.session.counts["expected_stripes"] += sum(one.is_here for one in wait.fetches)
                while self._members.is_reachable(wait.member):
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            pass  # whoever queues so long is served as if he came just now
        finally:
            line.leave(taken)

    def _finish(self, wait: Wait, task: asyncio.Task[None]) -> None:
        """Grant what is there now, tell the scheduler, and let go."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a prefetch broke", exc_info=error)
        del self.waits[wait.ticket]
        for fetch in wait.fetches:
            fetch.waiting.discard(wait)
        others, room = self.waits.values(), wait.goods.room
        if all(other.expected for other in others):
            self._quiet.set()
        if not any(other.expected and other.goods.room is room for other in others):
            self._lines.pop(room, None)
        if self._members.is_reachable(wait.member) and not (wait.abandoned or wait.expected):
            granted = self._grant(wait) if wait.holds else _NOTHING
            assert wait.member.link is not None
            places = pack_places(granted)
            wait.member.link.send(m.Brought(wait.ticket, granted.lease, granted.chunks, places))
        for shelf, stripe in wait.holds:
            self._ledger.own.unpin(shelf, stripe)
        wait.holds.clear()

    def _grant(self, wait: Wait) -> Granted:
        """The whole hit, or nothing if it is no longer than what memory had. The lookup's own lease is given
        back for it.
        """
        session = wait.member.session
        granted = self._ledger.find(session, wait.goods.namespace_id, wait.keys, wait.granted.lease)
        gained = granted.chunks - wait.had
        if gained > 0:
            session.counts["hit_chunks"] += gained
            session.counts["tier_chunks"] += gained
            return granted
        if granted.lease:
            self._ledger.release(session, SCHEDULER, granted.lease, 0, granted.chunks)
        return _NOTHING

    async def _plan(self, wait: Wait) -> list[Needed]:
        """What must be in memory for the longest hit that can be had. Nothing if that is what the lookup was
        granted, or, where one is only expected, if it would find it all.
        """
        room = wait.goods.room
        sources = await self._ask(wait)
        if not wait.expected:  # now it is known what others were promised since it began
            fits = self._fitting(room, wait.member.session, wait.granted, len(wait.keys))
            wait.keys = wait.keys[:fits]
        present = [
            [bool(found) for found in (sources.get((group, chunk)) for chunk in range(len(wait.keys)))]
            for group in range(len(room.shelves))
        ]
        reach = fold_windows(len(wait.keys), room.windows, lambda group, chunk: present[group][chunk])
        if reach <= wait.had:
            return []
        # What memory had is pinned by the lookup's own lease, but where the windows lie has changed.
        ranges = [
            range(wait.had, reach) if window is None else needed_chunks(reach, window)
            for window in room.windows
        ]
        needed = [
            (chunk, group, sources[group, chunk])
            for chunk in range(reach)
            for group in range(len(room.shelves))
            if chunk in ranges[group]
        ]
        is_here = all(_is_ready(room.shelves[group], wait.keys[chunk]) for chunk, group, _ in needed)
        return [] if wait.expected and is_here else needed

    async def _bring(self, wait: Wait, needed: list[Needed]) -> None:
        coming: list[Awaitable[bool]] = []
        for chunk, group, sources in needed:
            if wait.expected:
                await self._quiet.wait()
            if not self._members.is_reachable(wait.member):
                return  # nobody is left to be told
            if len(coming) >= _AT_ONCE and not await coming.pop(0):
                return
            one = self._fetches.want(wait, group, chunk, sources)
            if one is None:
                return
            coming.append(one)
        while coming and await coming.pop(0):
            pass

    async def _ask(self, wait: Wait) -> dict[tuple[int, int], list[Tier]]:
        """For every group and chunk up to the first gap: which tiers may have it. For what is in memory that
        is all of them, should it be gone when its turn comes.
        """
        room, known = wait.goods.room, {}
        for first in range(0, len(wait.keys), _BATCH):
            chunks = range(first, min(first + _BATCH, len(wait.keys)))
            missing = []
            for group, shelf in enumerate(room.shelves):
                for chunk in chunks:
                    if _is_ready(shelf, wait.keys[chunk]):
                        known[group, chunk] = list(self._tiers)
                    else:
                        missing.append((group, chunk))
            known |= await self._find(wait, missing)
            if any(
                (group, chunk) not in known
                for group, window in enumerate(room.windows)
                if window is None
                for chunk in chunks
            ):
                break
        return known

    async def _find(self, wait: Wait, missing: list[tuple[int, int]]) -> dict[tuple[int, int], list[Tier]]:
        found: dict[tuple[int, int], list[Tier]] = {}
        for number, tier in enumerate(self._tiers):
            asked = [at for at in missing if at not in found]
            if not asked or not tier.can_read or tier in wait.silent:
                continue
            names = [wait.goods.probe_name(group, wait.keys[chunk]) for group, chunk in asked]
            answer = tier.exist(names, lambda: wait.deadline)
            usual = 10 * tier.stats.latency_s or _FIRST_SAY_S
            await asyncio.wait([answer], timeout=max(_SAY_S, usual, wait.left / 10))
            if not answer.done():
                wait.silent.add(tier)
                continue
            for at, there in zip(asked, answer.result(), strict=True):
                if there:
                    found[at] = list(self._tiers[number:])  # the farther ones, should this one fail
        return found


def _is_ready(shelf: Shelf, key: ChunkKey) -> bool:
    stripe = shelf.get(key)
    return stripe is not None and stripe.ready
