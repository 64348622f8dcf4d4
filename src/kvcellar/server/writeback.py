"""Write-back: what engines committed goes to every tier that wants it, after the fact and as far as a tier
keeps up.

Nobody waits for it. Each tier has a queue of its own, in the order of prefixes and bounded: under pressure
the newest is dropped and counted, so what is kept of a prefix is its beginning. A stripe in the queue is not
protected; only while it is being written does a pin of the server's own keep it from eviction.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from kvcellar.errors import Corrupt
from kvcellar.ledger import Ledger, Room, Stripe
from kvcellar.server.objects import Goods, Objects
from kvcellar.tiers.admission import Event, WriteFilter
from kvcellar.tiers.tier import Tier

MAX_QUEUED = 8192
# Stripes on their way to one tier at once: two or three writers reach what a disk can do.
_AT_ONCE = 3


class _Item(NamedTuple):
    goods: Goods
    group: int
    stripe: Stripe


class Outbox:
    """The queue to one tier."""

    def __init__(self, tier: Tier, write_filter: WriteFilter) -> None:
        self.tier = tier
        self.write_filter = write_filter
        self.waiting: deque[_Item] = deque()
        self.running = 0
        self.dropped: Counter[str] = Counter()  # full, evicted, down, unlabelled, failed


class WriteBack:
    def __init__(
        self, ledger: Ledger, objects: Objects, tiers: Sequence[Tier], filters: Sequence[WriteFilter]
    ) -> None:
        self.outboxes = [Outbox(tier, chosen) for tier, chosen in zip(tiers, filters, strict=True)]
        self._ledger = ledger
        self._objects = objects

    def published(self, room: Room, group: int, stripes: Sequence[Stripe]) -> None:
        """An engine committed these, later chunks first."""
        for outbox, items in self._wanted(room, group, stripes, Event.STORED):
            self._add(outbox, items)

    def used(self, room: Room, group: int, stripes: Sequence[Stripe]) -> None:
        """An engine found these in memory, later chunks first. Most are there already: the tier is asked, so
        that what it counts as written was written.
        """
        for outbox, items in self._wanted(room, group, stripes, Event.USED):
            names = [item.goods.probe_name(group, item.stripe.key) for item in items]
            outbox.tier.exist(names).add_done_callback(partial(self._add_missing, outbox, items))

    def fill(self, goods: Goods, group: int, stripe: Stripe, tiers: Iterable[Tier]) -> None:
        """This came from a farther tier: the nearer ones should have it too."""
        chosen = list(tiers)
        for outbox in self.outboxes:
            if outbox.tier in chosen:
                self._add(outbox, [_Item(goods, group, stripe)])

    async def drain(self, is_over: Callable[[], bool]) -> None:
        """Write what is queued, unless it is over before."""
        while not is_over() and any(box.running or box.waiting for box in self.outboxes):
            await asyncio.sleep(0.01)

    def _wanted(
        self, room: Room, group: int, stripes: Sequence[Stripe], event: Event
    ) -> Iterator[tuple[Outbox, list[_Item]]]:
        goods = self._objects.goods(room)
        if goods is None:
            return
        salt = hash((goods.namespace_id, group))
        for outbox in self.outboxes:
            wants = outbox.write_filter.wants
            items = [_Item(goods, group, one) for one in reversed(stripes) if wants(one.key, event, salt)]
            if items:
                yield outbox, items

    def _add_missing(self, outbox: Outbox, items: list[_Item], found: asyncio.Future[list[bool]]) -> None:
        if not found.cancelled():
            self._add(outbox, (item for item, there in zip(items, found.result(), strict=True) if not there))

    def _add(self, outbox: Outbox, items: Iterable[_Item]) -> None:
        for item in items:
            if len(outbox.waiting) >= MAX_QUEUED:
                outbox.dropped["full"] += 1
            else:
                outbox.waiting.append(item)
        self._advance(outbox)

    def _advance(self, outbox: Outbox) -> None:
        while outbox.waiting and outbox.running < _AT_ONCE:
            if not outbox.tier.can_write:
                outbox.dropped["down"] += len(outbox.waiting)
                outbox.waiting.clear()
                return
            self._begin(outbox, outbox.waiting.popleft())

    def _begin(self, outbox: Outbox, item: _Item) -> None:
        goods, group, stripe = item
        if not (stripe.indexed and stripe.ready):
            outbox.dropped["evicted"] += 1
            return
        try:
            objects = self._objects.of_stripe(goods, group, stripe.key, stripe.place)
        except (OSError, Corrupt):  # the slab cannot be mapped, or is not what it was
            outbox.dropped["failed"] += 1
            return
        if not all(one.seal.is_labelled(one.buffer, stripe.key) for one in objects):
            outbox.dropped["unlabelled"] += 1  # an engine that commits what it has not written
            return
        shelf = goods.room.shelves[group]
        self._ledger.own.pin(shelf, stripe)
        outbox.running += 1
        writes = [outbox.tier.write(one.name, one.buffer) for one in objects]

        def written(_future: object) -> None:
            outbox.running -= 1
            self._ledger.own.unpin(shelf, stripe)
            if not all(write.result() for write in writes):
                outbox.dropped["failed"] += 1
            self._advance(outbox)

        asyncio.gather(*writes).add_done_callback(written)
