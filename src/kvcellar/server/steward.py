"""The steward: makes racks ahead of need, and takes them back when another namespace has none.

Growing comes before evicting, and never on the event loop: making a rack allocates every page of it, and
returning it frees them. Taking a rack back first empties it, then asks every worker that maps it to let go,
and only then returns its memory.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvcellar.arena import Arena, RackKey, RackSpec
from kvcellar.errors import BadRequest
from kvcellar.identity import Namespace, NamespaceId, stripe_bytes
from kvcellar.ledger import Ledger, Room
from kvcellar.server.members import Members
from kvcellar.wire.messages import RackAdded, RackLeaving

log = logging.getLogger(__name__)

# After the file system refused to grow: it is asked again, but not at every store.
_RETRY_S = 5.0
# How long the engines that map a rack have to let go of it, before another rack is tried.
_RETURN_S = 0.5
# To look for a rack to take is to look at every stripe. Where there is none, the next look comes after so
# many times as long as this one took, or _RETRY_S, and not at every store.
_LOOKS_APART = 10


class Steward:
    def __init__(self, ledger: Ledger, arena: Arena, members: Members, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._arena = arena
        self._members = members
        self._clock = clock
        self._threads = ThreadPoolExecutor(2, "kvcellar-racks")
        self._growing: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._retry_at = 0.0
        self._look_at = 0.0
        self._let_go = asyncio.Event()  # by the last that mapped a rack
        self.leaving: set[RackKey] = set()  # until their memory has been returned
        self._returning: dict[RackKey, asyncio.Task[None]] = {}  # those of them that nobody maps any more
        self.draining = False  # no rack is announced any more: nobody could fetch it
        self.unmap: Callable[[RackKey], None] = lambda _: None  # what the server itself maps, for its tiers
        members.changed = self.released

    def adopt(self) -> int:
        """Take over what an earlier server left; returns the number of stripes found again."""
        found = 0
        for adopted in self._arena.adopt():
            room = self._ledger.open_room(adopted.namespace)
            shelf = room.shelves[adopted.key.group]
            found += shelf.adopt(
                adopted.key.number, adopted.rack.table, adopted.scan.ready, adopted.scan.limbo
            )
        return found

    def check_fits(self, namespace: Namespace) -> None:
        """Refuse a geometry of which not even one chunk could ever be held."""
        chunk = sum(stripe_bytes(namespace, group) for group in range(len(namespace.groups)))
        if chunk > self._ledger.hold_limit:
            raise BadRequest(
                f"one chunk takes {chunk} bytes, an engine may hold {self._ledger.hold_limit}: raise --memory"
            )

    def close_rooms(self) -> None:
        """Forget every namespace that has no rack and no engine, or each new one would stay for ever."""
        kept: set[bytes] = {name for one in self._ledger.sessions.values() for name in one.namespaces}
        kept |= {key.namespace for key in self._arena.racks} | {name for name, _ in self._growing}
        for name in [
            name for name, room in self._ledger.rooms.items() if name not in kept and not room.pinned
        ]:
            del self._ledger.rooms[name]
            shutil.rmtree(self._arena.folder / name.hex(), ignore_errors=True)

    def shard_of(self, namespace: NamespaceId, rank: int) -> int:
        return self._ledger.rooms[namespace].namespace.parallel.kv_worker_id(rank)

    def grow(self, room: Room, group: int, stripes: int) -> asyncio.Task[None] | None:
        """See to it that there are free places for `stripes`, and some more. Returns what to wait for, if
        anything.

        None means: as good as it gets, now or ever; evict for the rest.
        """
        if self._ledger.rooms.get(room.namespace.id) is not room:
            return None  # forgotten meanwhile: nobody would know of its memory, or take it back
        shelf = room.shelves[group]
        needed = shelf.free_slots < max(stripes, shelf.slots // 4)
        if self.draining or (not needed and shelf.slots >= self._headroom(room)):
            return None
        key = (room.namespace.id, group)
        task = self._growing.get(key)
        if task is None and self._clock() >= self._retry_at:
            task = self._start(room, group, may_take=needed)
            if task is not None:
                self._growing[key] = task
                task.add_done_callback(lambda done: self._grown(key, done))
        return task if shelf.free_slots < stripes else None

    def _grown(self, key: tuple[bytes, int], task: asyncio.Task[None]) -> None:
        if self._growing.get(key) is task:  # it may have started the next one
            del self._growing[key]

    def _headroom(self, room: Room) -> int:
        """Chunks of its share of all memory: what was granted is made ready before it is needed.

        Engines map it, and page-lock it for their GPUs, while they start, and not under their first requests.
        """
        return self._arena.limit // (max(1, len(self._ledger.rooms)) * room.chunk_bytes)

    def _start(self, room: Room, group: int, *, may_take: bool) -> asyncio.Task[None] | None:
        spec = self._arena.plan(room.namespace, group)
        if spec is not None:
            return asyncio.create_task(self._make_rack(room, group, spec))
        victim = self._victim(room, group) if may_take else None
        if victim is None:
            return None
        # At once: a moment later somebody may use it, or another namespace choose the same one.
        self.leaving.add(victim)
        self._ledger.rooms[victim.namespace].shelves[victim.group].retire(victim.number)
        return asyncio.create_task(self._take_back(victim))

    async def _make_rack(self, room: Room, group: int, spec: RackSpec) -> None:
        loop = asyncio.get_running_loop()
        try:
            rack = await loop.run_in_executor(self._threads, self._arena.create, room.namespace, spec)
        except OSError as error:
            self._arena.cancel(spec)
            self._retry_at = self._clock() + _RETRY_S
            self._ledger.counts["growth_refused"] += 1
            log.warning("no more shared memory (%s); making room by eviction instead", error.strerror)
            return
        key = self._arena.finish(rack)
        room.shelves[group].add_rack(key.number, rack.table)
        if self.draining:
            return
        self._members.tell(key.namespace, RackAdded(*key))
        self._growing.pop((key.namespace, group), None)
        self.grow(room, group, 0)

    def _victim(self, room: Room, group: int) -> RackKey | None:
        """A rack to take from a namespace that has more than its share, for one that has less."""
        sizes: dict[NamespaceId, int] = {}
        for key, rack in self._arena.racks.items():
            sizes[key.namespace] = sizes.get(key.namespace, 0) + rack.spec.file_bytes
        used = {name for session in self._ledger.sessions.values() for name in session.namespaces}
        share = self._arena.limit // max(1, len(used | {room.namespace.id}))
        mine = sizes.pop(room.namespace.id, 0)
        if self._ledger.in_grace or (mine >= share and room.shelves[group].slots):
            return None
        rich = [name for name in sizes if name not in used or sizes[name] > share]
        return self._look(sorted(rich, key=lambda name: (name in used, -sizes[name])))

    def _look(self, namespaces: list[NamespaceId]) -> RackKey | None:
        """The first rack of these that can be taken."""
        began = self._clock()
        rooms = [room for name in namespaces if not (room := self._ledger.rooms[name]).pinned]
        if not rooms or began < self._look_at:
            return None
        for room in rooms:
            name = room.namespace.id
            idle = [shelf.idle_racks() for shelf in room.shelves]  # what is leaving is on no shelf
            for key in sorted((key for key in self._arena.racks if key.namespace == name), reverse=True):
                if key.number in idle[key.group] and self._may_be_taken(key):
                    return key
        ended = self._clock()
        self._look_at = ended + min(_RETRY_S, _LOOKS_APART * (ended - began))
        return None

    def _may_be_taken(self, key: RackKey) -> bool:
        """Nobody maps it who has yet to let go of another: a stalled engine costs one rack."""
        return not any(member.maps & self.leaving for member in self._members.mapping(key))

    async def _take_back(self, key: RackKey) -> None:
        for member in self._members.mapping(key):  # also of engines that have gone on to another namespace
            if member.link is not None:
                member.link.send(RackLeaving(*key))
        self.released()
        with contextlib.suppress(TimeoutError):  # a stalled engine: its rack goes when it can, do without
            async with asyncio.timeout(_RETURN_S):
                while key in self.leaving and key not in self._returning:
                    self._let_go.clear()
                    await self._let_go.wait()
        if key in self._returning:
            await self._returning[key]

    def released(self) -> None:
        """Somebody left or unmapped something: return what nobody maps any more."""
        if self.draining:
            return  # it is empty: the next server may have it
        for key in self.leaving - self._returning.keys():
            if not self._members.mapping(key):
                self.unmap(key)
                self._returning[key] = asyncio.create_task(self._return(key))
                self._let_go.set()

    async def _return(self, key: RackKey) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._arena.remove, key)
        self._arena.removed(key)
        self.leaving.discard(key)
        del self._returning[key]

    async def close(self) -> None:
        for task in [*self._growing.values(), *self._returning.values()]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._threads.shutdown(wait=True)
