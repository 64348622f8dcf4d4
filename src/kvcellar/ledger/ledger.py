"""The ledger: who may read and write what, decided at once and in memory.

Every method is synchronous, never waits, and leaves all books balanced (`audit`). Reads and writes of engine
memory happen elsewhere and later; an engine acts on a decision only while it holds the lease. The rules:

* A stripe is found only when all its writers committed it. One abort, by any writer, aborts it for all.
* A stripe is freed only when every rank that could touch it has answered or its process is gone.
* Whatever is asked twice, or for a lease of an earlier server, changes nothing and is counted.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

from kvcellar.epoch import numbers
from kvcellar.errors import BadRequest, UnknownNamespace, WrongOwner
from kvcellar.identity import (
    ChunkKey,
    Namespace,
    NamespaceId,
    fold_windows,
    needed_chunks,
)
from kvcellar.ledger.lease import Lease, LeaseId
from kvcellar.ledger.own import OwnPins
from kvcellar.ledger.room import Room
from kvcellar.ledger.session import SCHEDULER, Session
from kvcellar.ledger.shelf import SWEEP, Shelf
from kvcellar.ledger.stripe import Stripe
from kvcellar.sketch import OwnSketch
from kvcellar.slab import NO_PLACE

NO_LEASE = LeaseId(0)
MAX_NAMESPACES = 8  # of a session; while weights are updated it has two


class Granted(NamedTuple):
    """The answer to a lookup or a reserve: places by group, NO_PLACE where there is nothing to read or to
    write.
    """

    lease: LeaseId
    chunks: int
    places: list[list[int]]
    reason: str = ""


class Ledger:
    def __init__(self, epoch: int, hold_limit: int, sketch: OwnSketch | None = None) -> None:
        self.epoch = epoch
        self.hold_limit = hold_limit  # bytes one session may keep pinned or in writing
        self.rooms: dict[NamespaceId, Room] = {}
        self.sessions: dict[str, Session] = {}
        self.counts: Counter[str] = Counter()
        self.in_grace = False
        self.own = OwnPins()
        self._sketch = sketch
        # Told of stripes that were just published, later chunks first: what write-back begins with.
        self.published: Callable[[Room, int, list[Stripe]], None] | None = None
        # Told of stripes that were read, later chunks first: those not used since the eviction policy looked.
        self.used: Callable[[Room, int, list[Stripe]], None] | None = None
        self.newest_lease = NO_LEASE  # a rank that joins has no share in any up to here
        self._lease_ids = numbers(epoch)

    # -- who is there ----------------------------------------------------------------------------------------

    def join(self, name: str, rank: int) -> Session:
        """A rank's process attached. A worker that attaches says "I hold nothing": every share it had is
        over, those too that were granted while it was away.
        """
        session = self.sessions.setdefault(name, Session(name))
        if rank != SCHEDULER:
            self._drop_shares(session, [rank])
        session.members.add(rank)
        return session

    def keep_leases(self, session: Session, known: Iterable[LeaseId]) -> None:
        """The scheduler attached again and knows these leases. Any other was lost on the way to it, so no
        rank was told.
        """
        known = set(known)
        for lease in [lease for lease in session.leases.values() if lease.id not in known]:
            self._settle(session, lease, lease.left, lease.mask(0, lease.chunks), abort=True)

    def part(self, session: Session, rank: int) -> None:
        """A rank's process is gone, so nothing it was doing goes on."""
        session.members.discard(rank)
        self._drop_shares(session, [rank])
        if SCHEDULER not in session.members:
            # Nobody is left who could tell absent ranks of their shares.
            absent = {rank for lease in session.leases.values() for rank in lease.left} - session.members
            self._drop_shares(session, absent)
        if not session.members:
            assert not session.leases
            if self.sessions.get(session.name) is session:  # not another of the same name, come since
                del self.sessions[session.name]

    def register(self, session: Session, rank: int, namespace: Namespace) -> Room:
        """The engine works with this namespace. Its scheduler knows of one at a time: after an update of the
        weights the last one is nobody's, unless others use it too. Memory is shared out among namespaces, so
        nobody may have many.
        """
        if rank != SCHEDULER and len(session.namespaces | {namespace.id}) > MAX_NAMESPACES:
            raise BadRequest(f"a session works with {MAX_NAMESPACES} namespaces at most")
        room = self.open_room(namespace)
        if rank == SCHEDULER:
            session.namespaces.clear()
        session.namespaces.add(namespace.id)
        return room

    def open_room(self, namespace: Namespace) -> Room:
        room = self.rooms.get(namespace.id)
        if room is None:
            room = self.rooms[namespace.id] = Room(namespace, self._sketch)
            room.set_guarded(self.in_grace)
        return room

    def set_grace(self, in_grace: bool) -> None:
        """After a restart engines may still read what an earlier server granted, and write what it reserved.

        Until grace ends nothing is evicted, and no place that somebody may still use is given out. When it
        has ended there are some to sweep.
        """
        self.in_grace = in_grace
        for room in self.rooms.values():
            room.set_guarded(in_grace)

    # -- reading ---------------------------------------------------------------------------------------------

    def lookup(self, session: Session, namespace_id: NamespaceId, keys: Sequence[ChunkKey]) -> Granted:
        """Pin the longest prefix of `keys` that every group can serve, one share per rank."""
        granted = self.find(session, namespace_id, keys)
        session.counts["lookups"] += 1
        session.counts["asked_chunks"] += len(keys)
        session.counts["hit_chunks"] += granted.chunks
        return granted

    def may_hold(self, session: Session, instead_of: LeaseId = NO_LEASE) -> int:
        """Bytes beyond what it holds, but for a lease that it will give back for the new one."""
        other = session.leases.get(instead_of)
        return self.hold_limit - session.held_bytes + (other.held_bytes if other is not None else 0)

    def find(
        self,
        session: Session,
        namespace_id: NamespaceId,
        keys: Sequence[ChunkKey],
        instead_of: LeaseId = NO_LEASE,
    ) -> Granted:
        """A lookup that is not counted as one."""
        room = self.rooms.get(namespace_id)
        if room is None or namespace_id not in session.namespaces:
            return Granted(NO_LEASE, 0, [], "unknown_namespace")
        fits = room.chunks_within(self.may_hold(session, instead_of), len(keys))
        rows = [
            shelf.find_run(keys[:fits], gaps=window is not None)
            for shelf, window in zip(room.shelves, room.windows, strict=True)
        ]
        chunks = min(map(len, rows))
        if room.has_windows:
            chunks = fold_windows(chunks, room.windows, lambda group, chunk: rows[group][chunk] is not None)
        if not chunks:
            return Granted(NO_LEASE, 0, [], "hold_limit" if keys and not fits else "")
        for row, window in zip(rows, room.windows, strict=True):
            if window is not None:
                first = needed_chunks(chunks, window).start
                row[:first] = [None] * first
            del row[chunks:]
        return self._pin(session, room, chunks, rows, "hold_limit" if chunks == fits < len(keys) else "")

    def _pin(
        self, session: Session, room: Room, chunks: int, rows: list[list[Stripe | None]], reason: str
    ) -> Granted:
        for shelf, row, window in zip(room.shelves, rows, room.windows, strict=True):
            # Only a window leaves gaps.
            held = cast(list[Stripe], row) if window is None else [s for s in row if s is not None]
            shelf.pin(held)
            session.held_bytes += shelf.stripe_bytes * len(held)
        lease_id = self._open(session, room, tuple(range(len(rows))), chunks, rows, writing=False)
        return Granted(lease_id, chunks, _places(rows), reason)

    # -- writing ---------------------------------------------------------------------------------------------

    def reserve(
        self,
        session: Session,
        namespace_id: NamespaceId,
        keys: Sequence[ChunkKey],
        parent: ChunkKey | None,
        groups: Sequence[int] | None = None,
    ) -> Granted:
        """Places for the longest prefix of `keys` for which there is room.

        `parent` is the key of the chunk before the first. What is here already, or being written by somebody,
        gets no place. Nor does what nobody could find: a prompt's beginning may have been evicted while the
        engine computes the rest, or an answer's while it grows.
        """
        room = self.rooms.get(namespace_id)
        if room is None or namespace_id not in session.namespaces:
            raise UnknownNamespace("register the namespace first")
        chosen = tuple(range(len(room.shelves))) if groups is None else tuple(groups)
        if len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(len(room.shelves))):
            raise BadRequest(f"groups {chosen} of {len(room.shelves)}")
        if parent is not None and self._is_lost(room, parent):
            return Granted(NO_LEASE, 0, [[] for _ in chosen], "orphan")
        shelves = [room.shelves[group] for group in chosen]
        rows: list[list[Stripe | None]] = [[] for _ in shelves]
        reason = ""
        for key in keys:
            column = self._take(session, shelves, key, parent)
            if column is None:
                held = session.held_bytes + sum(shelf.stripe_bytes for shelf in shelves)
                reason = "hold_limit" if held > self.hold_limit else "no_room"
                break
            for row, stripe in zip(rows, column, strict=True):
                row.append(stripe)
            parent = key
        chunks = len(rows[0]) if rows else 0
        taken = sum(stripe is not None for row in rows for stripe in row)
        session.counts.update(reserved=taken)
        lease_id = self._open(session, room, chosen, chunks, rows, writing=True) if taken else NO_LEASE
        return Granted(lease_id, chunks, _places(rows), reason)

    def _is_lost(self, room: Room, key: ChunkKey) -> bool:
        """Whether no hit can get past this chunk. Where there are tiers, one of them may have it."""
        return self.published is None and room.lacks(key)

    def _take(
        self, session: Session, shelves: list[Shelf], key: ChunkKey, parent: ChunkKey | None
    ) -> list[Stripe | None] | None:
        """One chunk's stripes in all asked groups, or None and nothing taken."""
        column: list[Stripe | None] = []
        for shelf in shelves:
            if shelf.get(key) is not None:
                column.append(None)
                continue
            fits = session.held_bytes + shelf.stripe_bytes <= self.hold_limit
            stripe = shelf.take(key, parent) if fits else None
            if stripe is None:
                for other, taken in zip(shelves, column, strict=False):
                    if taken is not None:
                        session.held_bytes -= other.stripe_bytes
                        other.remove(taken, "aborted")
                return None
            session.held_bytes += shelf.stripe_bytes
            column.append(stripe)
        return column

    def commit(self, session: Session, rank: int, lease_id: LeaseId, first: int, stop: int) -> int:
        """A writer has all its bytes of these chunks in place. Returns how many stripes it still answered
        for.
        """
        return self._answer(session, rank, lease_id, first, stop, writing=True, abort=False)

    def abort(self, session: Session, rank: int, lease_id: LeaseId, first: int, stop: int) -> int:
        """These chunks will not be written: by this rank, or, from the scheduler, by any (no rank was told
        yet).
        """
        return self._answer(session, rank, lease_id, first, stop, writing=True, abort=True)

    def release(self, session: Session, rank: int, lease_id: LeaseId, first: int, stop: int) -> int:
        """This rank is done reading; from the scheduler, all ranks are (none was told yet)."""
        return self._answer(session, rank, lease_id, first, stop, writing=False, abort=False)

    def condemn(self, session: Session, rank: int, lease_id: LeaseId, group: int, chunk: int) -> int:
        """A reader found wrong bytes: nobody shall find this stripe again. Returns how many went, 0 or 1."""
        lease = self._lease(session, lease_id)
        if lease is None:
            return 0
        bit = lease.bit(group, chunk)
        if lease.writing or not lease.held([rank]) >> bit & 1:
            raise WrongOwner(f"rank {rank} does not read group {group}, chunk {chunk}")
        stripe = lease.stripes[bit]
        assert stripe is not None
        if not stripe.indexed:
            return 0
        lease.room.shelves[group].hide(stripe, "corrupt")
        self.counts["corrupt"] += 1
        return 1

    # -- the operator ----------------------------------------------------------------------------------------

    def clear(self, namespace_id: NamespaceId | None = None) -> int:
        """Forget everything, or one namespace. What is being read stays until it has been read, but is not
        found again. The memory is there to be swept.
        """
        if namespace_id is not None and namespace_id not in self.rooms:
            raise UnknownNamespace(namespace_id.hex())
        chosen = self.rooms.values() if namespace_id is None else [self.rooms[namespace_id]]
        return sum(shelf.clear() for room in chosen for shelf in room.shelves)

    def sweep(self) -> bool:
        """Free some of what a clear, or the end of grace, has left behind. False: that was all."""
        left = SWEEP
        for shelf in (shelf for room in self.rooms.values() for shelf in room.shelves):
            left -= shelf.sweep(left)
        return not left

    def set_pinned(self, namespace_id: NamespaceId, pinned: bool) -> None:
        room = self.rooms.get(namespace_id)
        if room is None:
            raise UnknownNamespace(namespace_id.hex())
        room.set_pinned(pinned)

    # -- leases ----------------------------------------------------------------------------------------------

    def _open(
        self,
        session: Session,
        room: Room,
        groups: tuple[int, ...],
        chunks: int,
        rows: list[list[Stripe | None]],
        *,
        writing: bool,
    ) -> LeaseId:
        parallel = room.namespace.parallel
        ranks = parallel.writer_ranks if writing else range(parallel.world_size)
        what, shares = ("stores", "write_shares") if writing else ("hits", "read_shares")
        session.counts[what] += 1
        session.counts[shares] += len(ranks)
        lease_id = self.newest_lease = LeaseId(next(self._lease_ids))
        stripes = rows[0] if len(rows) == 1 else [stripe for row in rows for stripe in row]
        session.leases[lease_id] = Lease(lease_id, room, groups, chunks, stripes, ranks, writing=writing)
        return lease_id

    def _lease(self, session: Session, lease_id: LeaseId) -> Lease | None:
        lease = session.leases.get(lease_id)
        if lease is None:
            if any(lease_id in other.leases for other in self.sessions.values()):
                raise WrongOwner(f"lease {lease_id:#x} is not yours")
            self.counts["stale"] += 1
        return lease

    def _answer(
        self,
        session: Session,
        rank: int,
        lease_id: LeaseId,
        first: int,
        stop: int,
        *,
        writing: bool,
        abort: bool,
    ) -> int:
        lease = self._lease(session, lease_id)
        if lease is None:
            return 0
        if lease.writing != writing:
            raise BadRequest(f"{lease} is not for that")
        mask = lease.mask(first, stop)
        if rank == SCHEDULER:
            if writing and not abort:
                raise WrongOwner("only the rank that wrote can commit")
            ranks = list(lease.left)
        else:
            ranks = [rank]
        held = lease.held(ranks) & mask
        if held:
            self._settle(session, lease, ranks, mask, abort=abort)
        else:
            self.counts["repeated"] += 1
        return held.bit_count()

    def _settle(
        self, session: Session, lease: Lease, ranks: Iterable[int], mask: int, *, abort: bool
    ) -> None:
        """These ranks are done with these bits; see to the stripes that nobody answers for any more."""
        done = lease.settle(ranks, mask, abort=abort)
        for position, group in enumerate(lease.groups):
            shelf = lease.room.shelves[group]
            good, bad = (
                lease.pick(done & ~lease.aborted, position),
                lease.pick(done & lease.aborted, position),
            )
            session.held_bytes -= shelf.stripe_bytes * (len(good) + len(bad))
            if lease.writing:
                session.counts["committed"] += shelf.publish(good)
                if self.published is not None:
                    self.published(lease.room, group, good)
                for stripe in bad:
                    shelf.remove(stripe, "aborted")
            else:
                read = good + bad
                if self.used is not None:
                    self.used(lease.room, group, [one for one in read if not (one.visited or one.temporary)])
                shelf.unpin(read)
        if lease.is_over:
            del session.leases[lease.id]

    def _drop_shares(self, session: Session, ranks: Iterable[int]) -> None:
        for lease in list(session.leases.values()):
            self._settle(
                session,
                lease,
                [rank for rank in ranks if rank in lease.left],
                lease.mask(0, lease.chunks),
                abort=True,
            )


def _places(rows: list[list[Stripe | None]]) -> list[list[int]]:
    return [[NO_PLACE if stripe is None else stripe.place for stripe in row] for row in rows]
