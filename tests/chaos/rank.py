"""One rank of an engine: copies what its scheduler tells it to, and compares every byte it loads with the
truth.

Slow on purpose, now and then, so that faults find it in the middle of a copy.
"""

import random
import socket
import threading
import time
from pathlib import Path

import numpy as np

from kvcellar.client import Slots, WorkerClient
from kvcellar.errors import Unavailable
from kvcellar.identity import ChunkKey
from kvcellar.slab import NO_PLACE, Bytes
from kvcellar.transfer import HostTransfer
from tests.chaos.links import cut_links
from tests.chaos.report import Done, Job, Lines, Reporter
from tests.chaos.world import SPACES, truth
from tests.support import plan_of

_FLUSH_S, _MAP_S, _CLOSE_S = 0.5, 2.0, 4.0
_SCHEDULER_S, _CONNECT_S = 6.0, 2.0
_POISON = 0xEE


class Part:
    """The rank's memory for one group, of one chunk, and the transfer to and from it."""

    def __init__(self, space: str, shard: int, group: int) -> None:
        self._space, self._shard, self._group = space, shard, group
        namespace = SPACES[space]
        layers = namespace.groups[group].layers
        count = namespace.chunk_tokens // namespace.groups[group].block_tokens
        # All layers in one piece, block after block: exactly the order of an object.
        self._memory: Bytes = np.zeros((len(layers), count, layers[0].block_bytes), np.uint8)
        self._transfer = HostTransfer(namespace, shard, group, list(self._memory))
        self._blocks = [list(range(count))]

    def store(self, place: int, key: ChunkKey, slots: Slots) -> None:
        self._memory.reshape(-1)[:] = truth(self._space, self._shard, self._group, key)
        self._transfer.store(self._plan(place), [key], slots)

    def load(self, place: int, key: ChunkKey, slots: Slots) -> bool:
        """False when the transfer itself finds the object bad. Then its bytes do not count."""
        self._memory.fill(_POISON)
        return not self._transfer.load(self._plan(place), [key], slots)

    def is_right(self, key: ChunkKey) -> bool:
        return np.array_equal(self._memory.reshape(-1), truth(self._space, self._shard, self._group, key))

    def _plan(self, place: int):
        return plan_of(self._group, [place], self._blocks)


class Rank:
    def __init__(self, server: Path, session: str, rank: int, space: str, reporter: Reporter) -> None:
        self.rank = rank
        self.cut_soon = threading.Event()
        self._was_cut = False
        self._reporter = reporter
        self._random = random.Random(f"{session}/{rank}/{time.monotonic_ns()}")
        namespace = SPACES[space]
        shard = namespace.parallel.kv_worker_id(rank)
        self._parts = [Part(space, shard, group) for group in range(len(namespace.groups))]
        self._name = f"{space} shard {shard} rank {rank}"
        self._worker = WorkerClient(server, session, rank, namespace)

    def serve(self, scheduler: Path) -> None:
        """Do jobs until the scheduler is gone."""
        sock = _connect(scheduler)
        if sock is not None:
            self._obey(Lines(sock))
        with self._reporter.timed("worker close", _CLOSE_S):
            self._worker.close()
        self._reporter.publish()

    def _obey(self, lines: Lines) -> None:
        done = [Done(self.rank, 0)]  # a lease that nobody has: only says who comes
        while lines.send(*done) and (jobs := lines.receive(Job)) is not None:
            done = [self._do(job) for job in jobs]
            self._reporter.publish_sometimes()

    def _do(self, job: Job) -> Done:
        done = Done(self.rank, job.lease, self._store(job) if job.writing else self._load(job))
        if self._was_cut:
            # The jobs that follow were granted before we attach again, and must not be done any more: give
            # others time to get the places.
            self._was_cut = False
            self._worker.wait_connected(_CONNECT_S)
            time.sleep(self._random.uniform(0.0, 0.3))
        return done

    def _store(self, job: Job) -> bool:
        try:
            with self._worker.copying(job.lease) as slots:
                for group, _, place, key in _each(job):
                    self._dawdle(slow=0.02)
                    with self._reporter.timed("store", _MAP_S):
                        self._parts[group].store(place, key, slots)
        except Unavailable:
            self._reporter.count(gave_up=1)
            self._worker.abort(job.lease, 0, len(job.keys))
            return False
        cut = self._random.choice([len(job.keys), self._random.randint(0, len(job.keys))])
        self._worker.commit(job.lease, 0, cut)
        self._worker.commit(job.lease, cut, len(job.keys))
        with self._reporter.timed("worker flush", _FLUSH_S):
            answered = self._worker.flush(_FLUSH_S)
        self._reporter.count(stores=1)
        return answered and self._worker.is_connected

    def _load(self, job: Job) -> bool:
        try:
            with self._worker.copying(job.lease) as slots:
                for group, chunk, place, key in _each(job):
                    self._dawdle(slow=0.002)
                    with self._reporter.timed("load", _MAP_S):
                        good = self._parts[group].load(place, key, slots)
                    if good:
                        self._check(group, key)
                    else:
                        self._reporter.count(bad_checksums=1)
                        self._worker.condemn(job.lease, group, chunk)
        except Unavailable:
            self._reporter.count(gave_up=1)
        self._worker.release(job.lease, 0, len(job.keys))
        return False

    def _check(self, group: int, key: ChunkKey) -> None:
        self._reporter.count(objects_loaded=1)
        if not self._parts[group].is_right(key):
            self._reporter.wrong(f"{self._name} group {group} chunk {key.hex()}")

    def _dawdle(self, slow: float) -> None:
        """Before a chunk is copied. `slow`: how likely it is that this takes very long."""
        if self.cut_soon.is_set() and self._random.random() < 10 * slow:
            self.cut_soon.clear()
            self._was_cut = True
            cut_links()
            time.sleep(self._random.uniform(0.1, 0.5))
        elif self._random.random() < slow:
            time.sleep(self._random.uniform(0.1, 0.5))
        elif self._random.random() < 0.03:
            time.sleep(self._random.uniform(0.0, 0.03))


def _each(job: Job):
    """Group, chunk, place and key of everything that has a place."""
    for group, places in enumerate(job.places):
        for chunk, place in enumerate(places):
            if place != NO_PLACE:
                yield group, chunk, place, ChunkKey(bytes.fromhex(job.keys[chunk]))


def _connect(path: Path) -> socket.socket | None:
    """The scheduler may still be starting, or have been killed while it was."""
    deadline = time.monotonic() + _SCHEDULER_S
    while time.monotonic() < deadline:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(path))
        except OSError:
            sock.close()
            time.sleep(0.01)
        else:
            return sock
    return None
