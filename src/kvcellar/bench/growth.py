"""How the server's memory and time grow with the number of objects in its index.

The index is filled in ten steps with prompts of 128k tokens at TP 1, one page of shared memory per chunk, and
nothing is evicted. A server whose cost per object does not depend on how many there are takes as long, and as
much memory, for the last step as for the first.
"""

import os
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvcellar.bench.child import ServerProcess, running_server
from kvcellar.bench.engine import CHUNK_TOKENS, Engine, fresh_keys
from kvcellar.bench.machine import available_memory, summary
from kvcellar.identity import ChunkKey

STEPS = 10
_PROMPT = 128 * 1024 // CHUNK_TOKENS
_SLOT_BYTES = 4096 + 64 + 64  # with its header in the slab and its entry in the table
_SPARE = 1 << 30  # left to the server itself and to everybody else
_LEAST = 64 << 20


class Step(NamedTuple):
    objects: int
    rss_bytes: int
    seconds: float  # of reserving and committing, with the client's part
    server_s: float  # the same, time on a core of the thread that decides


def measure_growth(wanted: int, lookups: int) -> dict[str, Any]:
    objects = min(wanted, _fitting())
    prompts: list[list[ChunkKey]] = []
    with (
        running_server(max(_LEAST, objects * _SLOT_BYTES * 102 // 100)) as server,
        Engine(server.socket, 1) as engine,
    ):
        empty = Step(0, server.rss_bytes(), 0.0, 0.0)
        steps = [empty, *_fill(server, engine, objects, prompts)]
        whole = [keys for keys in prompts if len(keys) == len(prompts[0])]
        times = [engine.settled_lookup(keys) for keys in random.Random(7).choices(whole, k=lookups)]
    figures = _figures(steps) | {"lookup": {"128k_tp1": summary(times)}}
    if objects < wanted:
        figures["note"] = f"there is no memory for {wanted:,} objects of one page"
    return figures


def _fitting() -> int:
    """How many objects there is memory for, in whole steps of a thousand each."""
    shm = os.statvfs("/dev/shm")
    free = min(available_memory(), shm.f_bavail * shm.f_frsize) - _SPARE
    unit = STEPS * 1000
    return max(unit, free * 100 // 102 // _SLOT_BYTES // unit * unit)


def _fill(
    server: ServerProcess, engine: Engine, objects: int, prompts: list[list[ChunkKey]]
) -> Iterator[Step]:
    for number in range(1, STEPS + 1):
        size = objects // STEPS
        mine = [fresh_keys(min(_PROMPT, size - at)) for at in range(0, size, _PROMPT)]
        cpu, start = server.thread_times().on_core_s, time.perf_counter()
        for keys in mine:
            engine.fill(keys)
        seconds = time.perf_counter() - start
        server_s = server.thread_times().on_core_s - cpu
        prompts += mine
        yield Step(size * number, server.rss_bytes(), round(seconds, 3), round(server_s, 3))


def _figures(steps: list[Step]) -> dict[str, Any]:
    empty, middle, last = steps[0], steps[STEPS // 2], steps[-1]
    halves = [
        sum(step.server_s for step in part) for part in (steps[1 : STEPS // 2 + 1], steps[STEPS // 2 + 1 :])
    ]
    return {
        "objects": last.objects,
        "bytes_per_object": round((last.rss_bytes - empty.rss_bytes) / last.objects, 1),
        "us_per_object": round(1e6 * sum(step.seconds for step in steps) / last.objects, 2),
        # What the second half took, in terms of the first: 1 is linear.
        "memory_ratio": round((last.rss_bytes - middle.rss_bytes) / (middle.rss_bytes - empty.rss_bytes), 3),
        "time_ratio": round(halves[1] / halves[0], 3),
        "steps": [step._asdict() for step in steps],
    }
