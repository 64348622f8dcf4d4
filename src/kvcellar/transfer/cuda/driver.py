"""The calls of the CUDA driver that copies are made of, without letting go of the GIL.

Each call that lets go of it lets the engine's thread in, and to get it back takes longer than the call: with
eight of them per 16 MiB, loads beside 32 decoding requests took half of their speed (H200, vLLM 0.26). None
of these calls waits, as long as host memory is page-locked; `Event.synchronize` does, and lets go.
"""

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from ctypes import c_int, c_size_t, c_uint, c_void_p
from typing import Any

import torch
from cuda.bindings import runtime as cudart

from kvcellar.errors import CellarError

_holding = ctypes.PyDLL("libcuda.so.1")
_letting_go = ctypes.CDLL("libcuda.so.1")

_RELAXED = 2  # how a thread minds captures
_NO_TIMING, _BLOCKING = 2, 1  # flags of an event; blocking: a wait sleeps
HIDDEN = 4  # room for what compilers put behind a kernel's own arguments; null, like Triton's scratch memory


def _function(library: ctypes.CDLL, name: str, *types: Any) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = types, c_int
    return function


_COPY = (c_void_p, c_void_p, c_size_t, c_void_p)
_to_gpu = _function(_holding, "cuMemcpyHtoDAsync_v2", *_COPY)
_to_host = _function(_holding, "cuMemcpyDtoHAsync_v2", *_COPY)
_to_gpu_slowly = _function(_letting_go, "cuMemcpyHtoDAsync_v2", *_COPY)
_to_host_slowly = _function(_letting_go, "cuMemcpyDtoHAsync_v2", *_COPY)
_create = _function(_holding, "cuEventCreate", c_void_p, c_uint)
_destroy = _function(_holding, "cuEventDestroy_v2", c_void_p)
_record = _function(_holding, "cuEventRecord", c_void_p, c_void_p)
_wait = _function(_holding, "cuStreamWaitEvent", c_void_p, c_void_p, c_uint)
_exchange = _function(_holding, "cuThreadExchangeStreamCaptureMode", c_void_p)
_synchronize = _function(_letting_go, "cuEventSynchronize", c_void_p)
_launch = _function(
    _holding, "cuLaunchKernel", c_void_p, *[c_uint] * 7, c_void_p, ctypes.POINTER(c_void_p), c_void_p
)


def enter(device: torch.device) -> None:
    """Once per thread that calls any of these or torch's, or more often."""
    torch.cuda.set_device(device)  # by itself no context for the driver: it may do nothing for device 0
    (error,) = cudart.cudaSetDevice(device.index or 0)
    _check(int(error))


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """An engine may be capturing CUDA graphs, on a thread of its own. Waits and page-locking would be refused
    meanwhile, and break what is captured: the driver takes them for a part of it. Not in here.
    """
    mode = c_int(_RELAXED)
    _check(_exchange(ctypes.byref(mode)))
    try:
        yield
    finally:
        _check(_exchange(ctypes.byref(mode)))


def copy_to_gpu(gpu: int, host: int, size: int, stream: int, *, locked: bool) -> None:
    """`locked`: the host's memory is page-locked. Else the call takes as long as the copy."""
    _check((_to_gpu if locked else _to_gpu_slowly)(gpu, host, size, stream))


def copy_to_host(gpu: int, host: int, size: int, stream: int, *, locked: bool) -> None:
    _check((_to_host if locked else _to_host_slowly)(host, gpu, size, stream))


class Event:
    def __init__(self) -> None:
        self._handle = c_void_p()
        _check(_create(ctypes.byref(self._handle), _NO_TIMING | _BLOCKING))
        weakref.finalize(self, _destroy, self._handle).atexit = False  # CUDA may be gone by then

    def record(self, stream: int) -> None:
        _check(_record(self._handle, stream))

    def hold_up(self, stream: int) -> None:
        """What is launched on that stream from now on waits for this."""
        _check(_wait(stream, self._handle, 0))

    def synchronize(self) -> None:
        _check(_synchronize(self._handle))


class Kernel:
    """A compiled kernel whose arguments are pointers and small integers."""

    def __init__(self, function: int, threads: int, shared: int, arguments: int) -> None:
        self._function, self._threads, self._shared = function, threads, shared
        slots = arguments + HIDDEN
        self._values = (ctypes.c_int64 * slots)()  # an integer of 4 bytes is the beginning of one of 8
        first = ctypes.addressof(self._values)
        self._pointers = (c_void_p * slots)(*range(first, first + 8 * slots, 8))
        self._arguments = arguments

    def launch(self, x: int, y: int, stream: int, *arguments: int) -> None:
        self._values[: self._arguments] = list(arguments)
        _check(
            _launch(self._function, x, y, 1, self._threads, 1, 1, self._shared, stream, self._pointers, None)
        )


def _check(error: int) -> None:
    if error:
        raise CellarError(f"the CUDA driver refused a call: error {error}")
