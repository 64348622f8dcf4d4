"""The server's own pins: stripes that it reads itself, or keeps for a lookup that waits.

They belong to no session, no engine's death frees them, and they count against nobody's limit; whoever takes
one is bounded himself and gives it back. Knows nothing of why.
"""

from collections import Counter

from kvcellar.ledger.shelf import Shelf
from kvcellar.ledger.stripe import Stripe


class OwnPins:
    def __init__(self) -> None:
        self._held: dict[int, list[Stripe]] = {}  # by id(): the same stripe once for every pin

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def pin(self, shelf: Shelf, stripe: Stripe) -> None:
        shelf.pin([stripe])
        self._held.setdefault(id(stripe), []).append(stripe)

    def unpin(self, shelf: Shelf, stripe: Stripe) -> None:
        held = self._held[id(stripe)]
        held.pop()
        if not held:
            del self._held[id(stripe)]
        shelf.let_go(stripe)

    def by_stripe(self) -> Counter[int]:
        return Counter({number: len(held) for number, held in self._held.items()})
