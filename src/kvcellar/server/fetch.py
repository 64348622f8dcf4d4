"""Fetches: stripes on their way from tiers into memory, each read once however many wait for it.

The place is the server's own while it is being written: it becomes an object like any other when every shard
was read and checked, and free again when one was not. Kept or temporary is decided when it is taken.

A read that hangs may write to its place whenever it wakes up, so the place stays taken. But nobody waits for
it any more, and the chunk is absent: an engine may store it, and the tiers behind may have it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

from kvcellar.errors import Corrupt
from kvcellar.ledger import Ledger, Shelf, Stripe
from kvcellar.server.objects import Objects
from kvcellar.server.steward import Steward
from kvcellar.server.wait import At, Fetch, Wait
from kvcellar.server.writeback import WriteBack
from kvcellar.tiers.tier import Tier

log = logging.getLogger(__name__)

# How many stripes are remembered that were brought up for one use only.
_REMEMBERED = 1 << 16


class Promotion:
    """What is brought up stays if that costs nobody anything, or if it is brought up a second time; else it
    is temporary: gone with its last reader. So one pass over much cold KV does not empty the memory.
    """

    def __init__(self, size: int = _REMEMBERED) -> None:
        self._size = size
        self._seen: dict[At, None] = {}

    def keeps(self, at: At, *, is_room: bool) -> bool:
        if is_room or at in self._seen:
            self._seen.pop(at, None)
            return True
        self._seen[at] = None
        if len(self._seen) > self._size:
            del self._seen[next(iter(self._seen))]
        return False


class Fetches:
    def __init__(
        self, ledger: Ledger, objects: Objects, steward: Steward, writeback: WriteBack, tiers: Sequence[Tier]
    ) -> None:
        self.objects = objects
        self.promotion = Promotion()
        self._ledger = ledger
        self._steward = steward
        self._writeback = writeback
        self._tiers = tiers
        self._running: dict[At, Fetch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def want(self, wait: Wait, group: int, chunk: int, sources: list[Tier]) -> asyncio.Future[bool] | None:
        """See that this chunk is in memory and stays until the wait is over. None: it cannot be had."""
        goods, key = wait.goods, wait.keys[chunk]
        shelf = goods.room.shelves[group]
        at = (goods.namespace_id, group, key)
        fetch = self._running.get(at)
        if fetch is None:
            stripe = shelf.get(key)
            if stripe is not None:
                return self._hold(wait, shelf, stripe) if stripe.ready else None  # an engine is writing it
            parent = wait.keys[chunk - 1] if chunk else None
            fetch = self._running[at] = Fetch(goods, group, key, parent)
            task = asyncio.create_task(self._run(fetch, sources))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        fetch.give_up = max(fetch.give_up, wait.deadline)
        fetch.waiting.add(wait)
        wait.fetches.add(fetch)
        return asyncio.shield(fetch.done)

    def _hold(self, wait: Wait, shelf: Shelf, stripe: Stripe) -> asyncio.Future[bool]:
        self._ledger.own.pin(shelf, stripe)
        wait.holds.append((shelf, stripe))
        held: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        held.set_result(True)
        return held

    async def _run(self, fetch: Fetch, sources: list[Tier]) -> None:
        stripe = source = None
        try:
            stripe = await self._take(fetch)
            if stripe is not None:
                source = await self._read(fetch, stripe, sources)
        except (OSError, Corrupt) as error:  # a slab that cannot be mapped: nobody has begun to write to it
            log.warning("cannot bring up an object: %s", error)
        # Not in a `finally`: when the server ends, a thread may still be writing to the place.
        if stripe is not None:
            self._settle(fetch, stripe, source)
        self._end(fetch, found=source is not None)

    def _end(self, fetch: Fetch, *, found: bool) -> None:
        if not fetch.done.done():  # else a read hung, and another fetch of the same may run by now
            del self._running[fetch.at]
            fetch.done.set_result(found)

    def _hang(self, fetch: Fetch, stripe: Stripe) -> None:
        """The place is free when the read returns after all: what is hidden is not published."""
        fetch.shelf.hide(stripe, "aborted")
        self._end(fetch, found=False)

    async def _take(self, fetch: Fetch) -> Stripe | None:
        shelf, room = fetch.shelf, fetch.goods.room
        growth = self._steward.grow(room, fetch.group, 1)
        if growth is not None:
            await asyncio.wait([growth], timeout=max(0.0, fetch.give_up - time.monotonic()))
        if shelf.get(fetch.key) is not None:
            return None  # an engine was faster
        keeps = self.promotion.keeps(fetch.at, is_room=shelf.has_room)
        return shelf.take(fetch.key, fetch.parent, temporary=not keeps)

    async def _read(self, fetch: Fetch, stripe: Stripe, sources: list[Tier]) -> Tier | None:
        """The tier that had all of it. Returns only when no thread writes to the place any more."""
        objects = self.objects.of_stripe(fetch.goods, fetch.group, fetch.key, stripe.place)
        hangs = partial(self._hang, fetch, stripe)
        for tier in sources:
            reads = [
                tier.read(one.name, one.buffer, one.seal.checker(fetch.key), lambda: fetch.give_up, hangs)
                for one in objects
            ]
            if all(await asyncio.gather(*reads)):
                return tier
            if fetch.done.done():
                break
        return None

    def _settle(self, fetch: Fetch, stripe: Stripe, source: Tier | None) -> None:
        shelf = fetch.shelf
        if source is None:
            shelf.remove(stripe, "aborted")
            return
        if not shelf.publish([stripe]):
            return  # cleared meanwhile, or too late
        for wait in fetch.waiting:
            self._ledger.own.pin(shelf, stripe)
            wait.holds.append((shelf, stripe))
        nearer = self._tiers[: self._tiers.index(source)]
        self._writeback.fill(fetch.goods, fetch.group, stripe, nearer)
        if stripe.temporary and not stripe.pins:
            shelf.remove(stripe, "temporary")  # nobody waits any more
