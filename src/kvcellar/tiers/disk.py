"""The disk engine: objects in crates on a local file system, within a hard limit of bytes.

    FOLDER/kvcellar-disk      says that the folder is ours, and is locked while a server uses it
    FOLDER/crate-NNNN.*       see crate.py; everything else in the folder is somebody's, and left alone

All books are in memory under one lock, which is never held during I/O. A slot that is being read or written
is never given away. What an earlier server left is found again by a thread while this one serves: until then
it is a miss. Objects of one size share crates; a size that nobody uses any more gives its crates up.
"""

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

from kvcellar.config import parse_bytes
from kvcellar.errors import ConfigError, Corrupt, StartupError
from kvcellar.identity import ChunkKey
from kvcellar.ledger.policy import EvictionPolicy, SecondChance
from kvcellar.ledger.stripe import Stripe
from kvcellar.slab import MAX_RACKS, PAGE, Place, place_of, rack_of, slot_of
from kvcellar.tiers.crate import MAX_NAME, Crate, CrateShape, fit_shape
from kvcellar.tiers.engine import Buffer, EngineError, Usage
from kvcellar.tiers.folder import Folder

log = logging.getLogger(__name__)

# A crate is a 64th of the disk, so that a new size finds its share soon, within these bounds.
_SHARE, _SMALLEST, _LARGEST = 64, 256 << 10, 4 << 30
# After the file system refused to give more: it is asked again, but not at every write.
_RETRY_S = 5.0


class SizeClass:
    """All slots of one size."""

    def __init__(self, slot_bytes: int, policy: EvictionPolicy) -> None:
        self.slot_bytes = slot_bytes
        self.policy = policy
        self.free: list[Place] = []
        self.crates: set[int] = set()
        self.file_bytes = 0
        self.growing = False  # a thread is making a crate
        self.used_at = 0  # what had been written in all when it was used last


