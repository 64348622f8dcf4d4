"""Shelf: all stripes of one group of one namespace, found by chunk key.

Owns the index, the free places and the order of eviction. Every place is in exactly one state:

    free --take--> writing --publish--> ready --evict, remove--> free
                      `----remove---------------------------------^
    hidden: out of the index, but somebody still reads or writes it; free when they are done
    limbo: somebody may still use it on the word of an earlier server; free when grace ends
    cleared: out of the index, and as it was otherwise, until `sweep` hides or frees it

and the stripe table of its rack says so before anybody is told. Knows nothing of leases or sessions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Protocol

from kvcellar.identity import ChunkKey
from kvcellar.ledger.policy import DefaultPolicy, EvictionPolicy
from kvcellar.ledger.stripe import Stripe
from kvcellar.sketch import OwnSketch
from kvcellar.slab import Place, place_of, rack_of, slot_of

# How many ancestors are looked at; who has more is not tied to its parent where there is a doubt.
_NEAR = 512
# Stripes that are kept in mind because they may be able to go; with more, the policy looks for itself.
_FEW = 64
# Places that one sweep sees to: about 4 ms. All of a million, at once, would hold everybody up for seconds.
SWEEP = 2048


class Table(Protocol):
    """The durable record of one rack, one entry per slot. Each call is complete when it returns."""

    slots: int

    def write(self, slot: int, key: ChunkKey, parent: ChunkKey | None) -> None:
        """The slot is being written for this key."""

    def publish(self, slot: int) -> None:
        """All bytes of the slot are in place."""

    def free(self, slot: int) -> None:
        """The slot holds nothing."""

    def withdraw(self, slot: int) -> None:
        """The slot holds nothing worth finding, but somebody may still be using it."""


class Shelf:
    def __init__(
        self, stripe_bytes: int, policy: EvictionPolicy | None = None, sketch: OwnSketch | None = None
    ) -> None:
        """`sketch`: is to know of every key in the index."""
        self.stripe_bytes = stripe_bytes
        self.tables: dict[int, Table] = {}
        self.left_by: Counter[str] = Counter()  # every way a stripe can leave
        self.pinned = False  # by an operator: evict nothing
        self._index: dict[ChunkKey, Stripe] = {}
        self._children: dict[ChunkKey, int] = {}  # how many stripes name this key as their parent
        self._free: list[Place] = []
        self._vacated = 0  # of the free places: those that temporary stripes have left
        self._limbo: list[Place] = []
        self._cleared: list[dict[ChunkKey, Stripe]] = []
        self._hidden: Counter[int] = Counter()  # by rack
        # After the policy found nothing that may go: whatever may since then, or could. None: ask the policy.
        self._loose: set[Stripe] | None = None
        self._guarded = False  # engines of an earlier server may be about: evict nothing, reuse nothing
        self._policy = policy or DefaultPolicy()
        self._sketch = sketch

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

    @property
    def has_room(self) -> bool:
        """A place is free, and nobody had to go for it: what a temporary stripe has left does not count, or
        the next one would stay there, and evict somebody for good.
        """
        return len(self._free) > self._vacated

    # -- reading ----------------------------------------------------------------------------------------

    def get(self, key: ChunkKey) -> Stripe | None:
        return self._index.get(key)

    def find_run(self, keys: Sequence[ChunkKey], *, gaps: bool) -> list[Stripe | None]:
        """What is ready of these keys, up to the first gap; with `gaps`, all of it, None where nothing is."""
        find = self._index.get
        row: list[Stripe | None] = []
        for key in keys:
            stripe = find(key)
            if stripe is None or not stripe.ready:
                if not gaps:
                    break
                stripe = None
            row.append(stripe)
        return row

    def pin(self, stripes: Sequence[Stripe]) -> None:
        """One more reader for these."""
        for stripe in stripes:
            stripe.pins += 1

    def unpin(self, stripes: Sequence[Stripe]) -> None:
        # Now, not when pinned: a lookup waits for that, and pins protect till now.
        self._policy.touch(stripes)
        for stripe in stripes:
            self.let_go(stripe)

    def let_go(self, stripe: Stripe) -> None:
        """One reader is done. If it is the server's own, the stripe has not been used by that."""
        stripe.pins -= 1
        if not stripe.pins:
            self._loosen(stripe)
            if stripe.temporary:
                self.remove(stripe, "temporary")

    # -- writing ----------------------------------------------------------------------------------------

    def take(self, key: ChunkKey, parent: ChunkKey | None, *, temporary: bool = False) -> Stripe | None:
        """A place to write `key` in, by eviction if need be; None without room. The key must not be here."""
        assert key not in self._index
        if parent is not None and not self._may_follow(parent, key):
            parent = None
        self._add_child(parent)  # before making room, or the parent itself could be the one to go
        if not self._find_place():
            self._drop_child(parent)
            return None
        stripe = Stripe(key, self._free.pop(), parent, temporary=temporary)
        self._vacated = min(self._vacated, len(self._free))
        self.tables[rack_of(stripe.place)].write(slot_of(stripe.place), key, parent)
        self._add_key(stripe)
        return stripe

    def publish(self, stripes: Iterable[Stripe]) -> int:
        """All shards are written: lookups find them from now on. Later chunks first. Returns how many."""
        published = 0
        for stripe in stripes:
            if self._index.get(stripe.key) is not stripe:  # cleared meanwhile
                self.remove(stripe, "cleared")
                continue
            self.tables[rack_of(stripe.place)].publish(slot_of(stripe.place))
            stripe.ready = True
            self._loosen(stripe)
            self._policy.admit(stripe)
            published += 1
        return published

    def remove(self, stripe: Stripe, reason: str) -> None:
        """The place becomes free. Nobody may be reading or writing it."""
        assert stripe.pins == 0
        if stripe.indexed:
            self._unindex(stripe)
            self.left_by[reason] += 1
            self._vacated += stripe.temporary
        else:
            self._hidden[rack_of(stripe.place)] -= 1  # counted when it was hidden
        self._release_place(stripe)
        self._vacated = min(self._vacated, len(self._free))

    def hide(self, stripe: Stripe, reason: str) -> None:
        """Nobody finds it any more. Its place is free at once, or when those who use it now are done."""
        if not stripe.indexed:
            return
        if stripe.ready and stripe.pins == 0:
            self.remove(stripe, reason)
            return
        self._unindex(stripe)
        self.tables[rack_of(stripe.place)].withdraw(slot_of(stripe.place))
        self.left_by[reason] += 1
        self._hidden[rack_of(stripe.place)] += 1
        stripe.temporary = True

    def clear(self) -> int:
        """Nobody finds any of it from now on, and what is stored from now on stays. The places come free as
        `sweep` goes on.
        """
        cleared, self._index = self._index, {}
        if cleared:
            self._cleared.append(cleared)
        self._vacated = 0  # nobody is left to come back
        return len(cleared)

    def sweep(self, most: int) -> int:
        """See to places that a clear, or the end of grace, has left behind. Returns to how many."""
        seen = 0
        while self._cleared and seen < most:
            stripes = self._cleared[-1]
            self.hide(stripes.popitem()[1], "cleared")
            seen += 1
            if not stripes:
                self._cleared.pop()
        while self._limbo and not self._guarded and seen < most:
            place = self._limbo.pop()
            self.tables[rack_of(place)].free(slot_of(place))
            self._free.append(place)
            seen += 1
        return seen

    # -- racks ------------------------------------------------------------------------------------------

    def add_rack(self, number: int, table: Table) -> None:
        self.adopt(number, table, [], [])

    def adopt(
        self,
        number: int,
        table: Table,
        entries: list[tuple[int, ChunkKey, ChunkKey | None]],
        limbo: list[int],
    ) -> int:
        """Take over a rack: `entries` are ready, `limbo` slots may still be in use, the rest is free.

        Returns how many stripes were taken over. Of two entries for one key the second is withdrawn.
        """
        assert number not in self.tables
        self.tables[number] = table
        kept, unusable = set[int](), list(limbo)
        for slot, key, parent in entries:
            if key in self._index:
                table.withdraw(slot)
                unusable.append(slot)
                continue
            kept.add(slot)
            stripe = Stripe(key, place_of(number, slot), parent, ready=True)
            self._add_key(stripe)
            self._add_child(parent)
            self._loosen(stripe)
            self._policy.admit(stripe)
        self._limbo.extend(place_of(number, slot) for slot in unusable)
        used = kept | set(unusable)
        # Popped from the end: low slots first, so that a young rack is touched page after page.
        # The newest rack last: engines have had more time to map, and page-lock, the older ones.
        self._free[:0] = [place_of(number, slot) for slot in reversed(range(table.slots)) if slot not in used]
        return len(kept)

    def idle_racks(self) -> set[int]:
        """In these nothing is pinned, being written, hidden or in limbo; nobody unknown may use them. While
        there is something to sweep, nobody looks.
        """
        if self._guarded or self._cleared:
            return set()
        busy = {rack_of(stripe.place) for stripe in self._index.values() if stripe.pins or not stripe.ready}
        return self.tables.keys() - busy - set(+self._hidden) - {rack_of(place) for place in self._limbo}

    def retire(self, number: int) -> None:
        """Give up a rack and all it holds; it must be idle."""
        for stripe in [s for s in self._index.values() if rack_of(s.place) == number]:
            self.remove(stripe, "returned")
        self._free = [place for place in self._free if rack_of(place) != number]
        self._vacated = min(self._vacated, len(self._free))
        del self.tables[number], self._hidden[number]

    def set_guarded(self, guarded: bool) -> None:
        """While guarded nothing is evicted, and no place is given out that an earlier server gave away: those
        are there to be swept, then.
        """
        self._guarded = guarded

    def check(self, pins: Mapping[Stripe, int]) -> None:
        """No place lost or in two hands; `pins` says how many read leases hold a stripe."""
        behind = [stripe for one in self._cleared for stripe in one.values() if stripe.indexed]
        stripes = [*self._index.values(), *behind]
        places = [*self._free, *self._limbo, *(stripe.place for stripe in stripes)]
        assert len(set(places)) == len(places), "a place in two hands"
        assert 0 <= self._vacated <= len(self._free), "vacated places miscounted"
        found = Counter(map(rack_of, places)) + self._hidden
        slots = Counter({number: table.slots for number, table in self.tables.items()})
        assert found == slots, f"places by rack: {dict(found)} of {slots}"
        assert self._children == Counter(s.parent for s in stripes if s.parent), "children miscounted"
        for key, stripe in chain(self._index.items(), ((stripe.key, stripe) for stripe in behind)):
            assert stripe.key == key
            assert stripe.indexed
            assert stripe.pins == pins.get(stripe, 0), "pins miscounted"
            assert self._sketch is None or self._sketch.may_have(key), "not in the sketch"

    # -- inside -----------------------------------------------------------------------------------------

    def _find_place(self) -> bool:
        if not self._free:
            self.sweep(SWEEP)  # before anything goes that came since
        return bool(self._free) or self._evict_one()

    def _evict_one(self) -> bool:
        if self._guarded or self.pinned:
            return False
        if self._loose is not None:
            self._loose = {one for one in self._loose if one.indexed and self._may_go(one)}
            if not self._loose:
                return False
        victim = self._policy.evict(self._may_go)
        if victim is None:
            self._loose = set()  # or every reserve would look at every stripe, while all are being read
            return False
        self._drop_key(victim)
        self.left_by["evicted"] += 1
        self._release_place(victim)
        return True

    def _may_go(self, stripe: Stripe) -> bool:
        return not stripe.pins and stripe.key not in self._children

    def _loosen(self, stripe: Stripe) -> None:
        """Its last reader or child is gone, or it is new."""
        if self._loose is not None:
            self._loose.add(stripe)
            if len(self._loose) > _FEW:
                self._loose = None

    def _unindex(self, stripe: Stripe) -> None:
        self._drop_key(stripe)
        if stripe.ready:
            self._policy.forget(stripe)

    def _add_key(self, stripe: Stripe) -> None:
        self._index[stripe.key] = stripe
        if self._sketch is not None:
            self._sketch.add(stripe.key)

    def _drop_key(self, stripe: Stripe) -> None:
        if self._index.get(stripe.key) is stripe:  # else it was cleared, and another may be there
            del self._index[stripe.key]
        stripe.indexed = False
        if self._sketch is not None:
            self._sketch.drop(stripe.key)
        self._drop_child(stripe.parent)

    def _add_child(self, parent: ChunkKey | None) -> None:
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1

    def _may_follow(self, parent: ChunkKey, key: ChunkKey) -> bool:
        """Not if it is among its own ancestors, whatever an engine says: none of them would ever go."""
        if parent == key or key not in self._children:
            return parent != key
        for _ in range(_NEAR):
            stripe = self._index.get(parent)
            if stripe is None or stripe.parent is None:
                return True
            parent = stripe.parent
            if parent == key:
                return False
        return False

    def _drop_child(self, parent: ChunkKey | None) -> None:
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                stripe = self._index.get(parent)
                if stripe is not None and stripe.ready and not stripe.pins:
                    self._loosen(stripe)

    def _release_place(self, stripe: Stripe) -> None:
        table, slot = self.tables[rack_of(stripe.place)], slot_of(stripe.place)
        if self._guarded and stripe.ready:
            table.withdraw(slot)
            self._limbo.append(stripe.place)
        else:
            table.free(slot)
            self._free.append(stripe.place)
