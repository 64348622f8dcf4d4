"""The scheduler side of one engine: looks prompts up, reserves the rest, tells ranks, and changes its mind at
times.
"""

import random
import select
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

from kvcellar.client import Grant, SchedulerClient
from kvcellar.identity import ChunkKey
from tests.chaos.links import cut_links
from tests.chaos.report import Done, Job, Lines, Reporter
from tests.chaos.world import PROMPTS, SPACES, prompt

_LOOKUP_S, _FLUSH_S, _CLOSE_S = 0.05, 0.2, 4.5
_RESERVE_S = 10.0  # an answer, or a miss, comes at last, whatever is stopped or killed
_WAIT_S = 0.5
_UNDER_WAY = 8  # leases that ranks are working on, at most


class _Reservation(NamedTuple):
    keys: tuple[ChunkKey, ...]
    asked: float


class _Wait(NamedTuple):
    """A lookup that waits for tiers, with what memory had."""

    hit: Grant
    keys: tuple[ChunkKey, ...]
    asked: float
    patience: float  # after which the engine goes on without


class _Work:
    """A lease that ranks were told of."""

    def __init__(self, job: Job, told: set[int]) -> None:
        self.job = job
        self.waiting = told
        self.stored = job.writing


class Planner:
    def __init__(self, server: Path, session: str, space: str, door: Path, reporter: Reporter) -> None:
        self.stop_asking = threading.Event()
        self.cut_soon = threading.Event()
        self._namespace = SPACES[space]
        self._client = SchedulerClient(server, session, self._namespace, space)
        self._reporter = reporter
        self._random = random.Random(session)
        self._work: dict[int, _Work] = {}
        self._reserved: dict[int, _Reservation] = {}
        self._waits: dict[int, _Wait] = {}  # by ticket
        self._ranks: dict[int, Lines] = {}
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(str(door))
        self._door.listen()

    def run(self, closed: threading.Event) -> None:
        told_idle = False
        while not closed.is_set():
            if not self.stop_asking.is_set() and len(self._work) + len(self._waits) < _UNDER_WAY:
                self._ask()
            self._flush_and_collect()
            self._hear(self._random.uniform(0.001, 0.008))
            self._check_reservations()
            self._check_waits()
            idle = self.stop_asking.is_set() and not (self._work or self._reserved or self._waits)
            if idle and not told_idle:
                self._reporter.publish(idle=True)
            told_idle = idle
            self._reporter.publish_sometimes()
        for lines in self._ranks.values():
            lines.sock.close()  # which sends them home
        self._door.close()
        with self._reporter.timed("scheduler close", _CLOSE_S):
            self._client.close()
        self._reporter.publish()

    # -- asking the server ------------------------------------------------------------------------------

    def _ask(self) -> None:
        keys = prompt(self._random.randrange(PROMPTS))
        keys = keys[: self._random.randint(1, len(keys))]
        with self._reporter.timed("lookup", _LOOKUP_S):
            wait = self._random.choice((0.0, 0.02, _WAIT_S))
            hit = self._client.lookup(keys, _LOOKUP_S, wait)
        self._reporter.count(lookups=1, hit_chunks=hit.chunks, **{f"miss: {hit.reason}": bool(hit.reason)})
        if hit.ticket:
            patience = self._random.choice((0.0, self._random.uniform(0.0, 0.05), _RESERVE_S))
            self._waits[hit.ticket] = _Wait(hit, keys, time.monotonic(), patience)
            return
        self._go_on(hit, keys)

    def _check_waits(self) -> None:
        for ticket, wait in list(self._waits.items()):
            waited = time.monotonic() - wait.asked
            brought = self._client.brought(ticket)
            if brought is None and waited < wait.patience:
                continue
            del self._waits[ticket]
            if brought is None:
                if wait.patience == _RESERVE_S:
                    self._reporter.broken("a lookup that waits for tiers was never answered")
                self._client.give_up(ticket)
            elif brought.lease:
                self._reporter.count(brought_chunks=brought.chunks - wait.hit.chunks)
                if wait.hit.lease:
                    self._client.release(wait.hit.lease, 0, wait.hit.chunks)
                    self._client.forget(wait.hit.lease)
                self._go_on(brought, wait.keys)
                continue
            self._go_on(wait.hit, wait.keys)

    def _go_on(self, hit: Grant, keys: tuple[ChunkKey, ...]) -> None:
        """Read what was found, and store the rest."""
        if hit.lease:
            self._use(hit, keys[: hit.chunks], writing=False)
        if hit.chunks < len(keys) and not hit.reason:
            tag = self._random.getrandbits(60)
            parent = keys[hit.chunks - 1] if hit.chunks else None
            self._reserved[tag] = _Reservation(keys[hit.chunks :], time.monotonic())
            self._client.reserve(tag, keys[hit.chunks :], parent)

    def _flush_and_collect(self) -> None:
        with self._reporter.timed("scheduler flush", _FLUSH_S):
            self._client.flush()
        with self._reporter.timed("collect", 0.0):
            granted = self._client.collect()
        for tag, grant in granted:
            assert isinstance(tag, int)
            reservation = self._reserved.pop(tag, None)
            if reservation is None:
                self._reporter.broken(f"an answer to a reservation that nobody waits for: {grant}")
            elif grant.lease:
                self._use(grant, reservation.keys[: grant.chunks], writing=True)

    def _check_reservations(self) -> None:
        for tag, reservation in list(self._reserved.items()):
            if time.monotonic() - reservation.asked > _RESERVE_S:
                del self._reserved[tag]
                self._reporter.broken("a reservation was never answered")

    # -- telling ranks ----------------------------------------------------------------------------------

    def _use(self, grant: Grant, keys: tuple[ChunkKey, ...], *, writing: bool) -> None:
        """Tell every rank that has a share; or change our mind and give all of it back, or the tail of it."""
        parallel = self._namespace.parallel
        needed = set(parallel.writer_ranks if writing else range(parallel.world_size))
        give_back = self._client.abort if writing else self._client.release
        if self._random.random() < 0.08 or not needed <= set(self._ranks):
            give_back(grant.lease, 0, grant.chunks)
            self._client.forget(grant.lease)
            return
        keep = grant.chunks
        if self._random.random() < 0.15:
            keep = self._random.randint(1, grant.chunks)
            give_back(grant.lease, keep, grant.chunks)
            if self.cut_soon.is_set():  # the worst moment: what was given back has not been said yet
                self.cut_soon.clear()
                cut_links()
        places = [row[:keep].tolist() for row in grant.places]
        job = Job(writing, grant.lease, [key.hex() for key in keys[:keep]], places)
        self._work[grant.lease] = _Work(job, set(needed))
        for rank in needed:
            self._tell(rank, job)

    def _tell(self, rank: int, job: Job) -> None:
        if not self._ranks[rank].send(job):
            self._lost(rank)

    def _hear(self, timeout: float) -> None:
        ranks = {lines.sock: (rank, lines) for rank, lines in self._ranks.items()}
        readable, _, _ = select.select([self._door, *ranks], [], [], timeout)
        for sock in readable:
            if sock is self._door:
                self._let_in()
                continue
            rank, lines = ranks[sock]
            if self._ranks.get(rank) is not lines:
                continue  # replaced a moment ago
            if (dones := lines.receive(Done)) is None:
                self._lost(rank)
            for done in dones or ():
                self._settle(done)

    def _let_in(self) -> None:
        sock, _ = self._door.accept()
        lines = Lines(sock)
        for hello in lines.receive(Done) or ():
            self._lost(hello.rank)  # its earlier process is gone, even if we had not noticed
            self._ranks[hello.rank] = lines

    def _lost(self, rank: int) -> None:
        """The server sees a rank's death by itself; here it only counts as an answer."""
        lines = self._ranks.pop(rank, None)
        if lines is None:
            return
        lines.sock.close()
        for lease in [lease for lease, work in self._work.items() if rank in work.waiting]:
            self._settle(Done(rank, lease))

    def _settle(self, done: Done) -> None:
        work = self._work.get(done.lease)
        if work is None:
            return
        work.waiting.discard(done.rank)
        work.stored &= done.stored
        if not work.waiting:
            del self._work[done.lease]
            self._client.forget(done.lease)
            if work.stored:
                self._reporter.stored([f"{self._namespace.model} {key}" for key in work.job.keys])