class DiskEngine:
    def __init__(
        self, folder: Path, capacity: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises StartupError for a folder or a size that will not do."""
        self._folder = Folder(folder)
        try:
            self.capacity = self._folder.check_size(capacity)
        except StartupError:
            self._folder.close()
            raise
        self._clock = clock
        self._lock = threading.Condition()  # guards all below; told of when a crate was made
        self._index: dict[bytes, Stripe] = {}
        self._classes: dict[int, SizeClass] = {}
        self._crates: dict[int, Crate] = {}
        self._users: Counter[int] = Counter()  # by crate: slots being read or written
        self._used = PAGE  # bytes of all files, planned ones included
        self._written = 0
        self._retry_at = 0.0
        self._closed = False
        found = self._adopt()
        self._scanning = bool(found)
        threading.Thread(target=self._scan, args=(found,), name="kvcellar-disk-scan", daemon=True).start()

    # -- the engine -------------------------------------------------------------------------------------

    def write(self, name: str, source: Buffer) -> None:
        digest = _digest(name)
        slot_bytes = -(-source.size // PAGE) * PAGE
        self._check_open()
        if digest in self._index:
            return  # here already, or somebody is on it
        place = self._take(slot_bytes)
        stripe = Stripe(ChunkKey(digest), place)
        with self._lock:
            if digest in self._index:
                self._give(place)
                return
            self._index[digest] = stripe
            crate, slot = self._crates[rack_of(place)], slot_of(place)
        try:
            crate.free(slot)  # what was evicted from it; only now, since nobody else writes there
            crate.write(slot, source)
            crate.mark(slot, name, source)
        except OSError as error:
            with self._lock:
                del self._index[digest]
                self._give(place)
            raise self._trouble(error) from None
        with self._lock:
            self._publish(stripe, crate)

    def read(self, name: str, target: Buffer) -> bool:
        stripe = self._pin(name)
        if stripe is None:
            return False
        crate, slot = self._crates[rack_of(stripe.place)], slot_of(stripe.place)
        try:
            entry = crate.entry(slot)
            if entry is not None and entry[:2] != (name, target.size):
                return False
            if entry is None or not crate.read(slot, target):
                self.delete([name])  # somebody cut a file short, or wrote to it
                return False
            target.header[:] = entry[2]
            return True
        except OSError as error:
            raise self._trouble(error) from None
        finally:
            self._unpin(stripe)

    def exist(self, names: Sequence[str]) -> list[bool]:
        self._check_open()
        found = (self._index.get(_digest(name)) for name in names)
        return [stripe is not None and stripe.ready for stripe in found]

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            stripe = self._pin(name)
            if stripe is None:
                continue
            try:
                self._crates[rack_of(stripe.place)].free(slot_of(stripe.place))
            except OSError as error:
                raise self._trouble(error) from None
            finally:
                with self._lock:
                    if stripe.indexed:
                        self._drop(stripe)
                self._unpin(stripe)

    def list(self) -> Iterator[tuple[str, int]]:
        with self._lock:
            self._check_open()
            stripes = [stripe for stripe in self._index.values() if stripe.ready]
        for stripe in stripes:
            with self._lock:
                crate = self._crates.get(rack_of(stripe.place)) if stripe.indexed else None
                if crate is None:
                    continue
                self._users[crate.number] += 1
            try:
                entry = crate.entry(slot_of(stripe.place))
            except OSError as error:
                raise self._trouble(error) from None
            finally:
                with self._lock:
                    self._users[crate.number] -= 1
            if entry is not None:
                yield entry[0], crate.shape.slot_bytes

    def usage(self) -> Usage:
        return Usage(len(self._index), self._used, self.capacity, self._scanning)

    def close(self) -> None:
        """While something is still being read or written, files and lock stay until the process ends."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if sum(self._users.values()) or self._scanning:
                return
            for crate in self._crates.values():
                crate.close()
        self._folder.close()

    # -- slots ------------------------------------------------------------------------------------------

    def _take(self, slot_bytes: int) -> Place:
        """A slot to write in: a free one, else a new crate's, else by eviction. Counted as in use."""
        for _ in range(16):  # others may take what we made
            with self._lock:
                self._check_open()
                sizes = self._classes.setdefault(slot_bytes, SizeClass(slot_bytes, SecondChance()))
                if sizes.growing and not sizes.free:
                    self._lock.wait(1.0)
                    continue
                sizes.used_at = self._written
                if sizes.free or self._make_free(sizes):
                    place = sizes.free.pop()
                    self._users[rack_of(place)] += 1
                    return place
                planned = self._plan(sizes)
                given_up = None if planned else self._give_up_crate(sizes)
                if not planned and given_up is None:
                    raise EngineError(f"{self._folder.path}: {self._why_full(sizes)}")
            if planned:
                self._grow(sizes, *planned)
            elif given_up is not None:
                self._remove(given_up)
        raise EngineError(f"{self._folder.path}: others took every slot that could be freed")

    def _make_free(self, sizes: SizeClass) -> bool:
        """Evict one object of this size, if that is better than taking, or being given, more of the disk."""
        if not sizes.crates or self._plan_shape(sizes) is not None or self._victim(sizes) is not None:
            return False
        stripe = sizes.policy.evict(lambda stripe: stripe.pins == 0)
        if stripe is None:
            return False
        del self._index[stripe.key]
        stripe.indexed = False
        sizes.free.append(stripe.place)
        return True

    def _publish(self, stripe: Stripe, crate: Crate) -> None:
        stripe.ready = True
        sizes = self._classes[crate.shape.slot_bytes]
        sizes.policy.admit(stripe)
        self._written += sizes.slot_bytes
        self._users[crate.number] -= 1

    def _give(self, place: Place) -> None:
        """A slot taken in vain, or no longer used, is free."""
        crate = self._crates[rack_of(place)]
        self._users[crate.number] -= 1
        self._classes[crate.shape.slot_bytes].free.append(place)

    def _drop(self, stripe: Stripe) -> None:
        del self._index[stripe.key]
        stripe.indexed = False
        crate = self._crates[rack_of(stripe.place)]
        sizes = self._classes[crate.shape.slot_bytes]
        sizes.policy.forget(stripe)
        if not stripe.pins:  # else the last reader sees to it
            sizes.free.append(stripe.place)

    def _pin(self, name: str) -> Stripe | None:
        with self._lock:
            self._check_open()
            stripe = self._index.get(_digest(name))
            if stripe is None or not stripe.ready:
                return None
            number = rack_of(stripe.place)
            self._classes[self._crates[number].shape.slot_bytes].used_at = self._written
            self._users[number] += 1
            stripe.pins += 1
            stripe.visited = True
            return stripe

    def _unpin(self, stripe: Stripe) -> None:
        with self._lock:
            stripe.pins -= 1
            if not stripe.pins and not stripe.indexed:
                self._give(stripe.place)
            else:
                self._users[rack_of(stripe.place)] -= 1

    # -- crates -----------------------------------------------------------------------------------------

    def _plan_shape(self, sizes: SizeClass) -> CrateShape | None:
        left = self.capacity - self._used
        if self._clock() < self._retry_at or len(self._crates) >= MAX_RACKS - 1:
            return None
        wanted = max(_SMALLEST, min(self.capacity // _SHARE, _LARGEST), sizes.slot_bytes + 2 * PAGE)
        return fit_shape(sizes.slot_bytes, min(wanted, left))

    def _plan(self, sizes: SizeClass) -> tuple[int, CrateShape] | None:
        shape = self._plan_shape(sizes)
        if shape is None:
            return None
        number = next(n for n in range(MAX_RACKS) if n not in self._crates and n not in self._folder.planned)
        self._folder.planned.add(number)
        self._used += shape.file_bytes
        sizes.growing = True
        return number, shape

    def _grow(self, sizes: SizeClass, number: int, shape: CrateShape) -> None:
        """File work, outside the lock. A file system that gives no more is no error if we can evict."""
        try:
            crate = Crate.create(self._folder.path, number, shape)
        except OSError as error:
            with self._lock:
                self._grown(sizes, number)
                self._used -= shape.file_bytes
                self._retry_at = self._clock() + _RETRY_S
                self._folder.refusal = error.strerror or str(error)
                has_slots = bool(sizes.crates)
            log.warning("%s: no new crate: %s", self._folder.path, error.strerror)
            if not has_slots:
                raise self._trouble(error) from None
            return
        with self._lock:
            self._grown(sizes, number)
            self._add(crate)
            sizes.free.extend(place_of(number, slot) for slot in reversed(range(shape.slots)))

    def _grown(self, sizes: SizeClass, number: int) -> None:
        self._folder.planned.discard(number)
        sizes.growing = False
        self._lock.notify_all()

    def _add(self, crate: Crate) -> None:
        shape = crate.shape
        sizes = self._classes.setdefault(shape.slot_bytes, SizeClass(shape.slot_bytes, SecondChance()))
        self._crates[crate.number] = crate
        sizes.crates.add(crate.number)
        sizes.file_bytes += shape.file_bytes

    def _victim(self, sizes: SizeClass) -> Crate | None:
        """A crate that another size should give up for this one: because it has more than its share, or
        because more than all it holds has been written since anybody used it.
        """
        holders = [one for one in self._classes.values() if one.crates or one is sizes]
        share = self.capacity // len(holders)
        for other in sorted(holders, key=lambda one: one.used_at):
            cold = self._written - other.used_at > other.file_bytes
            over = other.file_bytes > share and sizes.file_bytes < share // 2
            if other is sizes or other.growing or not (cold or over) or self._scanning:
                continue
            for number in sorted(other.crates, reverse=True):
                if not self._users[number]:
                    return self._crates[number]
        return None

    def _give_up_crate(self, sizes: SizeClass) -> Crate | None:
        crate = self._victim(sizes)
        if crate is None:
            return None
        other = self._classes[crate.shape.slot_bytes]
        for stripe in [s for s in self._index.values() if rack_of(s.place) == crate.number]:
            self._drop(stripe)
        other.free = [place for place in other.free if rack_of(place) != crate.number]
        other.crates.discard(crate.number)
        other.file_bytes -= crate.shape.file_bytes
        if not other.crates:
            del self._classes[other.slot_bytes]
        del self._crates[crate.number]
        self._folder.planned.add(crate.number)
        return crate

    def _remove(self, crate: Crate) -> None:
        """File work, outside the lock. Its bytes count until they are gone."""
        try:
            crate.remove()
        except OSError as error:
            raise self._trouble(error) from None
        with self._lock:
            self._folder.planned.discard(crate.number)
            self._used -= crate.shape.file_bytes

    # -- what an earlier server left --------------------------------------------------------------------

    def _adopt(self) -> Sequence[Crate]:
        """Open its crates; what is torn, or does not fit any more, is removed."""
        adopted = []
        for number in self._folder.crate_numbers():
            try:
                crate = Crate.open(self._folder.path, number)
                if self._used + crate.shape.file_bytes > self.capacity:
                    crate.close()
                    raise Corrupt(f"crate {number} does not fit into {self.capacity} bytes any more")
            except (OSError, Corrupt) as error:
                log.warning("%s: not adopted: %s", self._folder.path, error)
                self._folder.remove_crate(number)
                continue
            self._used += crate.shape.file_bytes
            self._add(crate)
            adopted.append(crate)
        return adopted

    def _scan(self, crates: Sequence[Crate]) -> None:
        started = time.monotonic()
        for crate in crates:
            if self._closed:
                break
            try:
                self._scan_crate(crate)
            except OSError as error:
                log.warning("%s: cannot scan %s: %s", self._folder.path, crate, error.strerror)
        self._scanning = False
        if crates:
            took = time.monotonic() - started
            log.info("%s: %d objects found again in %.1f s", self._folder.path, len(self._index), took)

    def _scan_crate(self, crate: Crate) -> None:
        sizes = self._classes[crate.shape.slot_bytes]
        kept = set()
        for slot, name in crate.scan():
            digest = ChunkKey(_digest(name))
            with self._lock:
                if digest in self._index:
                    continue  # written again before it was found
                stripe = self._index[digest] = Stripe(digest, place_of(crate.number, slot), ready=True)
                sizes.policy.admit(stripe)
            kept.add(slot)
        with self._lock:
            free = (slot for slot in reversed(range(crate.shape.slots)) if slot not in kept)
            sizes.free.extend(place_of(crate.number, slot) for slot in free)

    def check(self) -> None:
        """Do the books balance? For tests, when nobody is reading, writing or scanning."""
        with self._lock:
            assert not any(self._users.values()), "somebody is still using a slot"
            taken = [stripe.place for stripe in self._index.values()]
            places = taken + [place for sizes in self._classes.values() for place in sizes.free]
            assert len(set(places)) == len(places), "a slot in two hands"
            assert len(places) == sum(crate.shape.slots for crate in self._crates.values()), "lost slots"
            files = sum(crate.shape.file_bytes for crate in self._crates.values())
            assert PAGE + files == self._used <= self.capacity, "bytes miscounted"

    # -- trouble ----------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("closed")

    def _why_full(self, sizes: SizeClass) -> str:
        if self._scanning:
            return "full until what is there has been scanned"
        if not sizes.crates and self._folder.refusal:
            return self._folder.refusal
        return f"no room for an object of {sizes.slot_bytes} bytes within {self.capacity}"

    def _trouble(self, error: OSError) -> EngineError:
        return EngineError(f"{self._folder.path}: {error.strerror or error}")


def open_disk(url: str, options: Mapping[str, str]) -> DiskEngine:
    """disk:///path?size=200GiB"""
    path = unquote(url.removeprefix("disk://"))
    if not path.startswith("/"):
        raise ConfigError(f"{url}: expected disk:///PATH, with three slashes")
    if unknown := set(options) - {"size"}:
        raise ConfigError(f"{url}: unknown option {min(unknown)!r}; known is size")
    try:
        size = parse_bytes(options["size"]) if "size" in options else None
    except ValueError as error:
        raise ConfigError(f"{url}: size: got {options['size']!r}, expected {error}") from None
    return DiskEngine(Path(path), size)


def _digest(name: str) -> bytes:
    raw = name.encode()
    if len(raw) > MAX_NAME:
        raise EngineError(f"a name of {len(raw)} bytes; at most {MAX_NAME}")
    return hashlib.blake2b(raw, digest_size=16).digest()
