"""Write-back: what engines committed goes to every tier, after the fact and as far as a tier keeps up.

Nobody waits for it. Each tier has a queue of its own, in the order of prefixes and bounded: under pressure
the newest is dropped and counted, so what is kept of a prefix is its beginning. A stripe in the queue is not
protected; only while it is being written does a pin of the server's own keep it from eviction.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvcellar.identity import ChunkKey
from kvcellar.ledger import Ledger, Room, Stripe
from kvcellar.server.objects import Goods, Objects
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

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.waiting: deque[_Item] = deque()
        self.running = 0
        self.dropped: Counter[str] = Counter()  # full, evicted, down, unlabelled, failed


class WriteBack:
    def __init__(
        self,
        ledger: Ledger,
        objects: Objects,
        tiers: Sequence[Tier],
        wants: Callable[[ChunkKey], bool] = lambda _key: True,
    ) -> None:
        """`wants`: is a chunk that an engine has just stored worth writing?"""
        self.outboxes = [Outbox(tier) for tier in tiers]
        self._ledger = ledger
        self._objects = objects
        self._wants = wants

    def published(self, room: Room, group: int, stripes: Sequence[Stripe]) -> None:
        """An engine committed these, later chunks first."""
        goods = self._objects.goods(room)
        if goods is None:
            return
        wanted = [stripe for stripe in reversed(stripes) if self._wants(stripe.key)]
        for outbox in self.outboxes:
            self._add(outbox, (_Item(goods, group, stripe) for stripe in wanted))

    def fill(self, goods: Goods, group: int, stripe: Stripe, tiers: Iterable[Tier]) -> None:
        """This came from a farther tier: the nearer ones should have it too."""
        chosen = list(tiers)
        for outbox in self.outboxes:
            if outbox.tier in chosen:
                self._add(outbox, [_Item(goods, group, stripe)])

    async def drain(self, until: float) -> None:
        """Write what is queued; give up at `until`, on the monotonic clock."""
        while time.monotonic() < until and any(box.running or box.waiting for box in self.outboxes):
            await asyncio.sleep(0.01)

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
        except OSError:  # the slab cannot be mapped
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
