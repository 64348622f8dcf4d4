"""Which stripe to evict next.

A policy only orders stripes; the shelf decides which may go. It is told of every stripe that becomes ready
and every use, and it never blocks. docs/policies.md compares them.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Protocol

from kvcellar.ghost import Ghost
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
    ones are a CLOCK. One flag per use and, at worst, 40 bytes per stripe.
    """

    # Newcomers go first while they hold half or more. The paper's tenth suits objects that are read many
    # times or never; a conversation comes back minutes later and must still be there (docs/policies.md).
    _NEW_SHARE = 0.5
    # Proven parents of newcomers may not go, and each eviction would walk past all of them: after so many
    # refusals it looks among the newcomers. 8 costs up to 3 points of hits on `kvcellar trace agents`; no
    # limit gains 1.3 there, and asks about 134 stripes per eviction instead of 10.
    _PATIENCE = 32

    def __init__(self) -> None:
        self._new: deque[Stripe] = deque()
        self._proven: deque[Stripe] = deque()
        self._missed = Ghost(1)
        self._remembers = False
        self._gone = 0  # stripes in the queues that left by another way

    def admit(self, stripe: Stripe) -> None:
        known = self._remembers and stripe.key in self._missed
        (self._proven if known else self._new).append(stripe)

    def touch(self, stripes: Iterable[Stripe]) -> None:
        for stripe in stripes:
            stripe.visited = True

    def evict(self, may_go: Callable[[Stripe], bool]) -> Stripe | None:
        crowded = len(self._new) >= self._NEW_SHARE * (len(self._new) + len(self._proven))
        return (
            (None if crowded else self._evict_proven(may_go, self._PATIENCE))
            or self._evict_new(may_go)
            or self._evict_proven(may_go, 2 * len(self._proven))
        )

    def _evict_new(self, may_go: Callable[[Stripe], bool]) -> Stripe | None:
        """Whatever is not taken moves on, so that each stripe is looked at once."""
        while self._new:
            stripe = self._new.popleft()
            if not stripe.indexed:
                self._gone -= 1
            elif stripe.visited or not may_go(stripe):
                stripe.visited = False
                self._proven.append(stripe)
            else:
                self._missed.resize(len(self._new) + len(self._proven))
                self._missed.add(stripe.key)
                self._remembers = True
                return stripe
        return None

    def _evict_proven(self, may_go: Callable[[Stripe], bool], refusals: int) -> Stripe | None:
        # Two rounds at most: the first may only take away second chances.
        for _ in range(2 * len(self._proven)):
            stripe = self._proven.popleft()
            if not stripe.indexed:
                self._gone -= 1
                continue
            if not stripe.visited:
                if may_go(stripe):
                    return stripe
                refusals -= 1
            stripe.visited = False
            self._proven.append(stripe)
            if not refusals:
                break
        return None

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
        self._order: OrderedDict[ChunkKey, Stripe] = OrderedDict()

    def admit(self, stripe: Stripe) -> None:
        self._order[stripe.key] = stripe

    def touch(self, stripes: Iterable[Stripe]) -> None:
        for stripe in stripes:
            if stripe.indexed:
                self._order.move_to_end(stripe.key)

    def evict(self, may_go: Callable[[Stripe], bool]) -> Stripe | None:
        found = next(filter(may_go, self._order.values()), None)
        if found is not None:
            del self._order[found.key]
        return found

    def forget(self, stripe: Stripe) -> None:
        assert not stripe.indexed
        del self._order[stripe.key]


class Sieve:
    """SIEVE: a hand goes from the oldest to the newest and takes what was not used since it came by; what was
    used stays where it is.
    """

    def __init__(self) -> None:
        self._ahead: deque[Stripe] = deque()
        self._behind: deque[Stripe] = deque()

    def admit(self, stripe: Stripe) -> None:
        self._ahead.append(stripe)

    def touch(self, stripes: Iterable[Stripe]) -> None:
        for stripe in stripes:
            stripe.visited = True

    def evict(self, may_go: Callable[[Stripe], bool]) -> Stripe | None:
        for _ in range(2 * (len(self._ahead) + len(self._behind))):
            if not self._ahead:
                self._ahead, self._behind = self._behind, self._ahead
            stripe = self._ahead.popleft()
            if not stripe.indexed:
                continue
            if not stripe.visited and may_go(stripe):
                return stripe
            stripe.visited = False
            self._behind.append(stripe)
        return None

    def forget(self, stripe: Stripe) -> None:
        assert not stripe.indexed


class Adaptive:
    """ARC: used once and used again, each in order of last use; what comes back after it went moves the
    border between them.
    """

    def __init__(self) -> None:
        self._once: OrderedDict[ChunkKey, Stripe] = OrderedDict()
        self._again: OrderedDict[ChunkKey, Stripe] = OrderedDict()
        self._once_gone: OrderedDict[ChunkKey, None] = OrderedDict()
        self._again_gone: OrderedDict[ChunkKey, None] = OrderedDict()
        self._border = 0.0  # how many may be used once

    def admit(self, stripe: Stripe) -> None:
        once, again, key = len(self._once_gone), len(self._again_gone), stripe.key
        if key in self._once_gone:
            del self._once_gone[key]
            self._border = min(len(self._once) + len(self._again) + 1, self._border + max(1, again / once))
            self._again[key] = stripe
        elif key in self._again_gone:
            del self._again_gone[key]
            self._border = max(0.0, self._border - max(1, once / again))
            self._again[key] = stripe
        else:
            self._once[key] = stripe

    def touch(self, stripes: Iterable[Stripe]) -> None:
        for stripe in stripes:
            if self._once.pop(stripe.key, None) is not None:
                self._again[stripe.key] = stripe
            elif stripe.key in self._again:
                self._again.move_to_end(stripe.key)

    def evict(self, may_go: Callable[[Stripe], bool]) -> Stripe | None:
        size = len(self._once) + len(self._again)
        sides = [(self._once, self._once_gone), (self._again, self._again_gone)]
        for held, gone in sides if len(self._once) > self._border else reversed(sides):
            stripe = next(filter(may_go, held.values()), None)
            if stripe is None:
                continue
            del held[stripe.key]
            gone[stripe.key] = None
            while self._once_gone and len(self._once_gone) + len(self._once) > size:
                self._once_gone.popitem(last=False)
            while self._again_gone and len(self._once_gone) + len(self._again_gone) > size:
                self._again_gone.popitem(last=False)
            return stripe
        return None

    def forget(self, stripe: Stripe) -> None:
        assert not stripe.indexed
        if self._once.pop(stripe.key, None) is None:
            self._again.pop(stripe.key, None)


DefaultPolicy = S3Fifo

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "s3-fifo": S3Fifo,
    "second-chance": SecondChance,
    "lru": LeastRecentlyUsed,
    "sieve": Sieve,
    "arc": Adaptive,
}
