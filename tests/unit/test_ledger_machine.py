"""Ledger and arena against a small model, in any order of events that hypothesis can think of.

Four engines, two of which share a namespace, store and read a few prompts in a memory that is too small for
them; ranks die and come back, the server crashes and adopts its racks.
"""

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcellar.arena import Arena
from kvcellar.arena.table import FREE, READY, StripeTable
from kvcellar.errors import WrongOwner
from kvcellar.identity import ChunkKey, Namespace, NamespaceId
from kvcellar.ledger import NO_LEASE, SCHEDULER, Granted, LeaseId, Ledger, Shelf, audit
from kvcellar.sketch import OwnSketch
from kvcellar.slab import NO_PLACE, Place, place_of
from tests.support import end_grace, keys, sweep
from tests.unit.ledger_model import (
    ENGINES,
    HOLD_PAGES,
    HYBRID,
    MEMBERS,
    MLA2,
    NOBODY,
    PARENT,
    PROMPTS,
    TP2,
    Cell,
    Member,
    Model,
    Share,
    Spot,
    Use,
    findable,
    needed,
)

RACKS = {TP2.id: 2, MLA2.id: 1, HYBRID.id: 1}  # per group: 2 + 4, 4 and 4 slots
MEMORY = 1 << 20
SKETCH = OwnSketch()  # of all servers: it may claim too much, and never too little

picks = st.integers(0, 1 << 16)
prompts = st.sampled_from(range(len(PROMPTS)))
firsts = st.sampled_from([0, 0, 1, 2])
counts = st.sampled_from([5, 5, 4, 3, 2, 1])


