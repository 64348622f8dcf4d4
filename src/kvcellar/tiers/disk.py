"""The disk engine: objects in crates on a local file system, within a hard limit of bytes.

    FOLDER/kvcellar-disk      says that the folder is ours, and is locked while a server uses it
    FOLDER/crate-NNNN.*       see crate.py; everything else in the folder is somebody's, and left alone

The books are in memory under one lock, which is never held during I/O. A slot that is being read or written
is never given away. What an earlier server left is found again by a thread while this one serves: until then
it is a miss. What to evict, and which size gets how much of the disk, is decided in books.py.
"""

import errno
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote

from kvcellar.config import parse_bytes
from kvcellar.errors import ConfigError, Corrupt
from kvcellar.identity import ChunkKey
from kvcellar.ledger import Stripe
from kvcellar.slab import Place, place_of, rack_of, slot_of, whole_pages
from kvcellar.tiers.books import Books, GiveUp, Grow
from kvcellar.tiers.crate import BAD_SECTOR, MAX_NAME, Crate
from kvcellar.tiers.engine import Buffer, EngineError, Usage
from kvcellar.tiers.folder import Folder

log = logging.getLogger(__name__)

# Others may take what we made; past this something is wrong.
_TRIES = 16


class DiskEngine:
    knows_by_heart = True  # what exists, also of a disk that is dead

    def __init__(
        self, folder: Path, capacity: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises StartupError for a folder or a size that will not do, EngineError if what is there cannot
        be opened now.
        """
        self._folder = Folder(folder)
        self._lock = threading.Condition()  # guards the four below; told of when a crate was made or removed
        self._crates: dict[int, Crate] = {}
        self._closed = False
        self._doubtful: set[bytes] = set()  # what could not be read once
        try:
            self._books = Books(self._folder.check_size(capacity), clock)
            found = self._adopt()
        except Exception as error:  # whoever tries again finds it as it was
            for crate in self._crates.values():
                crate.close()
            self._folder.close()
            if isinstance(error, OSError):
                raise self._trouble(error) from None
            raise
        self._books.scanning = bool(found)
        threading.Thread(target=self._scan, args=(found,), name="kvcellar-disk-scan", daemon=True).start()

    # -- the engine -------------------------------------------------------------------------------------

    def write(self, name: str, source: Buffer) -> None:
        digest = _digest(name)
        self._check_open()
        if digest in self._books.index:
            return  # here already, or somebody is on it
        place = self._take(whole_pages(source.size))
        slot, stripe = slot_of(place), Stripe(ChunkKey(digest), place)
        with self._lock:
            if digest in self._books.index:
                self._books.give(place)
                return
            self._books.index[digest] = stripe
            crate = self._crates[rack_of(place)]
        try:
            crate.free(slot)  # what was evicted from it; only now, since nobody else writes there
            crate.write(slot, source)
            crate.mark(slot, name, source)
        except OSError as error:
            with self._lock:
                del self._books.index[digest]
                # A bad sector would be the next to be given out, and fail again, for ever.
                (self._books.leave if error.errno in BAD_SECTOR else self._books.give)(place)
            raise self._trouble(error) from None
        with self._lock:
            self._books.publish(stripe)

    def read(self, name: str, target: Buffer) -> bool:
        with self._pinned(name) as found:
            if found is None:
                return False
            stripe, crate, slot = found
            entry = crate.entry(slot)
            if entry is not None and entry[:2] != (name, target.size):
                return False
            if entry is None or not crate.read(slot, target):
                self._discard(stripe, crate)  # somebody cut a file short, or wrote to it
                return False
            target.header[:] = entry[2]
            return True

    def exist(self, names: Sequence[str]) -> list[bool]:
        self._check_open()
        found = (self._books.index.get(_digest(name)) for name in names)
        return [stripe is not None and stripe.ready for stripe in found]

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with self._pinned(name) as found:
                if found is not None:
                    stripe, crate, _ = found
                    self._discard(stripe, crate)

    def usage(self) -> Usage:
        books = self._books
        trouble = f"{self._folder.path}: no new files: {books.refusal}" if books.refusal else ""
        return Usage(len(books.index), books.used, books.capacity, books.scanning, trouble)

    def close(self) -> None:
        """While something is still being read or written, files and lock stay until the process ends."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._books.is_idle:
                return
            for crate in self._crates.values():
                crate.close()
        self._folder.close()

    def check(self) -> None:
        """Do the books balance? For tests, when nobody is reading, writing or scanning."""
        with self._lock:
            self._books.check()

    # -- slots and crates -------------------------------------------------------------------------------

    @contextmanager
    def _pinned(self, name: str) -> Iterator[tuple[Stripe, Crate, int] | None]:
        """Where it is, if it is there: until this is over nobody writes there. Trouble with the disk becomes
        an EngineError.
        """
        with self._lock:
            self._check_open()
            stripe = self._books.pin(_digest(name))
        if stripe is None:
            yield None
            return
        crate = self._crates[rack_of(stripe.place)]
        try:
            yield stripe, crate, slot_of(stripe.place)
        except OSError as error:
            if error.errno in BAD_SECTOR:
                self._doubt(stripe, crate)
            raise self._trouble(error) from None
        finally:
            with self._lock:
                self._books.unpin(stripe)

    def _doubt(self, stripe: Stripe, crate: Crate) -> None:
        """It could not be read. The second time it goes, or every lookup would find it, and none get it; not
        the first, or the tier, which tries again, would meet a mere miss and never see that a disk is dead.
        """
        with self._lock:
            is_known = stripe.key in self._doubtful
            (self._doubtful.discard if is_known else self._doubtful.add)(stripe.key)
        if is_known:
            with suppress(OSError):
                self._discard(stripe, crate)

    def _discard(self, stripe: Stripe, crate: Crate) -> None:
        """By somebody who pins it: nobody finds it any more. The slot is free when nobody reads it."""
        try:
            crate.free(slot_of(stripe.place))
        finally:
            with self._lock:
                if stripe.indexed:
                    self._books.drop(stripe)

    def _take(self, slot_bytes: int) -> Place:
        for _ in range(_TRIES):
            with self._lock:
                self._check_open()
                try:
                    step = self._books.take(slot_bytes)
                except EngineError as error:
                    raise EngineError(f"{self._folder.path}: {error}") from None
                if step is None:
                    self._lock.wait(1.0)
                    continue
            if isinstance(step, Grow):
                self._grow(step)
            elif isinstance(step, GiveUp):
                self._remove(step)
            else:
                return step
        raise EngineError(f"{self._folder.path}: others took every slot that could be freed")

    def _grow(self, step: Grow) -> None:
        """A file system that gives no more is no error if we can evict."""
        try:
            crate = Crate.create(self._folder.path, step.number, step.shape)
        except OSError as error:
            log.warning("%s: no new crate: %s", self._folder.path, error.strerror)
            with self._lock:
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                can_evict = self._books.not_grown(step, error.strerror or str(error), is_full=is_full)
                self._lock.notify_all()
            if not can_evict:
                raise self._trouble(error) from None
            return
        with self._lock:
            self._crates[step.number] = crate
            self._books.grown(step)
            self._lock.notify_all()

    def _remove(self, step: GiveUp) -> None:
        with self._lock:
            crate = self._crates.pop(step.number)
        try:
            crate.remove()
        except OSError as error:
            log.warning("%s: crate %d cannot be removed: %s", self._folder.path, step.number, error.strerror)
            with self._lock:
                self._crates[step.number] = crate
                self._books.not_removed(step, error.strerror or str(error))
                self._lock.notify_all()
            return
        with self._lock:
            self._books.removed(step)
            self._lock.notify_all()

    # -- what an earlier server left --------------------------------------------------------------------

    def _adopt(self) -> Sequence[Crate]:
        """Open its crates; what is torn, or does not fit any more, is removed. What cannot be opened may be
        as good as ever: too many files may be open, or somebody has changed a permission.
        """
        for number in self._folder.crate_numbers():
            try:
                crate = Crate.open(self._folder.path, number)
                if not self._books.fits(crate.shape):
                    crate.close()
                    raise Corrupt(f"crate {number} does not fit into {self._books.capacity} bytes any more")
            except (OSError, Corrupt) as error:
                if isinstance(error, OSError) and error.errno not in BAD_SECTOR:
                    raise EngineError(f"{self._folder.path}: crate {number}: {error.strerror}") from None
                log.warning("%s: not adopted: %s", self._folder.path, error)
                self._folder.remove_crate(number)
                continue
            self._books.adopt(number, crate.shape)
            self._crates[number] = crate
        return [*self._crates.values()]

    def _scan(self, crates: Sequence[Crate]) -> None:
        started = time.monotonic()
        for crate in crates:
            if self._closed:
                break
            self._scan_crate(crate)
        self._books.scanning = False
        if crates:
            took, count = time.monotonic() - started, len(self._books.index)
            log.info("%s: %d objects found again in %.1f s", self._folder.path, count, took)

    def _scan_crate(self, crate: Crate) -> None:
        kept: set[int] = set()
        unread: set[int] = set()
        for slot, name in crate.scan():
            if name is None:
                unread.add(slot)
                continue
            with self._lock:
                if self._books.found(ChunkKey(_digest(name)), place_of(crate.number, slot)):
                    kept.add(slot)
        with self._lock:
            self._books.scanned(crate.number, kept, unread)

    # -- trouble ----------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("closed")

    def _trouble(self, error: OSError) -> EngineError:
        return EngineError(f"{self._folder.path}: {error.strerror or error}")


def open_disk(url: str, options: Mapping[str, str]) -> DiskEngine:
    return DiskEngine(*parse_disk(url, options))


def parse_disk(url: str, options: Mapping[str, str]) -> tuple[Path, int | None]:
    """disk:///path?size=200GiB; `write` is the server's business"""
    path = unquote(url.removeprefix("disk://"))
    if not path.startswith("/"):
        raise ConfigError(f"{url}: expected disk:///PATH, with three slashes")
    if "\0" in path or "\ufffd" in path:  # the latter stands for bytes that are no UTF-8
        raise ConfigError(f"{url}: expected a path after disk://")
    if unknown := set(options) - {"size"}:
        raise ConfigError(f"{url}: unknown option {min(unknown)!r}; known are size and write")
    try:
        size = parse_bytes(options["size"]) if "size" in options else None
    except ValueError as error:
        raise ConfigError(f"{url}: size: got {options['size']!r}, expected {error}") from None
    return Path(path), size


def _digest(name: str) -> bytes:
    raw = name.encode()
    if len(raw) > MAX_NAME:
        raise EngineError(f"a name of {len(raw)} bytes; at most {MAX_NAME}")
    return hashlib.blake2b(raw, digest_size=16).digest()
