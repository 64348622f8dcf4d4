"""As much of CUDA as the GPU's mover calls, on a machine without any: memory is host memory, and Triton's
interpreter runs the kernels. Streams are real in what they promise and in nothing more: what is launched
happens when somebody waits for it, in the order of its stream, and in any order with other streams that their
events allow. So the mover's arithmetic and its order of things are tested everywhere; page-locking, captures
and the driver itself are for `make gpu`.

To be imported before torch and Triton.
"""

import collections
import contextlib
import ctypes
import enum
import functools
import itertools
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

_order = random.Random(0)
_streams: dict[int, "_Stream"] = {}
_numbers = itertools.count()
_one_at_a_time = threading.Lock()


class _Error(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2


class _Stream:
    """Things to do, each with what it has to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = next(_numbers)
        self.todo: collections.deque[tuple[Callable[[], bool], Callable[[], Any]]] = collections.deque()
        _streams[self.cuda_stream] = self

    def put(self, action: Callable[[], Any], ready: Callable[[], bool] = lambda: True) -> None:
        self.todo.append((ready, action))


class _Here(threading.local):
    """A thread's stream."""

    stream = _Stream()  # by default all have the same


_here = _Here()


class _Event:
    """Torch's and the driver's: those know streams by number."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._happened = [True]  # of the latest record; one that was never recorded holds up nobody

    def record(self, stream: Any) -> None:
        happened = self._happened = [False]
        _known(stream).put(functools.partial(happened.__setitem__, 0, True))

    def hold_up(self, stream: int) -> None:
        happened = self._happened
        _known(stream).put(lambda: None, lambda: happened[0])

    def query(self) -> bool:
        return False  # so that it is waited for

    def synchronize(self) -> None:
        happened = self._happened
        while not happened[0]:
            with _one_at_a_time:
                able = [stream for stream in _streams.values() if stream.todo and stream.todo[0][0]()]
                assert able or happened[0], "they wait for each other"
                if able:
                    _order.choice(able).todo.popleft()[1]()


def _known(stream: Any) -> _Stream:
    return _streams[getattr(stream, "cuda_stream", stream)]


def _to_gpu(gpu: int, host: int, size: int, stream: int, *, locked: bool) -> None:
    _known(stream).put(functools.partial(ctypes.memmove, gpu, host, size))


def _to_host(gpu: int, host: int, size: int, stream: int, *, locked: bool) -> None:
    _known(stream).put(functools.partial(ctypes.memmove, host, gpu, size))


@contextlib.contextmanager
def _on(stream: _Stream) -> Iterator[None]:
    before, _here.stream = _here.stream, stream
    yield
    _here.stream = before


def _nothing(*arguments: Any) -> tuple[_Error]:
    return (_Error.cudaSuccess,)


def shuffle(seed: int) -> None:
    """In which order streams go on from now on."""
    _order.seed(seed)


def install() -> None:
    runtime = types.ModuleType("cuda.bindings.runtime")
    vars(runtime).update(
        cudaError_t=_Error,
        cudaHostRegisterPortable=1,
        cudaHostRegister=_nothing,
        cudaHostUnregister=_nothing,
        cudaGetLastError=_nothing,
    )
    bindings, cuda = types.ModuleType("cuda.bindings"), types.ModuleType("cuda")
    vars(bindings).update(runtime=runtime)
    vars(cuda).update(bindings=bindings)
    sys.modules |= {"cuda": cuda, "cuda.bindings": bindings, "cuda.bindings.runtime": runtime}
    driver = types.ModuleType("kvcellar.transfer.cuda.driver")
    vars(driver).update(
        copy_to_gpu=_to_gpu,
        copy_to_host=_to_host,
        enter=_nothing,
        beside_captures=contextlib.nullcontext,
        Event=_Event,
        Kernel=_Error,  # any class: nothing is compiled
        HIDDEN=4,
    )
    sys.modules[driver.__name__] = driver
    empty = torch.empty
    changes: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Event,
        "stream": _on,
        "current_stream": lambda *_: _here.stream,
        "set_device": _nothing,
    }
    for name, instead in changes.items():
        setattr(torch.cuda, name, instead)
    torch.Tensor.pin_memory = lambda self: self
    torch.empty = lambda *sizes, pin_memory=False, **more: empty(*sizes, **more)


def launch_on_streams(module: types.ModuleType) -> None:
    """Where a module calls `move`, the kernel takes its turn on the thread's stream."""
    move = vars(module)["move"]
    vars(module)["move"] = lambda *arguments, **how: _here.stream.put(
        functools.partial(move, *arguments, **how)
    )
