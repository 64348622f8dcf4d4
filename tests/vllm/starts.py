"""Starts engines one after the other, each in a child of a process that has vLLM imported already: three
seconds each instead of ten. A program for vLLM's own interpreter; `harness.start_engines` runs it.

Reads one JSON line on stdin, a list of jobs as in engine.py with four words more: "log", a file for all that
the engine prints; "prompt", token ids; "unprivileged", whether root shall be nobody special; "old", whether
the connector shall take vLLM for one that cannot say which requests' loads failed. Answers each with a line:
{"tokens": [...], "namespace": the id of the one that its KV is in, or ""} after a request, or {"refused": the
error}.
"""

# mypy: disable-error-code="import-not-found"

import ctypes
import importlib
import json
import os
import sys
from typing import Any

from tests.vllm.engine import Engine, set_environment, take_stdout

_CAPABILITY_VERSION = 0x20080522
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2


def main() -> None:
    answers = take_stdout()
    jobs = json.loads(sys.stdin.readline())
    set_environment(ranks=1)
    import vllm.v1.core.sched.scheduler  # noqa: PLC0415 -- only after the environment is set
    import vllm.v1.engine.core  # noqa: PLC0415
    import vllm.v1.worker.cpu_worker  # noqa: F401, PLC0415

    from kvcellar.vllm import scheduler  # noqa: PLC0415

    scheduler._PROBE_S = 10.0  # what is at the other end is the test's to say, however busy the machine
    for job in jobs:
        child = os.fork()
        if child == 0:
            with open(job["log"], "wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            if job.get("unprivileged"):
                drop_privileges()
            if job.get("old"):
                make_old()
            answers.write(json.dumps(_start(job)) + "\n")
            answers.flush()
            os._exit(0)
        os.waitpid(child, 0)


def _start(job: dict[str, Any]) -> dict[str, Any]:
    try:
        engine = Engine(job)
    except Exception as error:  # noqa: BLE001 - the test says what it expects
        return {"refused": f"{type(error).__name__}: {error}"}
    [output] = engine.play({"prompts": [job["prompt"]], "max_tokens": 4})["outputs"]
    connector = getattr(engine.scheduler, "connector", None)
    client = connector._scheduler._client if connector is not None else None
    return {"tokens": output["tokens"], "namespace": client.namespace.id.hex() if client else ""}


def drop_privileges() -> None:
    """Without these capabilities the mode of a file counts for root as well."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, twice
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    for at in (0, 1):
        data[at] &= ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    if libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def make_old() -> None:
    """The connector finds no TransferResults, and vLLM no method of it that has them."""
    import kvcellar.vllm  # noqa: PLC0415
    from kvcellar.vllm import compat, connector  # noqa: PLC0415

    compat.TransferResults = None
    importlib.reload(connector)
    del connector._Facade.get_transfer_results
    importlib.reload(kvcellar.vllm)


if __name__ == "__main__":
    main()
