"""The server's own pins: stripes that it reads itself, or keeps for a lookup that waits.

They belong to no session, no engine's death frees them, and they count against nobody's limit; whoever takes
one is bounded himself and gives it back. Knows nothing of why.
"""

from collections import Counter

from kvcellar.ledger.shelf import Shelf
from kvcellar.ledger.stripe import Stripe


class OwnPins:
    def __init__(self) -> None:
        self.held: Counter[Stripe] = Counter()  # for audit: how often each is pinned

    def pin(self, shelf: Shelf, stripe: Stripe) -> None:
        shelf.pin([stripe])
        self.held[stripe] += 1

    def unpin(self, shelf: Shelf, stripe: Stripe) -> None:
        self.held[stripe] -= 1
        if not self.held[stripe]:
            del self.held[stripe]
        shelf.let_go(stripe)
