"""Slabs that the GPU's copy engines may reach: page-locked in the background, as they are mapped.

Copies to and from memory that is not locked yet are correct but slow, so nobody waits for this. It is done in
small pieces with pauses: locking stops every other thread that talks to the driver, the engine's own among
them. A slab stays referenced as long as it is locked: memory must not be unmapped under the driver.
"""

import logging
import queue
import threading
import time

import torch
from cuda.bindings import runtime as cudart

from kvcellar.slab import Slab

log = logging.getLogger(__name__)

# 64 MiB take 4 ms when their pages exist (H200 host, 2026-11).
_PIECE = 64 << 20
# Of the time, what is left to others.
_PAUSE = 2.0


def slots_locked_together(slot_bytes: int) -> int:
    """Slabs are locked in runs of so many slots: one copy must not touch two of them."""
    return max(1, _PIECE // slot_bytes)


class Pins:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._todo: queue.SimpleQueue[tuple[bool, Slab]] = queue.SimpleQueue()
        self._locked: dict[int, tuple[Slab, list[int]]] = {}  # by address: the pieces' addresses
        threading.Thread(target=self._run, name="kvcellar-pins", daemon=True).start()

    def mapped(self, slab: Slab) -> None:
        self._todo.put((True, slab))

    def unmapped(self, slab: Slab) -> None:
        """No copy to or from it is under way, and none will follow."""
        self._todo.put((False, slab))

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            wanted, slab = self._todo.get()
            if wanted:
                self._lock(slab)
            else:
                _, pieces = self._locked.pop(slab.memory[0], (slab, []))
                for address in pieces:
                    cudart.cudaHostUnregister(address)

    def _lock(self, slab: Slab) -> None:
        size = slab.shape.slot_bytes
        together = slots_locked_together(size)
        pieces: list[int] = []
        self._locked[slab.memory[0]] = (slab, pieces)
        for first in range(0, slab.shape.slots, together):
            address = slab.slot(first).ctypes.data
            begun = time.monotonic()
            count = min(together, slab.shape.slots - first)
            (error,) = cudart.cudaHostRegister(address, count * size, cudart.cudaHostRegisterPortable)
            if error != cudart.cudaError_t.cudaSuccess:
                log.warning("KVCellar: copies will be slow, cannot page-lock memory: %s", error.name)
                cudart.cudaGetLastError()  # it would surface in somebody else's call
                return
            pieces.append(address)
            time.sleep(_PAUSE * (time.monotonic() - begun))
