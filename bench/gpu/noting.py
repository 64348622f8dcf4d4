"""KVCellar's connector, whose calls leave a line each in a file. See timeline.py."""

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from bench.gpu.timeline import VARIABLE
from kvcellar.transfer import HostMover
from kvcellar.vllm import connector
from kvcellar.vllm.connector import _Facade as Facade

try:
    from kvcellar.transfer.cuda.mover import CudaMover
    from kvcellar.transfer.cuda.ring import Ring
except ImportError:  # vLLM for CPU
    CudaMover = Ring = None  # type: ignore[assignment,misc]


@functools.cache
def _file() -> int:
    return os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _note(moment: str) -> None:
    os.write(_file(), f"{time.monotonic()} {moment}\n".encode())


def _noting(method: Callable[..., Any], before: str = "", after: str = "") -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if before:
            _note(before)
        result = method(*args, **kwargs)
        if after:
            _note(after)
        return result

    return call


if Ring is None:
    HostMover.load = _noting(HostMover.load, "copying", "copied")  # type: ignore[method-assign]
else:
    Ring.load = _noting(Ring.load, "copying")  # type: ignore[method-assign]
    CudaMover.load = _noting(CudaMover.load, after="copied")  # type: ignore[method-assign]


class _Noting(Facade):
    """Put before a connector's class."""

    get_num_new_matched_tokens = _noting(Facade.get_num_new_matched_tokens, "offer", "offered")
    request_finished = _noting(Facade.request_finished, "finished")
    request_finished_all_groups = _noting(Facade.request_finished_all_groups, "finished")

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        if connector_metadata.loads:
            _note("load")
        if not connector_metadata.idle:
            _note("forward")
        super().bind_connector_metadata(connector_metadata)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if connector_output.finished_recving:
            _note("told")


class KVCellarConnector(_Noting, connector.KVCellarConnector):
    pass


class KVCellarHybridConnector(_Noting, connector.KVCellarHybridConnector):
    pass
