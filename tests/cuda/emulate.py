"""As much of CUDA as the GPU's mover calls, on a machine without any: memory is host memory, every copy and
kernel is over when its call returns, and Triton's interpreter runs the kernels. So the mover's arithmetic is
tested everywhere; what only a GPU can do wrong (streams, events, page-locking) is for `make gpu`.

To be imported before torch and Triton.
"""

import contextlib
import ctypes
import enum
import os
import sys
import types
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch


class _Error(enum.IntEnum):
    cudaSuccess = 0


def _to_gpu(gpu: int, host: int, size: int, stream: int, *, locked: bool) -> None:
    ctypes.memmove(gpu, host, size)


def _to_host(gpu: int, host: int, size: int, stream: int, *, locked: bool) -> None:
    ctypes.memmove(host, gpu, size)


def _nothing(*arguments: Any) -> tuple[_Error]:
    return (_Error.cudaSuccess,)


class _Ordered:
    """A stream or an event: there is nothing to wait for."""

    cuda_stream = 0

    def __init__(self, *arguments: Any, **more: Any) -> None:
        pass

    def wait(self, *arguments: Any) -> None:
        pass

    wait_event = wait_stream = record = synchronize = hold_up = wait

    def query(self) -> bool:
        return False  # so that it is waited for


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
        Event=_Ordered,
        Kernel=_Ordered,
        HIDDEN=4,
    )
    sys.modules[driver.__name__] = driver
    empty = torch.empty
    changes: dict[str, Any] = {
        "Stream": _Ordered,
        "Event": _Ordered,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": _Ordered,
        "set_device": _nothing,
    }
    for name, instead in changes.items():
        setattr(torch.cuda, name, instead)
    torch.Tensor.pin_memory = lambda self: self
    torch.empty = lambda *sizes, pin_memory=False, **more: empty(*sizes, **more)
