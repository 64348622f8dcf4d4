"""The ledger's machine once more, beside what the server does on its own: it pins for write-back, fills
places from tiers, takes racks back and adds others, and an operator pins namespaces.
"""

from collections.abc import Callable, Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from kvcellar.arena import RackKey
from kvcellar.identity import Namespace, NamespaceId
from kvcellar.ledger import Shelf, Stripe
from kvcellar.slab import Place, rack_of
from tests.unit.ledger_model import ENGINES, HYBRID, MLA2, PROMPTS, TP2, Cell, Hold, Spot
from tests.unit.test_ledger_machine import RACKS, LedgerMachine, picks, prompts

namespaces = st.sampled_from([TP2, MLA2, HYBRID])


class ServerMachine(LedgerMachine):
    def _serve(self) -> None:
        super()._serve()
        self.kept = set[NamespaceId]()  # by an operator
        for ns in ENGINES.values():
            self.ledger.open_room(ns)

    def _note_evictions(self, ns: Namespace) -> None:
        before = {*self.model.visible}
        super()._note_evictions(ns)
        assert ns.id not in self.kept or before == {*self.model.visible}

    # -- pins ------------------------------------------------------------------------------------------------

    def _pin(self, hold: Hold) -> None:
        self.ledger.own.pin(self.shelf(hold.cell), hold.stripe)
        self.model.pins.append(hold)

    @rule(pick=picks)
    def pin(self, pick: int) -> None:
        if cells := sorted(self.model.visible):
            cell = cells[pick % len(cells)]
            stripe = self.shelf(cell).get(cell.key)
            assert stripe is not None
            self._pin(Hold(cell, self.model.visible[cell], stripe))

    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        if self.model.pins:
            hold = self.model.pins.pop(pick % len(self.model.pins))
            self.ledger.own.unpin(self.shelf(hold.cell), hold.stripe)
            self.model.unread(hold.cell, hold.spot)

    @rule(ns=namespaces, pinned=st.booleans())
    def keep(self, ns: Namespace, pinned: bool) -> None:
        self.ledger.set_pinned(ns.id, pinned)
        (self.kept.add if pinned else self.kept.discard)(ns.id)

    # -- what tiers have -------------------------------------------------------------------------------------

    @rule(ns=namespaces, pick=picks, prompt=prompts, again=st.booleans())
    def fetch(self, ns: Namespace, pick: int, prompt: int, again: bool) -> None:
        row, group = PROMPTS[prompt], pick % len(ns.groups)
        chunk = pick // 2 % len(row)
        cell = Cell(ns.id, group, row[chunk])
        shelf = self.shelf(cell)
        if cell in self.model.here():
            return
        temporary = not (again or shelf.has_room)
        stripe = shelf.take(cell.key, row[chunk - 1] if chunk else None, temporary=temporary)
        self._note_evictions(ns)
        if stripe is not None:
            spot = Spot(ns.id, group, stripe.place)
            assert spot not in self.model.taken().union(*self.model.old.values())
            self._claim(cell, spot)
            self.model.temporary |= {cell} if temporary else set()
            self.model.fetches.append(Hold(cell, spot, stripe))

    @rule(pick=picks, found=st.booleans(), waiting=st.integers(0, 2))
    def fetched(self, pick: int, found: bool, waiting: int) -> None:
        if not self.model.fetches:
            return
        hold = self.model.fetches.pop(pick % len(self.model.fetches))
        shelf, is_wanted = self.shelf(hold.cell), self.model.claimed.get(hold.cell) == hold.spot
        if not found:
            shelf.remove(hold.stripe, "aborted")
        else:
            assert shelf.publish([hold.stripe]) == is_wanted
        if not is_wanted:  # cleared meanwhile
            return
        temporary = hold.cell in self.model.temporary
        self.model.forget(hold.cell)
        if found and (waiting or not temporary):
            self.model.visible[hold.cell] = hold.spot
            self.model.temporary |= {hold.cell} if temporary else set()
            shards = next(
                ns for ns in ENGINES.values() if ns.id == hold.cell.namespace
            ).parallel.kv_world_size
            self.model.bytes[hold.spot] = dict.fromkeys(range(shards), hold.cell.key)
            for _ in range(waiting):
                self._pin(hold)
        elif found:
            shelf.remove(hold.stripe, "temporary")

    def acts_meanwhile(self) -> Iterator[Callable[[int], object]]:
        yield from super().acts_meanwhile()
        yield lambda pick: self.fetch(TP2, pick, pick % 3, again=False)
        yield lambda pick: self.fetched(pick, pick % 2 == 0, pick % 3)
        yield self.pin
        yield self.unpin
        yield self.retire

    # -- racks -----------------------------------------------------------------------------------------------

    @rule(pick=picks)
    def retire(self, pick: int) -> None:
        if len(self.arena.racks) < 3:
            return
        chosen = sorted(self.arena.racks)[pick % len(self.arena.racks)]
        shelf = self.ledger.rooms[chosen.namespace].shelves[chosen.group]
        if chosen.number in shelf.idle_racks():
            assert not any(lies_in(spot, chosen) for spot in self.model.in_use() | self.model.guarded)
            for cell in [cell for cell, spot in self.model.visible.items() if lies_in(spot, chosen)]:
                self.model.forget(cell)
            shelf.retire(chosen.number)
            self.arena.remove(chosen)
            self.arena.removed(chosen)

    @rule(ns=namespaces, pick=picks)
    def grow(self, ns: Namespace, pick: int) -> None:
        group = pick % len(ns.groups)
        shelf = self.ledger.rooms[ns.id].shelves[group]
        if len(shelf.tables) < RACKS[ns.id] and (spec := self.arena.plan(ns, group)):
            rack = self.arena.create(ns, spec)
            shelf.add_rack(self.arena.finish(rack).number, rack.table)

    # -- what always holds -----------------------------------------------------------------------------------

    @invariant()
    def whoever_gives_up_looking_misses_nobody(self) -> None:
        for room in self.ledger.rooms.values():
            for shelf in room.shelves:
                assert shelf._loose is None or may_go(shelf) <= shelf._loose

    def everything_is_free_when_all_are_gone(self) -> None:
        while self.model.pins:
            self.unpin(0)
        while self.model.fetches:
            self.fetched(0, False, 0)
        for ns in ENGINES.values():
            self.keep(ns, False)
        super().everything_is_free_when_all_are_gone()


def lies_in(spot: Spot, rack: RackKey) -> bool:
    return (spot.namespace, spot.group, rack_of(Place(spot.place))) == rack


def may_go(shelf: Shelf) -> set[Stripe]:
    return {stripe for stripe in shelf._index.values() if stripe.ready and shelf._may_go(stripe)}


TestServerMachine = ServerMachine.TestCase
TestServerMachine.settings = settings(
    max_examples=400, stateful_step_count=60, deadline=None, derandomize=True, database=None
)
