"""An engine made of the real clients, and the same in a process of its own that can be killed.

Its KV is a function of chunk key, shard and group, so any process can tell whether bytes are right.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcellar.client import Expected, Grant, SchedulerClient, WorkerClient, scheduler
from kvcellar.identity import ChunkKey, CopyPlan, Namespace, ParallelStrategy, layout_of
from kvcellar.slab import NO_PLACE, Bytes
from kvcellar.transfer import HostTransfer
from tests.support import full_group, keys, namespace, window_group

REPOSITORY = Path(__file__).parents[2]

# A reserve waits so long for memory that is just being made, and is then granted what fits, which a test may
# take for something else; and a server that takes no bytes for so long is taken for gone. 0.2 s are little on
# a busy machine. The server itself waits no longer than a second.
scheduler._FLUSH_S = 10.0

# Every namespace that tests use, by a name that can be given to another process.
NAMESPACES: dict[str, Namespace] = {
    "one": namespace(checksum="xxh3-64"),
    "other": namespace(checksum="xxh3-64", tenant="other"),
    "tp2": namespace(checksum="xxh3-64", parallel=ParallelStrategy(tp=2)),
    "mla": namespace(checksum="xxh3-64", parallel=ParallelStrategy(tp=2, mla=True)),
    "hybrid": namespace(checksum="xxh3-64", groups=(full_group(), window_group(2))),
}


# Seconds for whatever happens at last, on a busy machine too. Nothing that a test waits for by these takes as
# long; it is for those who judge how long something takes to say so.
PATIENCE = 60.0


def eventually(predicate: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    """Wait until the predicate holds, and return what it returned."""
    deadline = time.monotonic() + timeout
    while not (result := predicate()):
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.005)
    return result


def kv_of(key: ChunkKey, shard: int, group: int, size: int) -> Bytes:
    seed = int.from_bytes(key, "little") ^ shard << 8 ^ group
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


class Engine:
    """One session: its scheduler side and its ranks, or some of them."""

    def __init__(
        self,
        socket: Path,
        name: str = "one",
        session: str = "engine",
        ranks: Sequence[int] | None = None,
        schedules: bool = True,
    ) -> None:
        self.namespace = NAMESPACES[name]
        world = range(self.namespace.parallel.world_size)
        self._scheduler = SchedulerClient(socket, session, self.namespace, "test") if schedules else None
        self.workers = {
            rank: WorkerClient(socket, session, rank, self.namespace)
            for rank in (world if ranks is None else ranks)
        }

    def ready(self, timeout: float = PATIENCE) -> "Engine":
        assert all(client.wait_connected(timeout) for client in self._clients)
        return self

    def close(self) -> None:
        for client in self._clients:
            client.close()

    @property
    def _clients(self) -> list[SchedulerClient | WorkerClient]:
        return [*self.workers.values(), *([self._scheduler] if self._scheduler else [])]

    @property
    def scheduler(self) -> SchedulerClient:
        assert self._scheduler is not None
        return self._scheduler

    # -- the scheduler side ------------------------------------------------------------------------------

    def lookup(self, count: int, seed: int = 0, timeout: float = PATIENCE) -> Grant:
        return self.scheduler.lookup(keys(count, seed), timeout)

    def bring(self, count: int, seed: int = 0, wait: float = PATIENCE) -> Grant:
        """The whole hit, tiers included; what memory had at once is given back for it."""
        grant = self.scheduler.lookup(keys(count, seed), PATIENCE, wait)
        if not grant.ticket:
            return grant
        brought = self.wait_for(grant, wait + PATIENCE)
        if not brought.lease:
            return grant
        self.give_back(grant)
        return brought

    def wait_for(self, grant: Grant, timeout: float = PATIENCE) -> Grant:
        """What tiers had for a lookup with a ticket."""
        brought: Grant = eventually(lambda: self.scheduler.brought(grant.ticket), timeout)
        return brought

    def lookup_and_wait(self, count: int, seed: int = 0) -> Grant:
        return self.scheduler.lookup(keys(count, seed), PATIENCE, PATIENCE)

    def expect(self, count: int, seed: int = 0, wait: float = PATIENCE) -> Expected:
        """Tell the server of a request in the queue."""
        expected = self.scheduler.expect(keys(count, seed), wait)
        self.scheduler.flush()
        return expected

    def expect_and_forget(self, count: int, seed: int = 0) -> None:
        self.expect(count, seed)

    def no_longer(self, *expected: Expected) -> None:
        for one in expected:
            self.scheduler.no_longer(one)
        self.scheduler.flush()

    def hit(self, count: int, seed: int = 0, timeout: float = PATIENCE) -> int:
        """How many chunks are found; they are given back at once."""
        grant = self.lookup(count, seed, timeout)
        self.give_back(grant)
        return grant.chunks

    def reserve(self, count: int, seed: int = 0, groups: Sequence[int] | None = None) -> Grant:
        self.scheduler.reserve("store", keys(count, seed), None, groups)
        self.scheduler.flush()
        [(tag, grant)] = self.scheduler.collect(PATIENCE)
        assert tag == "store"
        return grant

    def give_back(self, grant: Grant) -> None:
        if grant.lease:
            self.scheduler.release(grant.lease, 0, grant.chunks)
            self.scheduler.flush()

    def change(self, namespace: Namespace) -> None:
        """Work with another namespace from now on."""
        self.namespace = namespace
        self.scheduler.register(namespace, PATIENCE)
        for worker in self.workers.values():
            worker.register(namespace)
        self.flush()

    # -- the ranks ---------------------------------------------------------------------------------------

    def write(self, grant: Grant, seed: int = 0, groups: Sequence[int] | None = None) -> None:
        """Every writer here copies its KV into the places of a reserve for these groups."""
        for rank in self.writers:
            shard = self.namespace.parallel.kv_worker_id(rank)
            for group, places in zip(groups or range(len(grant.places)), grant.places, strict=True):
                chunks, wanted = _chosen(places, seed)
                transfer = self._transfer(shard, group, len(chunks))
                for row, key in enumerate(wanted):
                    transfer.memory[row] = kv_of(key, shard, group, transfer.size)
                with self.workers[rank].copying(grant.lease, PATIENCE) as slots:
                    transfer.host.store(transfer.plan(places[chunks]), wanted, slots)

    def commit(self, grant: Grant) -> None:
        for rank in self.writers:
            self.workers[rank].commit(grant.lease, 0, grant.chunks)
        self.flush()

    def store(self, count: int, seed: int = 0, groups: Sequence[int] | None = None) -> Grant:
        """Reserve, copy, commit. What was found to be there already is not written."""
        grant = self.reserve(count, seed, groups)
        if grant.lease:
            self.write(grant, seed, groups)
            self.commit(grant)
        return grant

    def read(self, grant: Grant, rank: int = 0, seed: int = 0) -> list[tuple[int, int]]:
        """Copy a hit and compare every byte; returns what the transfer reported as bad: (group, chunk)."""
        shard, bad = self.namespace.parallel.kv_worker_id(rank), []
        for group, places in enumerate(grant.places):
            chunks, wanted = _chosen(places, seed)
            transfer = self._transfer(shard, group, len(chunks))
            with self.workers[rank].copying(grant.lease, PATIENCE) as slots:
                failed = transfer.host.load(transfer.plan(places[chunks]), wanted, slots)
            bad += [(group, chunks[row]) for row in failed]
            for row, key in enumerate(wanted):
                right = np.array_equal(transfer.memory[row], kv_of(key, shard, group, transfer.size))
                assert right or row in failed, f"wrong bytes went unnoticed: group {group}, row {row}"
        return bad

    def release(self, grant: Grant, *ranks: int) -> None:
        for rank in ranks or self.workers:
            self.workers[rank].release(grant.lease, 0, grant.chunks)
        self.flush()

    def flush(self) -> None:
        assert all(worker.flush(PATIENCE) for worker in self.workers.values())

    @property
    def writers(self) -> list[int]:
        return [rank for rank in self.workers if self.namespace.parallel.is_writer(rank)]

    def _transfer(self, shard: int, group: int, rows: int) -> "_Transfer":
        layout = layout_of(self.namespace, shard, group)
        memory = np.zeros((rows, layout.object_bytes), np.uint8)
        [layer] = layout.layers
        host = HostTransfer(self.namespace, shard, group, [memory.reshape(-1, layer.block_bytes)])
        return _Transfer(host, memory)


class _Transfer(NamedTuple):
    """Memory for some chunks, one per row, and what copies it."""

    host: HostTransfer
    memory: Bytes

    @property
    def size(self) -> int:
        return self.host.layout.object_bytes

    def plan(self, places: npt.NDArray[np.uint32]) -> CopyPlan:
        layout = self.host.layout
        blocks = np.arange(len(places) * layout.blocks_per_chunk).reshape(len(places), -1)
        return CopyPlan(self.host.group, places, blocks)


def _chosen(places: npt.NDArray[np.uint32], seed: int) -> tuple[list[int], list[ChunkKey]]:
    """The chunks that have a place, and their keys."""
    chunks = np.flatnonzero(places != NO_PLACE).tolist()
    names = keys(len(places), seed)
    return chunks, [names[chunk] for chunk in chunks]


# -- in a process of its own ---------------------------------------------------------------------------------


class Child:
    """An engine in another process, which does what `call` says: the name of one of Engine's methods."""

    def __init__(self, socket: Path, log: Path, **options: Any) -> None:
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.server.engine", str(socket), json.dumps(options)],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self.call("ready")

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        call = [method, [_packed(argument) for argument in arguments], options]
        self.process.stdin.write(json.dumps(call).encode() + b"\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the child is gone; its log says why"
        return _unpacked(json.loads(answer))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """At once and for good, as kill -9 does it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def _packed(value: Any) -> Any:
    if isinstance(value, Grant):
        return {"grant": value._replace(places=[row.tolist() for row in value.places])}
    return None if isinstance(value, Engine) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        grant = Grant(*value["grant"])
        return grant._replace(places=[np.array(row, np.uint32) for row in grant.places])
    return value


def _obey(engine: Engine) -> None:
    for line in sys.stdin:
        method, arguments, options = json.loads(line)
        result = getattr(engine, method)(*map(_unpacked, arguments), **options)
        print(json.dumps(_packed(result)), flush=True)


if __name__ == "__main__":
    _obey(Engine(Path(sys.argv[1]), **json.loads(sys.argv[2])))
