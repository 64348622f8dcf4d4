"""What an engine is to the server: a scheduler and its ranks, without a model.

Its KV is one page per chunk and rank and nobody writes it: what is left to measure is the bookkeeping. The
scheduler is the client that a real engine uses. Ranks are bare connections, because a real engine has each in
a process of its own, and threads of one process would wait for each other.
"""

import itertools
import os
import time
from pathlib import Path
from types import TracebackType

from kvcellar.bench.child import must
from kvcellar.bench.namespace import bench_namespace
from kvcellar.client import Grant, SchedulerClient
from kvcellar.client.link import Link, checked
from kvcellar.errors import DeadlineExceeded
from kvcellar.identity import KEY_BYTES, ChunkKey
from kvcellar.wire import messages as m

CHUNK_TOKENS = 256
BLOCK_BYTES = 256  # a chunk of them is one page, the smallest slot there is
_WAIT_S = 30.0  # no single answer may take longer

_numbers = itertools.count()


class Engine:
    def __init__(self, socket: Path, tp: int) -> None:
        self.namespace = bench_namespace(1, BLOCK_BYTES, CHUNK_TOKENS, tp=tp, checksum="none")
        self._session = f"bench-{os.getpid()}-{next(_numbers)}"
        self._scheduler = SchedulerClient(socket, self._session, self.namespace)
        must(self._scheduler.wait_connected(_WAIT_S), "no connection")
        self._ranks = [self._attach(socket, rank) for rank in range(tp)]
        self._nowhere = fresh_keys(1)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scheduler.close()
        for link in self._ranks:
            link.close()

    def lookup(self, keys: list[ChunkKey]) -> float:
        """Seconds from keys to places. What it pinned is given back without waiting, as a scheduler does."""
        start = time.perf_counter()
        grant = self._scheduler.lookup(keys, _WAIT_S)
        taken = time.perf_counter() - start
        must(grant.chunks == len(grant.places[0]) == len(keys), f"{grant.chunks} of {len(keys)} chunks hit")
        self._scheduler.release(grant.lease, 0, grant.chunks)
        self._scheduler.forget(grant.lease)
        self._scheduler.flush()
        return taken

    def settled_lookup(self, keys: list[ChunkKey]) -> float:
        taken = self.lookup(keys)
        self._scheduler.lookup(self._nowhere, _WAIT_S)  # in order: once it is answered, all was given back
        return taken

    def ask_tiers(self, keys: list[ChunkKey]) -> None:
        """A lookup of what is nowhere, which waits for tiers a while; nobody waits for it."""
        self._scheduler.give_up(self._scheduler.lookup(keys, _WAIT_S, 0.5).ticket)

    def store(self, keys: list[ChunkKey]) -> float:
        """Seconds until there were places for new chunks and every rank's commit was answered."""
        start = time.perf_counter()
        grant = self._reserve(keys)
        settled = self._commit(grant)
        taken = time.perf_counter() - start
        must(grant.chunks == len(keys), f"{grant.chunks} of {len(keys)} chunks got a place")
        must(settled == [m.Settled(len(keys))] * len(settled), f"commits were answered with {settled}")
        return taken

    def fill(self, keys: list[ChunkKey]) -> None:
        """Store all of it, as soon as there is memory for all of it."""
        grant = self._reserve(keys)
        while grant.chunks < len(keys):
            self._commit(grant)
            grant = self._reserve(keys)
        self._commit(grant)

    def _reserve(self, keys: list[ChunkKey]) -> Grant:
        self._scheduler.reserve("", keys, None)
        self._scheduler.flush()
        [(_, grant)] = self._scheduler.collect(_WAIT_S)
        return grant

    def _commit(self, grant: Grant) -> list[m.Result]:
        """All ranks at once; the answers in their order."""
        for link in self._ranks:
            link.send((m.Commit(grant.lease, 0, grant.chunks),), _WAIT_S)
        settled = [_result(link) for link in self._ranks]
        self._scheduler.forget(grant.lease)
        return settled

    def _attach(self, socket: Path, rank: int) -> Link:
        link = Link.open(socket, m.Hello(m.PROTOCOL_VERSION, "worker", self._session, rank), _WAIT_S)
        link.call(m.Register(self.namespace), _WAIT_S, m.Registered)
        return link


def fresh_keys(count: int) -> list[ChunkKey]:
    packed = os.urandom(count * KEY_BYTES)
    return [ChunkKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)]


def _result(link: Link) -> m.Result:
    """The result of the one operation under way; racks may be announced before it."""
    while messages := link.receive(time.monotonic() + _WAIT_S):
        for message in messages:
            if isinstance(message, m.Reply):
                return checked(message.results[0])
    raise DeadlineExceeded("no answer in time")
