"""The client that behaves: stores and loads beside a fuzzer, and expects every answer to be right and in
time.

    python -m tests.fuzz.healthy SERVER

What is in `kept` was stored once and an operator pinned it: every lookup must find all of it. Into `churn` it
stores something new all the time, and looks it up at once; where fuzzers ask for the same memory, room may be
missing or be taken away, and that is counted, but never may an answer be late or wrong. Prints one JSON line
now and then; the end of stdin is the sign to leave.
"""

import os
import random
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from kvcellar.client import AdminClient, Grant, SchedulerClient, WorkerClient
from kvcellar.identity import ChunkKey, CopyPlan
from kvcellar.slab import NO_PLACE, Bytes
from kvcellar.transfer import HostTransfer
from tests.fuzz.values import namespace
from tests.fuzz.words import HEALTHY

KEPT, CHURN = namespace(96, tenant="kept"), namespace(102, tenant="churn")
_PROMPTS, _CHUNKS = 24, 8
_ANSWER_S = 5.0
_PAUSE_S = 0.003


class Pulse(msgspec.Struct):
    """Since the last one."""

    lookups: int = 0
    stores: int = 0
    objects: int = 0  # loaded and compared
    crowded_out: int = 0  # stores and lookups of `churn` that found no room, or nothing any more
    slowest_ms: float = 0.0
    complaints: list[str] = []


class Side:
    """One namespace of the engine, with one group and one rank."""

    def __init__(self, path: Path, space, session: str, pulse: Pulse) -> None:
        self.space = space
        self.pulse = pulse
        self._scheduler = SchedulerClient(path, session, space, "healthy")
        self._worker = WorkerClient(path, session, 0, space)
        self._memory: Bytes = np.zeros((_CHUNKS * 16, 256), np.uint8)
        self._transfer = HostTransfer(space, 0, 0, [self._memory])

    def wait_connected(self) -> bool:
        return self._scheduler.wait_connected(10.0) and self._worker.wait_connected(10.0)

    def close(self) -> None:
        self._worker.close()
        self._scheduler.close()

    def store(self, prompt: int) -> None:
        self.pulse.stores += 1
        keys = keys_of(prompt)
        self._scheduler.reserve(prompt, keys, None)
        self._scheduler.flush()
        began = time.monotonic()
        answers = self._scheduler.collect(2 * _ANSWER_S)
        self._took(began)
        grant = answers[0][1] if answers else Grant(0, 0, [], "unanswered")
        self._check(grant, prompt)
        if not grant.lease:
            return
        self._memory[:] = np.concatenate([kv_of(key) for key in keys]).reshape(self._memory.shape)
        with self._worker.copying(grant.lease) as slots:
            self._transfer.store(self._plan(grant), keys[: grant.chunks], slots)
        self._worker.commit(grant.lease, 0, grant.chunks)
        if not self._worker.flush(_ANSWER_S):
            self.pulse.complaints.append(f"{self.space.tenant}: a commit was not answered in time")
        self._scheduler.forget(grant.lease)

    def load(self, prompt: int) -> None:
        self.pulse.lookups += 1
        keys = keys_of(prompt)
        began = time.monotonic()
        hit = self._scheduler.lookup(keys, _ANSWER_S)
        self._took(began)
        self._check(hit, prompt)
        if not hit.lease:
            return
        self._memory.fill(0)
        with self._worker.copying(hit.lease) as slots:
            bad = self._transfer.load(self._plan(hit), keys[: hit.chunks], slots)
        for chunk in range(hit.chunks):
            self.pulse.objects += 1
            if chunk in bad or not np.array_equal(
                self._memory[16 * chunk : 16 * chunk + 16].ravel(), kv_of(keys[chunk])
            ):
                self.pulse.complaints.append(
                    f"{self.space.tenant}: wrong bytes in prompt {prompt} chunk {chunk}"
                )
        self._worker.release(hit.lease, 0, hit.chunks)
        self._scheduler.forget(hit.lease)

    def _check(self, grant: Grant, prompt: int) -> None:
        if grant.chunks == _CHUNKS:
            return
        if self.space is CHURN and grant.reason in ("", "no_room"):
            self.pulse.crowded_out += 1
        else:
            self.pulse.complaints.append(f"{self.space.tenant}: prompt {prompt}: {grant}")

    def _plan(self, grant: Grant) -> CopyPlan:
        places = grant.places[0]
        assert NO_PLACE not in places
        return CopyPlan(0, places, np.arange(16 * len(places)).reshape(-1, 16))

    def _took(self, began: float) -> None:
        self.pulse.slowest_ms = max(self.pulse.slowest_ms, 1000 * (time.monotonic() - began))


def keys_of(prompt: int) -> list[ChunkKey]:
    return [ChunkKey(prompt.to_bytes(8, "big") + chunk.to_bytes(8, "big")) for chunk in range(_CHUNKS)]


def kv_of(key: ChunkKey) -> Bytes:
    return np.random.default_rng(int.from_bytes(key, "big")).integers(0, 256, 4096, np.uint8)


def _wait_for_the_end(leave: threading.Event) -> None:
    sys.stdin.read()
    leave.set()


def main() -> None:
    path, pulse, told = Path(sys.argv[1]), Pulse(), time.monotonic()
    leave = threading.Event()
    threading.Thread(target=_wait_for_the_end, args=(leave,), daemon=True).start()
    kept, churn = Side(path, KEPT, HEALTHY, pulse), Side(path, CHURN, f"{HEALTHY}-churn", pulse)
    assert kept.wait_connected()
    assert churn.wait_connected()
    for prompt in range(_PROMPTS):
        kept.store(prompt)
    with AdminClient(path) as admin:
        admin.pin(KEPT.id, True)
    fresh = 1 << 32
    while not leave.is_set():
        for _ in range(8):
            kept.load(random.randrange(_PROMPTS))
            time.sleep(_PAUSE_S)
        churn.store(fresh)
        churn.load(fresh)
        fresh += 1
        if time.monotonic() > told + 0.3:
            told = time.monotonic()
            os.write(1, msgspec.json.encode(pulse) + b"\n")
            pulse = kept.pulse = churn.pulse = Pulse(complaints=[])
    churn.close()
    kept.close()
    os.write(1, msgspec.json.encode(pulse) + b"\n")


if __name__ == "__main__":
    main()
