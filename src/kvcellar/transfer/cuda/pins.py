"""Slabs that the GPU's copy engines may reach: page-locked piece by piece.

In the background as they are mapped, with pauses, since locking stops every other thread that talks to the
driver; and at once where a copy needs it: to and from memory that is not locked, copies are slow and hold up
the engine's own. A slab stays referenced as long as it is locked: memory must not be unmapped under the
driver.
"""

import collections
import ctypes
import logging
import threading
import time
from collections.abc import Iterable

import torch
from cuda.bindings import runtime as cudart

from kvcellar.slab import Slab
from kvcellar.transfer.cuda import driver

log = logging.getLogger(__name__)

_PIECE = 32 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels refuse it, and locking takes longer
_libc = ctypes.CDLL(None)

# Between two pieces, each of which takes about as long: others want the driver too.
_PAUSE_S = 0.002


def slots_locked_together(slot_bytes: int) -> int:
    """Slabs are locked in runs of so many slots: one copy must not touch two of them."""
    return max(1, _PIECE // slot_bytes)


class Pins:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: dict[int, tuple[int, Slab]] = {}  # by address: bytes
        self._left: collections.deque[Slab] = collections.deque()  # unmapped, and to be unlocked
        self._changed = threading.Event()  # one of the two
        self._locked: set[int] = set()  # or tried
        self._refused: set[int] = set()  # of those: they would be again
        self._locking = threading.Lock()
        self._closed = False
        threading.Thread(target=self._run, name="kvcellar-pins", daemon=True).start()

    @property
    def all_locked(self) -> bool:
        """None was refused of what is mapped."""
        return not self._refused

    def mapped(self, slab: Slab) -> None:
        size = slab.shape.slot_bytes
        together = slots_locked_together(size)
        for first in range(0, slab.shape.slots, together):
            count = min(together, slab.shape.slots - first)
            self._pieces[slab.address(first)] = (count * size, slab)
        self._changed.set()

    def unmapped(self, slab: Slab) -> None:
        """No copy to or from it is under way, and none will follow."""
        self._left.append(slab)
        self._changed.set()

    def close(self) -> None:
        """No more will be mapped: the thread ends when the last is unmapped, which may be later."""
        self._closed = True
        self._changed.set()

    def ensure(self, pieces: Iterable[int]) -> None:
        """Lock these now, unless they are."""
        for address in pieces:
            if address not in self._locked:
                self._lock(address)

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        with driver.beside_captures():
            while self._pieces or not self._closed:
                self._changed.wait()
                self._changed.clear()
                self._let_go()
                self._lock_all()

    def _lock_all(self) -> None:
        todo = [address for address in list(self._pieces) if address not in self._locked]
        for address in todo:
            if address in self._pieces and address not in self._locked:
                self._lock(address)
                time.sleep(_PAUSE_S)
                self._let_go()
        if todo and not self._changed.is_set() and self.all_locked:
            with self._locking:
                size = sum(self._pieces[address][0] for address in self._locked)
            log.info("KVCellar: %.1f GiB of the cache are page-locked", size / (1 << 30))

    def _let_go(self) -> None:
        """Ahead of what is to be locked, which may take a minute: the server gives that memory to others."""
        while self._left:
            slab = self._left.popleft()
            for address in self._addresses(slab):
                self._unlock(address)
                time.sleep(_PAUSE_S)

    def _addresses(self, slab: Slab) -> list[int]:
        known = list(self._pieces.items())  # in one go: others add to it meanwhile
        return [address for address, (_, its) in known if its is slab]

    def _lock(self, address: int) -> None:
        with self._locking:
            piece = self._pieces.get(address)
            if address in self._locked or piece is None:
                return
            # First, and without the driver: finding the pages takes four times as long as locking them.
            _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(piece[0]), _MADV_POPULATE_WRITE)
            (error,) = cudart.cudaHostRegister(address, piece[0], cudart.cudaHostRegisterPortable)
            if error != cudart.cudaError_t.cudaSuccess:
                if self.all_locked:
                    log.warning("KVCellar: copies will be slow, cannot page-lock memory: %s", error.name)
                cudart.cudaGetLastError()  # it would surface in somebody else's call
                self._refused.add(address)
            self._locked.add(address)

    def _unlock(self, address: int) -> None:
        with self._locking:
            self._pieces.pop(address, None)
            if address in self._locked:
                self._locked.discard(address)
                self._refused.discard(address)
                cudart.cudaHostUnregister(address)
                cudart.cudaGetLastError()
