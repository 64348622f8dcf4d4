"""Page-locking without a driver: a program for vLLM's interpreter. test_pins.py drives it.

Runs the case that it is told, and answers with JSON what happened.
"""

import json
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable

from tests.cuda import emulate

emulate.install()

import torch  # noqa: E402
from cuda.bindings import runtime  # noqa: E402

from kvcellar.slab import Slab, SlabShape  # noqa: E402
from kvcellar.transfer.cuda import Pins  # noqa: E402

PIECE = 17 << 20  # two of them are not locked together


def make_slab() -> Slab:
    shape = SlabShape(slots=2, slot_bytes=PIECE)
    fd = os.memfd_create("slab")
    try:
        os.ftruncate(fd, shape.file_bytes)
        return Slab(fd, shape)
    finally:
        os.close(fd)


def make_pins() -> tuple[Pins, threading.Thread]:
    pins = Pins(torch.device("cpu"))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "kvcellar-pins"]
    return pins, thread


def of_driver(then: Callable[[int], object]) -> Callable[..., object]:
    def call(address: int, *_: object) -> tuple[object]:
        then(address)
        return (runtime.cudaError_t.cudaSuccess,)

    return call


def close_with_nothing_mapped() -> object:
    pins, thread = make_pins()
    pins.close()
    thread.join(30)
    return thread.is_alive()


def close_before_the_last_is_unmapped() -> object:
    slab, locked = make_slab(), threading.Semaphore(0)
    number = {slab.address(number): number for number in range(2)}
    called: list[tuple[str, int]] = []

    def lock(address: int) -> None:
        called.append(("lock", number[address]))
        locked.release()

    runtime.cudaHostRegister = of_driver(lock)
    runtime.cudaHostUnregister = of_driver(lambda address: called.append(("unlock", number[address])))
    pins, thread = make_pins()
    pins.mapped(slab)
    assert all(locked.acquire(timeout=30) for _ in range(2))
    pins.close()
    pins.unmapped(slab)
    thread.join(30)
    return [thread.is_alive(), called]


def refuse_once() -> object:
    """Whether all is locked, after a refusal and after the memory that it was about is gone."""
    slab, refused, told = make_slab(), threading.Event(), []

    def lock(address: int, *_: object) -> tuple[object]:
        if address == slab.address(0):
            return (runtime.cudaError_t.cudaErrorMemoryAllocation,)
        refused.set()  # the piece after it
        return (runtime.cudaError_t.cudaSuccess,)

    runtime.cudaHostRegister = lock
    pins, thread = make_pins()
    pins.mapped(slab)
    assert refused.wait(30)
    told.append(pins.all_locked)
    pins.unmapped(slab)
    pins.close()
    thread.join(30)
    return [*told, pins.all_locked]


def unmap_behind_one_that_is_being_locked() -> object:
    """Whether each of two that are unmapped meanwhile is still there, at the second piece of the first."""
    first, locked_before, new = make_slab(), make_slab(), make_slab()
    there = [weakref.ref(locked_before), weakref.ref(new)]
    begun, go, found = threading.Event(), threading.Event(), queue.SimpleQueue[list[bool]]()

    def lock(address: int) -> None:
        if address == first.address(0):
            begun.set()
            assert go.wait(30)
        if address == first.address(1):
            found.put([one() is not None for one in there])

    runtime.cudaHostRegister = of_driver(lock)
    pins, _ = make_pins()
    pins.mapped(locked_before)
    pins.mapped(first)
    assert begun.wait(30)
    pins.mapped(new)
    for slab in (locked_before, new):
        pins.unmapped(slab)
    del locked_before, new, slab
    go.set()
    return found.get(timeout=30)


def main() -> None:
    cases = [
        close_with_nothing_mapped,
        close_before_the_last_is_unmapped,
        refuse_once,
        unmap_behind_one_that_is_being_locked,
    ]
    case = {case.__name__: case for case in cases}[sys.argv[1]]
    print(json.dumps(case()))


if __name__ == "__main__":
    main()
