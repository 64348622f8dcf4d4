"""The books of the disk engine: what lies in which slot, what is free, and what to do when nothing is.

Decides and counts, and does no I/O: where a file has to be made or removed first, it says so (Grow, GiveUp),
has set the bytes aside, and is told how it went. So the sum of all files never exceeds the capacity, not even
for a moment. Not thread-safe: the engine holds its lock around every call.

    free --take--> in use, being written --publish--> ready --evict, drop--> free
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from kvcellar.errors import EngineError
from kvcellar.identity import ChunkKey
from kvcellar.ledger.policy import EvictionPolicy, SecondChance
from kvcellar.ledger.stripe import Stripe
from kvcellar.slab import MAX_RACKS, PAGE, Place, place_of, rack_of, slot_of
from kvcellar.tiers.crate import CrateShape, fit_shape

# A crate is a 64th of the disk, so that a new size finds its share soon, within these bounds.
_SHARE, _SMALLEST, _LARGEST = 64, 256 << 10, 4 << 30
# After the file system refused to give more: it is asked again, but not at every write. Nor does more than
# one crate go in that time to make room in it, or writes would empty the disk while others fill it.
_RETRY_S = 5.0
# How long a bad slot is left unused: what failed may have been the space behind it.
_LEFT_S = 3600.0
# When so many slots failed one after the other, a 64th of those of that size, it is the disk.
_LEAST_FAILED, _MOST_FAILED = 4, 64


class Grow(NamedTuple):
    """Make this crate, then say `grown` or `not_grown`."""

    number: int
    shape: CrateShape


class GiveUp(NamedTuple):
    """Remove this crate, then say `removed` or `not_removed`; nothing in it is known any more."""

    number: int
    shape: CrateShape
    held: list[Stripe]
    wanted: int  # the size that gets the room


class SizeClass:
    """All slots of one size."""

    def __init__(self, slot_bytes: int, policy: EvictionPolicy) -> None:
        self.slot_bytes = slot_bytes
        self.policy = policy
        self.free: list[Place] = []
        self.crates: set[int] = set()
        self.file_bytes = 0
        self.growing = False  # somebody is making a crate, or room for one
        self.used_at = 0  # what had been written in all when it was used last


class Books:
    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self.capacity = capacity
        self.used = PAGE  # bytes of all files, those that are being made or removed included
        self.scanning = False
        self.index: dict[bytes, Stripe] = {}
        self._clock = clock
        self._classes: dict[int, SizeClass] = {}
        self._shapes: dict[int, CrateShape] = {}  # by number of crate
        self._busy: set[int] = set()  # numbers of crates that are being made or removed
        self._users: Counter[int] = Counter()  # by crate: slots being read or written
        self._left: deque[tuple[float, Place]] = deque()  # slots that are not used, and until when
        self._failed = 0  # in a row
        self._written = 0
        self._retry_at = 0.0
        self._sacrifice_at = 0.0  # when another crate may go because the file system is full
        self._is_full = False  # why the file system gave no more: others took the space
        self.refusal = ""  # the same in words, until it gives more

    # -- slots ------------------------------------------------------------------------------------------

    def take(self, slot_bytes: int) -> Place | Grow | GiveUp | None:
        """A slot to write in, counted as in use: a free one, else by eviction. Or what must be done first;
        None: somebody is at it. Raises EngineError without room.
        """
        sizes = self._sizes(slot_bytes)
        sizes.used_at = self._written
        if not sizes.free:
            if sizes.growing:
                return None
            if (step := self._enlarge(sizes)) is not None:
                return step
            if not self._evict(sizes):
                raise EngineError(self._why_full(sizes))
        place = sizes.free.pop()
        self._users[rack_of(place)] += 1
        return place

    def give(self, place: Place) -> None:
        """A slot that was taken in vain, or is not used any more, is free."""
        number = rack_of(place)
        self._users[number] -= 1
        self._classes[self._shapes[number].slot_bytes].free.append(place)

    def leave(self, place: Place) -> None:
        """A slot that was taken and cannot be written: not used for a while. Nor are many without a success
        between them: then it is the disk that fails, and the next would cost its object, too.
        """
        sizes = self._class_of(place)
        self._failed += 1
        if self._failed > max(_LEAST_FAILED, sizes.file_bytes // sizes.slot_bytes // _MOST_FAILED):
            self.give(place)
            return
        self._users[rack_of(place)] -= 1
        self._left.append((self._clock() + _LEFT_S, place))

    def publish(self, stripe: Stripe) -> None:
        stripe.ready = True
        sizes = self._class_of(stripe.place)
        sizes.policy.admit(stripe)
        self._written += sizes.slot_bytes
        self._users[rack_of(stripe.place)] -= 1
        self._failed = 0
        if self._left and self._left[0][0] <= self._clock():  # one at a time, or they would fail in a row
            _, place = self._left.popleft()
            self._class_of(place).free.append(place)

    def drop(self, stripe: Stripe) -> None:
        """Nobody finds it any more. The slot is free at once, or with its last reader."""
        del self.index[stripe.key]
        stripe.indexed = False
        sizes = self._class_of(stripe.place)
        sizes.policy.forget(stripe)
        if not stripe.pins:
            sizes.free.append(stripe.place)

    def pin(self, digest: bytes) -> Stripe | None:
        """One more reader, if it is there."""
        stripe = self.index.get(digest)
        if stripe is None or not stripe.ready:
            return None
        self._class_of(stripe.place).used_at = self._written
        self._users[rack_of(stripe.place)] += 1
        stripe.pins += 1
        stripe.visited = True
        return stripe

    def unpin(self, stripe: Stripe) -> None:
        stripe.pins -= 1
        if not stripe.pins and not stripe.indexed:
            self.give(stripe.place)
        else:
            self._users[rack_of(stripe.place)] -= 1

    @property
    def is_idle(self) -> bool:
        """Nobody reads, writes or scans."""
        return not self.scanning and not any(self._users.values())

    # -- crates -----------------------------------------------------------------------------------------

    def fits(self, shape: CrateShape) -> bool:
        return self.used + shape.file_bytes <= self.capacity

    def adopt(self, number: int, shape: CrateShape) -> None:
        """An earlier server's: `found` and `scanned` say what it holds."""
        self.used += shape.file_bytes
        self._add(number, shape)

    def found(self, digest: ChunkKey, place: Place) -> bool:
        """False: it was written again before it was found."""
        if digest in self.index:
            return False
        stripe = self.index[digest] = Stripe(digest, place, ready=True)
        self._class_of(place).policy.admit(stripe)
        return True

    def scanned(self, number: int, kept: set[int], unread: Collection[int] = ()) -> None:
        """Where an entry cannot be read, none will be written."""
        until = self._clock() + _LEFT_S
        self._left.extend((until, place_of(number, slot)) for slot in unread)
        used = kept.union(unread)
        slots = (slot for slot in reversed(range(self._shapes[number].slots)) if slot not in used)
        self._add_free(number, slots)

    def grown(self, step: Grow) -> None:
        self._busy.discard(step.number)
        self.refusal = ""
        self._sizes(step.shape.slot_bytes).growing = False
        self._add(step.number, step.shape)
        self._add_free(step.number, reversed(range(step.shape.slots)))

    def not_grown(self, step: Grow, why: str, *, is_full: bool) -> bool:
        """The file system gave no more; `is_full`: it would, if there were space. Is there anything to evict
        instead?
        """
        self._busy.discard(step.number)
        self.used -= step.shape.file_bytes
        self._retry_at = self._clock() + _RETRY_S
        self.refusal, self._is_full = why, is_full
        sizes = self._sizes(step.shape.slot_bytes)
        sizes.growing = False
        return bool(sizes.crates)

    def removed(self, step: GiveUp) -> None:
        self._busy.discard(step.number)
        self.used -= step.shape.file_bytes
        self._sizes(step.wanted).growing = False
        self._retry_at = 0.0  # now there is space again, and somebody waits for it

    def not_removed(self, step: GiveUp, why: str) -> None:
        """It holds what it held. Nor will another one go for a while: the folder is the trouble."""
        self._busy.discard(step.number)
        self._sizes(step.wanted).growing = False
        self._retry_at = self._clock() + _RETRY_S
        self.refusal, self._is_full = why, False
        self._add(step.number, step.shape)
        found = [stripe for stripe in step.held if self.found(stripe.key, stripe.place)]
        self.scanned(step.number, {slot_of(stripe.place) for stripe in found})

    def check(self) -> None:
        """Do they balance? When nobody is reading, writing or scanning."""
        assert self.is_idle, "somebody is still using a slot"
        places = [stripe.place for stripe in self.index.values()]
        places += [place for sizes in self._classes.values() for place in sizes.free]
        places += [place for _, place in self._left]
        assert len(set(places)) == len(places), "a slot in two hands"
        slots = sum(shape.slots for shape in self._shapes.values())
        assert len(places) == slots, "lost slots"
        files = sum(shape.file_bytes for shape in self._shapes.values())
        assert PAGE + files == self.used <= self.capacity, "bytes miscounted"

    # -- inside -----------------------------------------------------------------------------------------

    def _sizes(self, slot_bytes: int) -> SizeClass:
        return self._classes.setdefault(slot_bytes, SizeClass(slot_bytes, SecondChance()))

    def _class_of(self, place: Place) -> SizeClass:
        return self._classes[self._shapes[rack_of(place)].slot_bytes]

    def _add(self, number: int, shape: CrateShape) -> None:
        sizes = self._sizes(shape.slot_bytes)
        self._shapes[number] = shape
        sizes.crates.add(number)
        sizes.file_bytes += shape.file_bytes

    def _add_free(self, number: int, slots: Iterable[int]) -> None:
        free = self._classes[self._shapes[number].slot_bytes].free
        free.extend(place_of(number, slot) for slot in slots)

    def _evict(self, sizes: SizeClass) -> bool:
        stripe = sizes.policy.evict(lambda stripe: stripe.pins == 0)
        if stripe is None:
            return False
        del self.index[stripe.key]
        stripe.indexed = False
        sizes.free.append(stripe.place)
        return True

    def _enlarge(self, sizes: SizeClass) -> Grow | GiveUp | None:
        """More of the disk for this size: what is left of it, or what another size should give up."""
        left = self.capacity - self.used
        if self._clock() >= self._retry_at and len(self._shapes) + len(self._busy) < MAX_RACKS - 1:
            wanted = max(_SMALLEST, min(self.capacity // _SHARE, _LARGEST), sizes.slot_bytes + 2 * PAGE)
            shape = fit_shape(sizes.slot_bytes, min(wanted, left))
            if shape is not None:
                number = next(n for n in range(MAX_RACKS) if n not in self._shapes and n not in self._busy)
                self._busy.add(number)
                self.used += shape.file_bytes
                sizes.growing = True
                return Grow(number, shape)
        victim = self._victim(sizes)
        if victim is None:
            return None
        if self._clock() < self._retry_at:
            if not self._is_full or self._clock() < self._sacrifice_at:
                return None
            self._sacrifice_at = self._clock() + _RETRY_S
        sizes.growing = True
        return self._give_up(victim, sizes.slot_bytes)

    def _victim(self, sizes: SizeClass) -> int | None:
        """A crate of another size that has more than its share, while this one has less than half; or of a
        size that nobody has used since more than all it holds was written.
        """
        holders = [one for one in self._classes.values() if one.crates or one is sizes]
        share = self.capacity // len(holders)
        for other in sorted(holders, key=lambda one: one.used_at):
            cold = self._written - other.used_at > other.file_bytes
            over = other.file_bytes > share and sizes.file_bytes < share // 2
            if other is sizes or other.growing or not (cold or over) or self.scanning:
                continue
            for number in sorted(other.crates, reverse=True):
                if not self._users[number]:
                    return number
        return None

    def _give_up(self, number: int, wanted: int) -> GiveUp:
        shape = self._shapes[number]
        sizes = self._classes[shape.slot_bytes]
        held = [stripe for stripe in self.index.values() if rack_of(stripe.place) == number]
        for stripe in held:
            self.drop(stripe)
        sizes.free = [place for place in sizes.free if rack_of(place) != number]
        sizes.crates.discard(number)
        sizes.file_bytes -= shape.file_bytes
        if not sizes.crates:
            del self._classes[shape.slot_bytes]
        self._left = deque(one for one in self._left if rack_of(one[1]) != number)
        del self._shapes[number]
        self._busy.add(number)
        return GiveUp(number, shape, held, wanted)

    def _why_full(self, sizes: SizeClass) -> str:
        if self.scanning:
            return "full until what is there has been scanned"
        if not sizes.crates and self.refusal:
            return self.refusal
        return f"no room for an object of {sizes.slot_bytes} bytes within {self.capacity}"
