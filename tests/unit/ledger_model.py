"""What the ledger should do, as a small model: it knows nothing of pins, states or leases. It remembers which
rank may touch which place, and what bytes lie there.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvcellar.identity import ChunkKey, Namespace, NamespaceId, ParallelStrategy
from kvcellar.ledger import SCHEDULER, LeaseId, Stripe
from tests.support import full_group, keys, namespace, window_group

TP2 = namespace(parallel=ParallelStrategy(tp=2))
MLA2 = namespace(parallel=ParallelStrategy(tp=2, mla=True))
HYBRID = namespace(groups=(full_group(), window_group(1)))
ENGINES = {"a": TP2, "b": TP2, "mla": MLA2, "hybrid": HYBRID}
WINDOWS: dict[NamespaceId, list[int | None]] = {TP2.id: [None], MLA2.id: [None], HYBRID.id: [None, 1]}
PAGES = {TP2.id: 2, MLA2.id: 1, HYBRID.id: 1}  # per stripe
HOLD_PAGES = 10

TRUNK = keys(2, "trunk")
PROMPTS = [TRUNK + keys(3, "left"), TRUNK + keys(3, "right"), keys(4, "alone")]
NOBODY = ChunkKey(b"")
PARENT = {child: parent for prompt in PROMPTS for parent, child in itertools.pairwise(prompt)}


class Member(NamedTuple):
    engine: str
    rank: int


class Cell(NamedTuple):
    """One chunk in one group of a namespace."""

    namespace: NamespaceId
    group: int
    key: ChunkKey


class Spot(NamedTuple):
    """One place in one group of a namespace."""

    namespace: NamespaceId
    group: int
    place: int


class Share(NamedTuple):
    """A rank may touch this spot, under a lease, for a chunk of it."""

    rank: int
    chunk: int
    spot: Spot


class Use(NamedTuple):  # one lease
    engine: str
    writing: bool
    asked: list[ChunkKey]
    shares: set[Share]
    spoiled: set[Spot]


class Hold(NamedTuple):
    """The server's own: a pin, or a place that it fills."""

    cell: Cell
    spot: Spot
    stripe: Stripe


MEMBERS = [Member(name, rank) for name, ns in ENGINES.items() for rank in (SCHEDULER, *range(ns.parallel.tp))]


class Model:
    def __init__(self) -> None:
        self.members: set[Member] = set()
        self.uses: dict[LeaseId, Use] = {}
        self.ended: list[tuple[str, LeaseId]] = []
        self.visible: dict[Cell, Spot] = {}
        self.claimed: dict[Cell, Spot] = {}  # being written, and not cleared meanwhile
        self.temporary: set[Cell] = set()
        self.bytes: dict[Spot, dict[int, ChunkKey]] = {}  # by shard; none while being written
        # Of earlier servers: who has not come back, what they may still touch, what was not free then.
        self.awaited: set[Member] = set()
        self.old: defaultdict[Member, set[Spot]] = defaultdict(set)
        self.guarded: set[Spot] = set()
        self.pins: list[Hold] = []
        self.fetches: list[Hold] = []

    def in_use(self) -> set[Spot]:
        shares = {share.spot for use in self.uses.values() for share in use.shares}
        return shares | {hold.spot for hold in self.pins + self.fetches}

    def taken(self) -> set[Spot]:
        return self.in_use() | self.guarded | set(self.visible.values())

    def here(self) -> set[Cell]:
        return {*self.visible, *self.claimed}

    def fits(self, engine: str) -> int:
        """Pages that the engine may still hold."""
        mine = [(lease, use) for lease, use in self.uses.items() if use.engine == engine]
        held = {(lease, share.chunk, share.spot) for lease, use in mine for share in use.shares}
        return HOLD_PAGES - len(held) * PAGES[ENGINES[engine].id]

    def hit(self, engine: str, asked: Sequence[ChunkKey]) -> int:
        ns, fits = ENGINES[engine], self.fits(engine)
        for end in range(len(asked), 0, -1):
            cells = list(needed(ns, asked[:end]))
            if len(cells) * PAGES[ns.id] <= fits and self.visible.keys() >= set(cells):
                return end
        return 0

    def settle(self, lease: LeaseId, shares: Iterable[Share], *, abort: bool) -> None:
        """These shares are given back; what nobody holds any more is published, spoiled or let go."""
        use = self.uses[lease]
        shares, ns = set(shares), ENGINES[use.engine]
        for rank, chunk, spot in shares if use.writing and not abort else ():
            self.bytes[spot][ns.parallel.kv_worker_id(rank)] = use.asked[chunk]
        use.shares.difference_update(shares)
        if abort:
            use.spoiled.update(share.spot for share in shares)
        for cell, spot in {(Cell(*s.spot[:2], use.asked[s.chunk]), s.spot) for s in shares}:
            if spot not in {share.spot for share in use.shares}:
                self._let_go(cell, spot, use)
        if not use.shares:
            del self.uses[lease]
            self.ended.append((use.engine, lease))

    def _let_go(self, cell: Cell, spot: Spot, use: Use) -> None:
        if not use.writing:
            self.unread(cell, spot)
        elif self.claimed.get(cell) == spot:
            del self.claimed[cell]
            if spot in use.spoiled:
                self.forget(cell)
            else:
                self.visible[cell] = spot

    def unread(self, cell: Cell, spot: Spot) -> None:
        """One reader less."""
        if cell in self.temporary and self.visible.get(cell) == spot and spot not in self.in_use():
            self.forget(cell)

    def forget(self, cell: Cell) -> None:
        self.visible.pop(cell, None)
        self.claimed.pop(cell, None)
        self.temporary.discard(cell)

    def drop(self, gone: set[Member]) -> None:
        for lease, use in list(self.uses.items()):
            shares = {share for share in use.shares if Member(use.engine, share.rank) in gone}
            if shares:
                self.settle(lease, shares, abort=True)

    def crash(self) -> None:
        self.guarded = self.taken()
        for use in self.uses.values():
            for share in use.shares:
                self.old[Member(use.engine, share.rank)].add(share.spot)
        self.ended += [(use.engine, lease) for lease, use in self.uses.items()]
        self.awaited |= self.members
        for kept in (self.members, self.uses, self.temporary, self.pins, self.fetches):
            kept.clear()
        for cell in list(self.claimed):
            self.forget(cell)


def needed(ns: Namespace, hit: Sequence[ChunkKey]) -> Iterator[Cell]:
    for group, window in enumerate(WINDOWS[ns.id]):
        for key in hit if window is None else hit[-window:]:
            yield Cell(ns.id, group, key)


def findable(ns: Namespace, key: ChunkKey) -> Iterator[Cell]:
    """Without these no hit gets past the chunk."""
    return (Cell(ns.id, group, key) for group, window in enumerate(WINDOWS[ns.id]) if window is None)
