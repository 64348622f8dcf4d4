"""Shelf: all stripes of one group of one namespace, found by chunk key.

Owns the index, the free places and the order of eviction. Every stripe is in exactly one state:

    free place --take--> writing --publish--> ready --remove--> free place
                            `------remove----------------^

and the stripe table of its rack always says the same, written before anybody is told. Knows nothing of leases
or sessions; callers pin and unpin.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from kvcellar.identity import ChunkKey
from kvcellar.ledger.policy import EvictionPolicy, SecondChance
from kvcellar.ledger.stripe import Stripe
from kvcellar.slab import Place, place_of, rack_of, slot_of


class Table(Protocol):
    """The durable record of one rack, one entry per slot. Each call is complete when it returns."""

    slots: int

    def write(self, slot: int, key: ChunkKey, parent: ChunkKey | None) -> None:
        """The slot is being written for this key."""

    def publish(self, slot: int) -> None:
        """All bytes of the slot are in place."""

    def free(self, slot: int) -> None:
        """The slot holds nothing."""


class Shelf:
    def __init__(self, stripe_bytes: int, policy: EvictionPolicy | None = None) -> None:
        self.stripe_bytes = stripe_bytes
        self.tables: dict[int, Table] = {}
        self.left_by: Counter[str] = Counter()  # every way a stripe can leave
        self._index: dict[ChunkKey, Stripe] = {}
        self._free: list[Place] = []
        self._limbo: list[Place] = []  # adopted in the middle of a write: whoever wrote may still be writing
        self._hidden = 0  # stripes that left the index while somebody still used them
        self._policy = policy or SecondChance()
        self.may_evict = True

    def __repr__(self) -> str:
        return f"<Shelf {len(self._index)} stripes, {len(self._free)} free of {self.slots}>"

    def __len__(self) -> int:
        return len(self._index)

    @property
    def slots(self) -> int:
        return sum(table.slots for table in self.tables.values())

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def add_rack(self, number: int, table: Table) -> None:
        assert number not in self.tables
        self.tables[number] = table
        # Popped from the end: low slots first, so that a young rack is touched page after page.
        self._free.extend(place_of(number, slot) for slot in reversed(range(table.slots)))

    def get(self, key: ChunkKey) -> Stripe | None:
        return self._index.get(key)

    def touch(self, stripes: list[Stripe]) -> None:
        self._policy.touch(stripes)

    def take(self, key: ChunkKey, parent_key: ChunkKey | None, *, temporary: bool = False) -> Stripe | None:
        """A place to write `key` in, if need be by eviction; None when there is no room. The key must not be
        here.
        """
        assert key not in self._index
        # Before making room: the new stripe's parent must count as one, or it could be the one to go.
        parent = self._index.get(parent_key) if parent_key is not None else None
        if parent is not None:
            parent.children += 1
        if not self._free and not self._evict_one():
            if parent is not None:
                parent.children -= 1
            return None
        stripe = Stripe(key, self._free.pop(), parent, temporary=temporary)
        self.tables[rack_of(stripe.place)].write(slot_of(stripe.place), key, parent_key)
        self._index[key] = stripe
        return stripe

    def publish(self, stripe: Stripe) -> None:
        """All shards are written: from now on lookups find it."""
        self.tables[rack_of(stripe.place)].publish(slot_of(stripe.place))
        stripe.ready = True
        self._policy.admit(stripe)

    def remove(self, stripe: Stripe, reason: str) -> None:
        """The place becomes free. Nobody may be reading or writing it."""
        assert stripe.pins == 0
        if stripe.indexed:
            self._unindex(stripe)
            self.left_by[reason] += 1
        else:
            self._hidden -= 1  # counted when it was hidden
        self._release_place(stripe)

    def hide(self, stripe: Stripe, reason: str) -> None:
        """Nobody finds it any more. Its place is free at once, or when those who use it now are done."""
        if not stripe.indexed:
            return
        if stripe.ready and stripe.pins == 0:
            self.remove(stripe, reason)
            return
        self._unindex(stripe)
        self.left_by[reason] += 1
        self._hidden += 1
        stripe.temporary = True

    def clear(self) -> int:
        stripes = list(self._index.values())
        for stripe in stripes:
            self.hide(stripe, "cleared")
        return len(stripes)

    def adopt(
        self,
        number: int,
        table: Table,
        entries: list[tuple[int, ChunkKey, ChunkKey | None]],
        limbo: list[int],
    ) -> int:
        """Take over a rack of an earlier server: `entries` are ready, `limbo` slots may still be written to.

        Returns how many stripes were taken over. A key that is here already is a leftover and its slot is
        freed.
        """
        self.tables[number] = table
        used = set(limbo)
        self._limbo.extend(place_of(number, slot) for slot in limbo)
        for slot, key, parent_key in entries:
            if key in self._index:
                table.free(slot)
                continue
            used.add(slot)
            parent = self._index.get(parent_key) if parent_key is not None else None
            stripe = Stripe(key, place_of(number, slot), parent, ready=True)
            if parent is not None:
                parent.children += 1
            self._index[key] = stripe
            self._policy.admit(stripe)
        self._free.extend(place_of(number, slot) for slot in reversed(range(table.slots)) if slot not in used)
        return len(used) - len(limbo)

    def is_idle(self, number: int) -> bool:
        """Nothing in this rack is pinned, being written, or perhaps still written for an earlier server."""
        busy = [s.place for s in self._index.values() if s.pins or not s.ready] + self._limbo
        return not self._hidden and all(rack_of(place) != number for place in busy)

    def retire(self, number: int) -> None:
        """Give up a rack and all it holds; it must be idle."""
        for stripe in [s for s in self._index.values() if rack_of(s.place) == number]:
            self.remove(stripe, "returned")
        self._free = [place for place in self._free if rack_of(place) != number]
        del self.tables[number]

    def leave_limbo(self) -> None:
        """Whoever wrote for an earlier server is gone or has said that it holds nothing."""
        for place in self._limbo:
            self.tables[rack_of(place)].free(slot_of(place))
        self._free.extend(self._limbo)
        self._limbo.clear()

    def check(self, pins: Mapping[int, int]) -> None:
        """No place lost or in two hands; `pins` says how many read leases hold the stripe with that id()."""
        places = [*self._free, *self._limbo, *(stripe.place for stripe in self._index.values())]
        assert len(set(places)) == len(places), "a place in two hands"
        assert len(places) + self._hidden == self.slots, (
            f"lost places: {len(places)} + {self._hidden} of {self.slots}"
        )
        children = Counter(id(s.parent) for s in self._index.values() if s.parent is not None)
        for key, stripe in self._index.items():
            assert stripe.key == key
            assert stripe.indexed
            assert stripe.pins == pins.get(id(stripe), 0), "pins miscounted"
            assert stripe.children == children[id(stripe)], "children miscounted"

    def _evict_one(self) -> bool:
        victim = self._policy.evict(_may_go) if self.may_evict else None
        if victim is None:
            return False
        self._drop_key(victim)
        self.left_by["evicted"] += 1
        self._release_place(victim)
        return True

    def _unindex(self, stripe: Stripe) -> None:
        self._drop_key(stripe)
        if stripe.ready:
            self._policy.forget(stripe)

    def _drop_key(self, stripe: Stripe) -> None:
        del self._index[stripe.key]
        stripe.indexed = False
        if stripe.parent is not None:
            stripe.parent.children -= 1
            stripe.parent = None

    def _release_place(self, stripe: Stripe) -> None:
        self.tables[rack_of(stripe.place)].free(slot_of(stripe.place))
        self._free.append(stripe.place)


def _may_go(stripe: Stripe) -> bool:
    return stripe.pins == 0 and stripe.children == 0
