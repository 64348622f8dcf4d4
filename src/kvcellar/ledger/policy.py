"""Which stripe to evict next.

A policy only orders stripes; the shelf decides which may go. It is told of every stripe that becomes ready
and every use, and it never blocks. docs/policies.md compares them.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Protocol

from kvcellar.identity import ChunkKey
from kvcellar.ledger.stripe import Stripe


class EvictionPolicy(Protocol):
    def admit(self, stripe: Stripe) -> None:
        """`stripe` became ready. The caller admits the later chunks of a prefix before the earlier ones."""

    def touch(self, stripes: Iterable[Stripe]) -> None:
        """These were hit together; later chunks of a prefix come first."""

    def evict(self, may_go: Callable[[Stripe], bool]) -> Stripe | None:
        """Take the coldest stripe that may go out of the order, or change nothing but the order and return
        None.
        """

    def forget(self, stripe: Stripe) -> None:
        """An admitted stripe left by another way than evict. It must not be kept, nor ever be offered."""


class S3Fifo:
    """S3-FIFO: newcomers queue apart from those that have proved themselves, by a use or by being missed.

    A newcomer that reaches the end of its queue unused goes, and is remembered for a while; if it is stored
    again it joins the proven ones at once. So one pass over much data cannot flush what is in use. The proven
    ones are a CLOCK. What went too early, of either, moves the share that newcomers may hold. One flag per
    use, eight bytes per stripe, and 100 for each that is remembered: half as many.
    """

    # Proven parents of newcomers may not go, and each eviction would walk past all of them: after so many
    # refusals it looks among the newcomers. 8 costs up to 2.4 points of hits on `kvcellar trace agents`; no
    # limit gains up to 1.7 there, and asks about 47 stripes per eviction instead of 8.
    _PATIENCE = 32

    # Of all stripes, what newcomers may hold; and by how many that grows for one of them that went too early,
    # and shrinks for a proven one. The paper's tenth suits objects that are read many times or never; a
    # conversation comes back minutes later and must still be there (docs/policies.md). It begins with the
    # least: who learns on the way down has driven out what is in use to learn it.
    _LEAST, _MOST = 0.1, 0.5
    _MORE, _LESS = 8, 4

    def __init__(self) -> None:
        self._new: deque[Stripe] = deque()
        self._proven: deque[Stripe] = deque()
        self._share = self._LEAST
        self._went_new: set[ChunkKey] = set()
        self._went_proven: set[ChunkKey] = set()
        self._went: deque[ChunkKey] = deque()  # both, the oldest first; some that came back are still in it
        self._gone = 0  # stripes in the queues that left by another way

    def admit(self, stripe: Stripe) -> None:
        key = stripe.key
        if key in self._went_new:
            self._went_new.remove(key)
            step = self._MORE
        elif key in self._went_proven:
            self._went_proven.remove(key)
            step = -self._LESS
        else:
            self._new.append(stripe)
            return
        self._proven.append(stripe)
        share = self._share + step / (len(self._new) + len(self._proven))
        self._share = min(max(share, self._LEAST), self._MOST)

    def touch(self, stripes: Iterable[Stripe]) -> None:
        for stripe in stripes:
            stripe.visited = True

    def evict(self, may_go: Callable[[Stripe], bool]) -> Stripe | None:
        crowded = len(self._new) >= self._share * (len(self._new) + len(self._proven))
        return (
            (None if crowded else self._evict_proven(may_go, self._PATIENCE))
            or self._evict_new(may_go)
            or self._evict_proven(may_go, 2 * len(self._proven))
        )

    def _evict_new(self, may_go: Callable[[Stripe], bool]) -> Stripe | None:
        """Each is looked at once at most. What was used, or is being read now, joins the proven ones; parents
        that may not go yet stay newcomers, behind their children.

        An answer is stored as it grows, parents first: as proven ones, all but its end would drive out what
        is in use. In reverse, the next to look finds the ends of chains first, as with prompts.
        """
        new, victim = self._new, None
        parents: list[Stripe] = []
        while new:
            stripe = new.popleft()
            if not stripe.indexed:
                self._gone -= 1
            elif stripe.visited or stripe.pins:
                stripe.visited = False
                self._proven.append(stripe)
            elif may_go(stripe):
                victim = stripe
                break
            else:
                parents.append(stripe)
        new.extend(reversed(parents))
        if victim is not None:
            self._remember(victim, self._went_new)
        return victim

    def _evict_proven(self, may_go: Callable[[Stripe], bool], refusals: int) -> Stripe | None:
        # Two rounds at most: the first may only take away second chances.
        for _ in range(2 * len(self._proven)):
            if not self._proven or not refusals:
                break
            stripe = self._proven.popleft()
            if not stripe.indexed:
                self._gone -= 1
                continue
            if not stripe.visited:
                if may_go(stripe):
                    self._remember(stripe, self._went_proven)
                    return stripe
                refusals -= 1
            stripe.visited = False
            self._proven.append(stripe)
        return None

    def _remember(self, stripe: Stripe, went: set[ChunkKey]) -> None:
        order = self._went
        went.add(stripe.key)
        order.append(stripe.key)
        while 2 * len(order) > len(self._new) + len(self._proven):
            oldest = order.popleft()
            self._went_new.discard(oldest)
            self._went_proven.discard(oldest)

    def forget(self, stripe: Stripe) -> None:
        assert not stripe.indexed
        self._gone += 1
        if 2 * self._gone > len(self._new) + len(self._proven):  # each rebuild is paid for by as many calls
            self._new = deque(stripe for stripe in self._new if stripe.indexed)
            self._proven = deque(stripe for stripe in self._proven if stripe.indexed)
            self._gone = 0


class SecondChance:
    """CLOCK: a queue in which whatever was used, or may not go yet, returns to the end once.

    One flag per use and eight bytes per stripe. A parent is refused while it has children, and then stands
    behind them; so prefixes are taken from their end.
    """

    def __init__(self) -> None:
        self._queue: deque[Stripe] = deque()
        self._gone = 0  # stripes in the queue that left by another way

    def admit(self, stripe: Stripe) -> None:
        self._queue.append(stripe)

    def touch(self, stripes: Iterable[Stripe]) -> None:
        for stripe in stripes:
            stripe.visited = True

    def evict(self, may_go: Callable[[Stripe], bool]) -> Stripe | None:
        # Two rounds: the first may only take away second chances.
        for _ in range(2 * len(self._queue)):
            if not self._queue:  # all that was left was lost
                break
            stripe = self._queue.popleft()
            if not stripe.indexed:
                self._gone -= 1
                continue
            if not stripe.visited and may_go(stripe):
                return stripe
            stripe.visited = False
            self._queue.append(stripe)
        return None

    def forget(self, stripe: Stripe) -> None:
        assert not stripe.indexed
        self._gone += 1
        if 2 * self._gone > len(self._queue):  # each rebuild is paid for by as many calls
            self._queue = deque(stripe for stripe in self._queue if stripe.indexed)
            self._gone = 0


class LeastRecentlyUsed:
    """The yardstick. A use costs five times as much as with a flag."""

    def __init__(self) -> None:
        # Not by key: what was cleared and is not swept yet may stand beside what was stored since.
        self._order: OrderedDict[Stripe, None] = OrderedDict()

    def admit(self, stripe: Stripe) -> None:
        self._order[stripe] = None

    def touch(self, stripes: Iterable[Stripe]) -> None:
        for stripe in stripes:
            if stripe.indexed:
                self._order.move_to_end(stripe)

    def evict(self, may_go: Callable[[Stripe], bool]) -> Stripe | None:
        found = next(filter(may_go, self._order), None)
        if found is not None:
            del self._order[found]
        return found

    def forget(self, stripe: Stripe) -> None:
        assert not stripe.indexed
        del self._order[stripe]


DefaultPolicy = S3Fifo

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "s3-fifo": S3Fifo,
    "second-chance": SecondChance,
    "lru": LeastRecentlyUsed,
}