def something_visible(machine: "LedgerMachine") -> bool:
    return len(machine.model.visible) >= 3


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kvcellar-test-", dir="/dev/shm"))
        self.model = Model()
        self.epoch = 0
        self.patches = [mock.patch(f"kvcellar.ledger.{name}.SWEEP", 2) for name in ("shelf", "ledger")]
        for patch in self.patches:
            patch.start()
        self._serve()
        for ns in {ns.id: ns for ns in ENGINES.values()}.values():
            for group in range(len(ns.groups)):
                for _ in range(RACKS[ns.id]):
                    spec = self.arena.plan(ns, group)
                    assert spec is not None
                    key = self.arena.finish(self.arena.create(ns, spec))
                    self.ledger.open_room(ns).shelves[group].add_rack(key.number, self.arena.racks[key].table)
        for member in MEMBERS:
            self.attach(member, keep=True)

    def _serve(self) -> None:
        self.epoch += 1
        self.arena = Arena(self.root / "cellar", MEMORY)
        self.ledger = Ledger(self.epoch, HOLD_PAGES * 4096, SKETCH)
        self.ledger.set_grace(True)
        for found in self.arena.adopt():
            shelf = self.ledger.open_room(found.namespace).shelves[found.key.group]
            shelf.adopt(found.key.number, found.rack.table, found.scan.ready, found.scan.limbo)
        self._end_grace_when_all_are_back()

    def shelf(self, at: Cell) -> Shelf:
        return self.ledger.rooms[at.namespace].shelves[at.group]

    def pick_engine(self, pick: int, asks: Sequence[ChunkKey] = ()) -> str | None:
        """One whose scheduler is there, and for which something of what it asks for is there, if any."""
        there = sorted(member.engine for member in self.model.members if member.rank == SCHEDULER)
        there = [engine for engine in there if self.model.hit(engine, asks)] or there
        return there[pick % len(there)] if there else None

    def pick_use(self, pick: int, *, writing: bool) -> tuple[LeaseId, Use] | None:
        found = sorted(lease for lease, use in self.model.uses.items() if use.writing == writing)
        return (found[pick % len(found)], self.model.uses[found[pick % len(found)]]) if found else None

    # -- reading and writing ---------------------------------------------------------------------------------

    def _open(self, engine: str, granted: Granted, asked: list[ChunkKey], *, writing: bool) -> LeaseId | None:
        ns = ENGINES[engine]
        ranks = ns.parallel.writer_ranks if writing else range(ns.parallel.world_size)
        shares = {
            Share(rank, chunk, Spot(ns.id, group, place))
            for group, row in enumerate(granted.places)
            for chunk, place in enumerate(row)
            for rank in ranks
            if place != NO_PLACE
        }
        if granted.lease == NO_LEASE:
            assert not shares
            return None
        self.model.uses[granted.lease] = Use(engine, writing, asked[: granted.chunks], shares, set())
        assert self.model.fits(engine) >= 0
        return granted.lease

    def _lookup(self, engine: str, asked: list[ChunkKey]) -> LeaseId | None:
        ns = ENGINES[engine]
        granted = self.ledger.lookup(self.ledger.sessions[engine], ns.id, asked)
        assert granted.chunks == self.model.hit(engine, asked)
        found = {
            Cell(ns.id, group, asked[chunk]): Spot(ns.id, group, place)
            for group, row in enumerate(granted.places)
            for chunk, place in enumerate(row)
            if place != NO_PLACE
        }
        assert set(found) == set(needed(ns, asked[: granted.chunks]))
        for cell, spot in found.items():
            assert self.model.visible[cell] == spot
            assert self.model.bytes[spot] == dict.fromkeys(range(ns.parallel.kv_world_size), cell.key)
        return self._open(engine, granted, asked, writing=False)

    def _reserve(
        self,
        engine: str,
        asked: list[ChunkKey],
        parent: ChunkKey | None,
        groups: Sequence[int] | None = None,
    ) -> LeaseId | None:
        ns = ENGINES[engine]
        lost = parent is not None and not self.model.here() >= set(findable(ns, parent))
        session = self.ledger.sessions[engine]
        granted = self.ledger.reserve(session, ns.id, asked, parent, groups)
        assert (granted.reason == "orphan") == lost
        self._note_evictions(ns)
        busy = self.model.taken().union(*self.model.old.values())
        places = dict(zip(range(len(ns.groups)) if groups is None else groups, granted.places, strict=True))
        for (group, row), (chunk, key) in itertools.product(
            places.items(), enumerate(asked[: granted.chunks])
        ):
            cell, spot = Cell(ns.id, group, key), Spot(ns.id, group, row[chunk])
            here = cell in self.model.here()
            assert here == (spot.place == NO_PLACE), "written twice, or by nobody"
            if not here:
                assert spot not in busy, "granted for writing while somebody may touch it"
                self._claim(cell, spot)
        rows = [places.get(group, []) for group in range(len(ns.groups))]
        return self._open(engine, granted._replace(places=rows), asked, writing=True)

    def _claim(self, cell: Cell, spot: Spot) -> None:
        self.model.claimed[cell] = spot
        self.model.bytes[spot] = {}

    def _note_evictions(self, ns: Namespace) -> None:
        """What a reserve evicted: never in grace, never in use, never before what was stored upon it."""
        lost = set()
        for cell, spot in self.model.visible.items():
            stripe = self.shelf(cell).get(cell.key)
            if stripe is None or not stripe.ready:
                assert cell.namespace == ns.id
                assert spot not in self.model.in_use() | self.model.guarded
                lost.add(cell)
        assert not lost or not self.model.awaited
        here = self.model.here() - lost
        assert not {cell._replace(key=PARENT.get(cell.key, NOBODY)) for cell in here} & lost
        for cell in lost:
            self.model.forget(cell)

    def _answer(self, lease: LeaseId, rank: int, how: str, first: int, stop: int) -> None:
        use = self.model.uses[lease]
        stop = min(stop, len(use.asked))
        first = min(first, stop)
        mine = {share for share in use.shares if rank in (SCHEDULER, share.rank)}
        shares = {share for share in mine if first <= share.chunk < stop}
        count = getattr(self.ledger, how)(self.ledger.sessions[use.engine], rank, lease, first, stop)
        assert count == len({(share.chunk, share.spot) for share in shares})
        if shares:
            self.model.settle(lease, shares, abort=how == "abort")

    def _finish(self, lease: LeaseId | None, how: str) -> None:
        """All ranks answer for all they hold."""
        if lease is not None:
            for rank in sorted({share.rank for share in self.model.uses[lease].shares}):
                self._answer(lease, rank, how, 0, 5)

    @rule(pick=picks, prompt=prompts, count=counts, load=st.booleans())
    def lookup(self, pick: int, prompt: int, count: int, load: bool) -> None:
        if engine := self.pick_engine(pick, PROMPTS[prompt]):
            lease = self._lookup(engine, PROMPTS[prompt][:count])
            if load:
                self._finish(lease, "release")

    @rule(pick=picks, prompt=prompts, first=firsts, count=counts)
    def reserve(self, pick: int, prompt: int, first: int, count: int) -> None:
        if engine := self.pick_engine(pick):
            parent = PROMPTS[prompt][first - 1] if first else None
            self._reserve(engine, PROMPTS[prompt][first : first + count], parent)

    @rule(prompt=prompts, first=firsts, count=counts, groups=st.sampled_from([(0,), (1,), (1, 0)]))
    def reserve_in(self, prompt: int, first: int, count: int, groups: tuple[int, ...]) -> None:
        if Member("hybrid", SCHEDULER) in self.model.members:
            parent = PROMPTS[prompt][first - 1] if first else None
            self._reserve("hybrid", PROMPTS[prompt][first : first + count], parent, groups)

    @rule(pick=picks, prompt=prompts, count=counts)
    def store(self, pick: int, prompt: int, count: int) -> None:
        if engine := self.pick_engine(pick):
            self._finish(self._reserve(engine, PROMPTS[prompt][:count], None), "commit")

    @rule(pick=picks, first=firsts, count=counts, scheduler=st.booleans())
    def release(self, pick: int, first: int, count: int, scheduler: bool) -> None:
        if chosen := self.pick_use(pick, writing=False):
            rank = SCHEDULER if scheduler else pick % ENGINES[chosen[1].engine].parallel.world_size
            self._answer(chosen[0], rank, "release", first, first + count)

    @rule(pick=picks, how=st.sampled_from(["commit", "abort"]), first=firsts, count=counts)
    def answer(self, pick: int, how: str, first: int, count: int) -> None:
        if chosen := self.pick_use(pick, writing=True):
            writers = [*ENGINES[chosen[1].engine].parallel.writer_ranks]
            ranks = [*writers, SCHEDULER] if how == "abort" else writers
            self._answer(chosen[0], ranks[pick % len(ranks)], how, first, first + count)

    @rule(pick=picks)
    def commit(self, pick: int) -> None:
        if chosen := self.pick_use(pick, writing=True):
            self._finish(chosen[0], "commit")

    @rule(pick=picks)
    def condemn(self, pick: int) -> None:
        chosen = self.pick_use(pick, writing=False)
        if chosen is None:
            return
        lease, use = chosen
        share = sorted(use.shares)[pick % len(use.shares)]
        self.ledger.condemn(
            self.ledger.sessions[use.engine], share.rank, lease, share.spot.group, share.chunk
        )
        cell = Cell(*share.spot[:2], use.asked[share.chunk])
        if self.model.visible.get(cell) == share.spot:
            self.model.forget(cell)

    @precondition(something_visible)
    @rule(chosen=st.sampled_from([None, *RACKS]), meanwhile=st.lists(picks, max_size=6))
    def clear(self, chosen: NamespaceId | None, meanwhile: list[int]) -> None:
        self._clear(chosen)
        acts = [*self.acts_meanwhile()]
        for pick in meanwhile:
            acts[pick % len(acts)](pick // len(acts))
            audit(self.ledger)
            self.ledger_finds_exactly_what_is_visible()
        sweep(self.ledger)

    def _clear(self, chosen: NamespaceId | None) -> None:
        self.ledger.clear(chosen)
        for cell in self.model.here():
            if chosen in (None, cell.namespace):
                self.model.forget(cell)

    def acts_meanwhile(self) -> Iterator[Callable[[int], object]]:
        """What may happen while places that were cleared are not free yet."""
        yield lambda _: self.ledger.sweep()
        yield lambda pick: self.store(pick, pick % 3, 5)
        yield lambda pick: self.reserve(pick, pick % 3, 0, 5)
        yield lambda pick: self.lookup(pick, pick % 3, 5, load=False)
        yield self.commit
        yield lambda pick: self.answer(pick, "abort", 0, 1)
        yield lambda pick: self.release(pick, 0, 5, scheduler=False)
        yield self.condemn
        yield lambda pick: self.die(MEMBERS[pick % len(MEMBERS)])
        yield lambda _: self._clear(None)

    @precondition(lambda self: self.model.ended)
    @rule(pick=picks, how=st.sampled_from(["commit", "abort", "release"]))
    def speak_of_a_lease_that_is_over(self, pick: int, how: str) -> None:
        engine, lease = self.model.ended[pick % len(self.model.ended)]
        if engine in self.ledger.sessions:
            assert getattr(self.ledger, how)(self.ledger.sessions[engine], 0, lease, 0, 1) == 0

    @rule(pick=picks, writing=st.booleans())
    def speak_of_somebody_elses_lease(self, pick: int, writing: bool) -> None:
        chosen, engine = self.pick_use(pick, writing=writing), self.pick_engine(pick // 7)
        if chosen and engine and chosen[1].engine != engine:
            answer = self.ledger.abort if writing else self.ledger.release
            with pytest.raises(WrongOwner):
                answer(self.ledger.sessions[engine], SCHEDULER, chosen[0], 0, 1)

    # -- coming and going ------------------------------------------------------------------------------------

    @rule(member=st.sampled_from(MEMBERS), keep=st.booleans())
    def attach(self, member: Member, keep: bool) -> None:
        session = self.ledger.join(*member)
        if member.rank != SCHEDULER:
            self.model.drop({member})
        self.model.members.add(member)
        if member.rank == SCHEDULER:
            self.ledger.register(session, member.rank, ENGINES[member.engine])
            mine = sorted(lease for lease, use in self.model.uses.items() if use.engine == member.engine)
            known = mine if keep else mine[::2]
            self.ledger.keep_leases(session, known)
            for lease in set(mine) - set(known):
                self.model.settle(lease, self.model.uses[lease].shares, abort=True)
        self._back_or_dead(member)

    def _back_or_dead(self, member: Member) -> None:
        self.model.awaited.discard(member)
        self.model.old.pop(member, None)
        self._end_grace_when_all_are_back()

    def _end_grace_when_all_are_back(self) -> None:
        if self.ledger.in_grace and not self.model.awaited:
            end_grace(self.ledger)
            self.model.guarded = set()

    @rule(member=st.sampled_from(MEMBERS))
    def die(self, member: Member) -> None:
        if member in self.model.members:
            self.ledger.part(self.ledger.sessions[member.engine], member.rank)
            self.model.members.discard(member)
            self.model.drop({member})
            if Member(member.engine, SCHEDULER) not in self.model.members:
                self.model.drop({m for m in MEMBERS if m.engine == member.engine} - self.model.members)
        self._back_or_dead(member)

    @precondition(something_visible)
    @rule(schedulers_return=st.booleans())
    def crash(self, schedulers_return: bool) -> None:
        self._stop()
        self.model.crash()
        self._serve()
        for engine in ENGINES if schedulers_return else ():
            self.attach(Member(engine, SCHEDULER), keep=True)

    @rule()
    def everybody_returns(self) -> None:
        for member in sorted({*MEMBERS} - self.model.members):
            self.attach(member, keep=True)

    def _stop(self) -> None:
        """As kill -9 would: the kernel closes descriptors, nothing is said or written."""
        for rack in self.arena.racks.values():
            rack.close()
        os.close(self.arena._lock)

    # -- what always holds -----------------------------------------------------------------------------------

    @invariant()
    def tables_and_free_places_agree_with_the_model(self) -> None:
        audit(self.ledger)
        taken, visible = self.model.taken(), set(self.model.visible.values())
        for room in self.ledger.rooms.values():
            for group, shelf in enumerate(room.shelves):
                states = {Spot(room.namespace.id, group, place): state for place, state in slots(shelf)}
                occupied = {spot for spot, state in states.items() if state != FREE}
                assert {spot for spot, state in states.items() if state == READY} == visible & set(states)
                assert taken & set(states) <= occupied
                # In grace a shelf may keep back more than it must, not after.
                assert self.ledger.in_grace or occupied <= taken
                assert shelf.free_slots == len(states) - len(occupied)

    @invariant()
    def ledger_finds_exactly_what_is_visible(self) -> None:
        for cell in self.model.here():
            stripe = self.shelf(cell).get(cell.key)
            assert stripe is not None
            assert stripe.ready == (cell in self.model.visible)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            try:
                self.everything_is_free_when_all_are_gone()
            finally:
                self._stop()
                shutil.rmtree(self.root)
                for patch in self.patches:
                    patch.stop()

    def everything_is_free_when_all_are_gone(self) -> None:
        for member in MEMBERS:
            self.die(member)
        assert not self.ledger.sessions
        self.tables_and_free_places_agree_with_the_model()
        for shelf in [shelf for room in self.ledger.rooms.values() for shelf in room.shelves]:
            assert shelf.free_slots + len(shelf) == shelf.slots
            assert shelf.idle_racks() == {*shelf.tables}
            assert all(shelf.take(key, None) for key in keys(shelf.slots, "stranger"))


def slots(shelf: Shelf) -> Iterator[tuple[Place, int]]:
    for number, table in shelf.tables.items():
        assert isinstance(table, StripeTable)
        yield from ((place_of(number, slot), table.state(slot)) for slot in range(table.slots))


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=250, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
