"""Many engines at once: each with connections and a thread of its own, spread over a few processes.

The threads of one process share an interpreter, so one process of them would measure itself. How busy server
and clients were is part of the result: a server that was not busy all the time was waiting for its clients.

`python -m kvcellar.bench.crowd` is one such process. It says "ready", waits for a line, and prints figures.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvcellar.bench.child import ServerProcess, child, must
from kvcellar.bench.engine import Engine, fresh_keys
from kvcellar.bench.machine import summary

PROCESSES = 2
CHUNKS = 32  # 8k tokens
# A server that wanted a core for less than this share of the time was not what limited the clients.
_BUSY = 0.85
_OPERATIONS = ("lookup", "store")


def measure_crowd(server: ServerProcess, clients: int, seconds: float) -> dict[str, Any]:
    figures: dict[str, Any] = {"clients": clients, "processes": PROCESSES}
    for operation in _OPERATIONS:
        figures[operation] = _measure(server, operation, clients, seconds)
    return figures


def _measure(server: ServerProcess, operation: str, clients: int, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvcellar.bench.crowd", str(server.socket), operation]
    command += [str(clients // PROCESSES), str(seconds)]
    with contextlib.ExitStack() as stack:
        crowd = [
            stack.enter_context(child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(PROCESSES)
        ]
        for process in crowd:
            must(_line(process) == b"ready\n", "a client process did not start")
        before, start = server.thread_times(), time.perf_counter()
        for process in crowd:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        parts = [json.loads(_line(process)) for process in crowd]
        elapsed, after = time.perf_counter() - start, server.thread_times()
    server_cpu, starved = ((b - a) / elapsed for a, b in zip(before, after, strict=True))
    times = [each for part in parts for each in part["times"]]
    return {
        **summary(times),
        "per_s": round(sum(len(part["times"]) / part["seconds"] for part in parts)),
        "server_cpu": round(server_cpu, 2),
        "client_cpu": round(sum(part["cpu_s"] / part["seconds"] for part in parts), 2),
        "server_starved": round(starved, 2),
        "client_bound": server_cpu + starved < _BUSY,
    }


def _line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    line: bytes = process.stdout.readline()
    must(bool(line), "a client process gave up")
    return line


# ---- one process of the crowd


def main() -> None:
    socket, operation, clients, seconds = sys.argv[1:]
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(Engine(Path(socket), 1)) for _ in range(int(clients))]
        loops = [_lookups(engine) if operation == "lookup" else _stores(engine) for engine in engines]
        print("ready", flush=True)
        sys.stdin.readline()
        start, cpu = time.perf_counter(), time.process_time()
        until = start + float(seconds)
        with ThreadPoolExecutor(len(loops)) as pool:
            times = [each for part in pool.map(lambda loop: _repeat(loop, until), loops) for each in part]
        taken = {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
    print(json.dumps(taken | {"times": times}), flush=True)


def _lookups(engine: Engine) -> Callable[[], float]:
    """Each engine has a prompt of its own; what a lookup pinned is given back before the next."""
    keys = fresh_keys(CHUNKS)
    engine.fill(keys)
    return lambda: engine.lookup(keys)


def _stores(engine: Engine) -> Callable[[], float]:
    return lambda: engine.store(fresh_keys(CHUNKS))


def _repeat(operation: Callable[[], float], until: float) -> list[float]:
    times: list[float] = []
    while not times or time.perf_counter() < until:
        times.append(operation())
    return times


if __name__ == "__main__":
    main()
