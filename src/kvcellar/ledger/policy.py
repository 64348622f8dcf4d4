"""Which stripe to evict next.

A policy only orders stripes; the shelf decides which may go. It is told of every stripe that becomes ready
and every use, and it never blocks.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from kvcellar.ledger.stripe import Stripe


class EvictionPolicy(Protocol):
    def admit(self, stripe: Stripe) -> None:
        """`stripe` became ready. The caller admits the later chunks of a prefix before the earlier ones."""

    def touch(self, stripes: Iterable[Stripe]) -> None:
        """These were hit together."""

    def evict(self, may_go: Callable[[Stripe], bool]) -> Stripe | None:
        """Take the coldest stripe that may go out of the order, or change nothing but the order and return
        None.
        """

    def forget(self, stripe: Stripe) -> None:
        """An admitted stripe left by another way than evict. It must not be kept, nor ever be offered."""


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
