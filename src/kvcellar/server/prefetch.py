"""Prefetch: a lookup has had what memory holds; what tiers hold beyond that is brought up, and then pushed.

    lookup --answered at once--> the part in memory, and a ticket
           `--> which of the rest do tiers have? --> read it, chunk after chunk --> Brought(ticket, whole hit)

The wait ends when all that can be had is there, at the first chunk that cannot be had, or at the client's
deadline, with as much as has come by then. What was brought is pinned by the server until the waiting lookup
has its lease. An object that several wait for is read once. A place that an engine of storage may still write
to is given to nobody, however long that takes: only the waiting has a deadline.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import NamedTuple

from kvcellar.identity import ChunkKey, NamespaceId, fold_windows, needed_chunks
from kvcellar.ledger import NO_LEASE, SCHEDULER, Granted, Ledger, Shelf, Stripe
from kvcellar.server.fetch import Fetch, Fetches
from kvcellar.server.grants import pack_places
from kvcellar.server.members import Member, Members
from kvcellar.server.objects import Goods
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
# Stripes that one lookup has on their way at once: enough to keep every thread of a tier busy.
_AT_ONCE = 8
# Chunks about which tiers are asked in one message.
_BATCH = 128
# A tier that does not even say what it has within this, or ten times what it usually takes, is passed over.
_SAY_S = 0.05


class Wait:
    """One lookup that waits. Holds pins on all it will be granted."""

    def __init__(
        self, ticket: int, member: Member, goods: Goods, keys: Sequence[ChunkKey], had: int, deadline: float
    ) -> None:
        self.ticket = ticket
        self.member = member
        self.goods = goods
        self.keys = keys
        self.had = had  # chunks that memory had
        self.deadline = deadline  # on the monotonic clock
        self.holds: list[tuple[Shelf, Stripe]] = []
        self.fetches: set[Fetch] = set()
        self.silent: set[Tier] = set()  # did not answer in time
        self.task: asyncio.Task[None] | None = None
        self.abandoned = False

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


class Prefetch:
    def __init__(self, ledger: Ledger, members: Members, tiers: Sequence[Tier], fetches: Fetches) -> None:
        self.waits: dict[int, Wait] = {}
        self._ledger = ledger
        self._members = members
        self._tiers = tiers
        self._fetches = fetches
        self._tickets = itertools.count(1)

    def begin(
        self, member: Member, namespace_id: NamespaceId, keys: Sequence[ChunkKey], had: int, wait_s: float
    ) -> tuple[int, Outlook]:
        """See what tiers have beyond the first `had` chunks, if there is time. Returns a ticket, 0 if nobody
        will be asked, and what to expect.
        """
        room = self._ledger.rooms.get(namespace_id)
        readable = [tier for tier in self._tiers if tier.can_read]
        if room is None or not readable:
            return 0, UNKNOWN
        fastest = max(readable, key=lambda tier: tier.expected_rate)
        outlook = UNKNOWN
        if rate := fastest.expected_rate:
            outlook = Outlook(fastest.expected_lead_s, room.chunk_bytes / rate)
        of_one = sum(wait.member is member for wait in self.waits.values())
        if not wait_s or len(self.waits) >= _MAX_WAITS or of_one >= _MAX_OF_ONE:
            return 0, outlook
        goods = self._fetches.objects.goods(room)
        fits = max(0, self._ledger.hold_limit - member.session.held_bytes) // room.chunk_bytes
        if goods is None or fits <= had:
            return 0, outlook
        deadline = time.monotonic() + wait_s
        wait = Wait(next(self._tickets), member, goods, keys[:fits], had, deadline)
        self.waits[wait.ticket] = wait
        wait.task = asyncio.create_task(self._serve(wait))
        # Not a `finally` in there: a task that is cancelled before its first step never gets so far.
        wait.task.add_done_callback(lambda task: self._finish(wait, task))
        return wait.ticket, outlook

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
                await self._bring(wait)

    def _finish(self, wait: Wait, task: asyncio.Task[None]) -> None:
        """Grant what is there now, tell the scheduler, and let go."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a prefetch broke", exc_info=error)
        del self.waits[wait.ticket]
        for fetch in wait.fetches:
            fetch.waiting.discard(wait)
        if self._members.is_reachable(wait.member) and not wait.abandoned:
            granted = self._grant(wait) if wait.holds else Granted(NO_LEASE, 0, [])
            self._members.newest_lease = max(self._members.newest_lease, granted.lease)
            assert wait.member.link is not None
            places = pack_places(granted)
            wait.member.link.send(m.Brought(wait.ticket, granted.lease, granted.chunks, places))
        for shelf, stripe in wait.holds:
            self._ledger.own.unpin(shelf, stripe)
        wait.holds.clear()

    def _grant(self, wait: Wait) -> Granted:
        """The whole hit, or nothing if it is no longer than what memory had."""
        session = wait.member.session
        granted = self._ledger.find(session, wait.goods.namespace_id, wait.keys)
        gained = granted.chunks - wait.had
        if gained > 0:
            session.counts["hit_chunks"] += gained
            session.counts["tier_chunks"] += gained
            return granted
        if granted.lease:
            self._ledger.release(session, SCHEDULER, granted.lease, 0, granted.chunks)
        return Granted(NO_LEASE, 0, [])

    async def _bring(self, wait: Wait) -> None:
        room = wait.goods.room
        sources = await self._ask(wait)
        present = [
            [bool(found) for found in (sources.get((group, chunk)) for chunk in range(len(wait.keys)))]
            for group in range(len(room.shelves))
        ]
        reach = fold_windows(len(wait.keys), room.windows, lambda group, chunk: present[group][chunk])
        if reach <= wait.had:
            return
        # What memory had is pinned by the lookup's own lease, but where the windows lie has changed.
        needed = [
            range(wait.had, reach) if window is None else needed_chunks(reach, window)
            for window in room.windows
        ]
        coming: list[Awaitable[bool]] = []
        for chunk in range(reach):
            for group in range(len(room.shelves)):
                if chunk not in needed[group]:
                    continue
                if not self._members.is_reachable(wait.member):
                    return  # nobody is left to be told
                if len(coming) >= _AT_ONCE and not await coming.pop(0):
                    return
                one = self._fetches.want(wait, group, chunk, sources[group, chunk])
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
                    stripe = shelf.get(wait.keys[chunk])
                    if stripe is None or not stripe.ready:
                        missing.append((group, chunk))
                    else:
                        known[group, chunk] = list(self._tiers)
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
            answer = tier.exist(names, wait.deadline)
            await asyncio.wait([answer], timeout=max(_SAY_S, 10 * tier.stats.latency_s))
            if not answer.done():
                wait.silent.add(tier)
                continue
            for at, there in zip(asked, answer.result(), strict=True):
                if there:
                    found[at] = list(self._tiers[number:])  # the farther ones, should this one fail
        return found
