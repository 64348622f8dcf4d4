"""Directs a fault run: starts everything, does harm on a seeded schedule, and repairs it, all under load.

What is stopped is woken and what is killed is replaced a little later, so that faults overlap.
"""

import heapq
import itertools
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.fleet import Child, Engine, Server
from tests.chaos.observer import AtRest, Observer, eventually, held, leaks, ways_out
from tests.chaos.report import SLACK_S, News
from tests.chaos.score import Score
from tests.chaos.world import PLANS

# How often each fault is drawn. The last three are no kill -9 and no SIGSTOP, and come on top of the count.
KINDS = {
    "kill server": 12,
    "kill rank": 14,
    "kill scheduler": 12,
    "kill engine": 8,
    "stop server": 14,
    "stop rank": 16,
    "stop scheduler": 14,
    "cut rank": 12,
    "cut scheduler": 8,
    "restart server": 4,
}
EXTRA = ("cut rank", "cut scheduler", "restart server")

_PAUSE_S, _NAP_S, _REPLACE_S = (0.05, 0.7), (0.05, 1.5), (0.0, 0.3)
_SETTLE_S = 15.0
_AUDIT_EVERY = 10  # faults: the server forgets shares with its own end, so leaks are looked for in between
_SETTLED_S = 3.0  # by then the server has heard that a rank's earlier process is gone
_BACK_S = 30.0  # to get back to a restarted server on a busy machine


class Director:
    def __init__(self, seed: int, tell: Callable[[str], None]) -> None:
        self.score = Score(seed)
        self._random = random.Random(seed)
        self._tell = tell
        self._home = Path(tempfile.mkdtemp(prefix="kvcellar-chaos-"))
        self._folder = Path(tempfile.mkdtemp(prefix="kvcellar-chaos-", dir="/dev/shm"))
        self._server = Server(self._home, self._folder)
        self._engines = [Engine(plan, self._server.socket, self._home, self._on_news) for plan in PLANS]
        self._leaving: list[Child] = []  # ranks whose scheduler was killed: they go home by themselves
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()
        self._idle: set[Child] = set()
        self._lock = threading.Lock()  # guards the score against the threads that read news
        self._observer: Observer | None = None

    # -- from start to end ------------------------------------------------------------------------------

    def run(self, faults: int, seconds: float) -> None:
        """At most `seconds` of faults; ends sooner when there were enough. `close` must follow, whatever
        happens.
        """
        give_up = time.monotonic() + seconds
        self._server.start()
        self._observer = Observer(self._server.socket)
        for engine in self._engines:
            engine.start()
        self._wait(2.0)
        while self.score.counted_faults(EXTRA) < faults and time.monotonic() < give_up:
            self._wait(self._random.uniform(*_PAUSE_S))
            kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
            if self._harm(kind):
                self.score.faults[kind] += 1
                if self.score.faults.total() % _AUDIT_EVERY == 0:
                    self._pause()
            self._tell(self.score.progress(faults, EXTRA))
        self._repair_all()
        self._end()

    def close(self) -> None:
        """Nothing is left: no process, no file."""
        if self._observer is not None:
            self._observer.close()
        for child in self._everybody():
            if child.alive:
                child.kill()
        if not self.score.violations():
            shutil.rmtree(self._home, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def logs(self) -> Path:
        return self._home

    # -- harm -------------------------------------------------------------------------------------------

    def _harm(self, kind: str) -> bool:
        """False when there is nothing to be harmed that way just now."""
        verb, what = kind.split()
        if what == "server":
            return self._harm_server(verb)
        engine = self._random.choice(self._engines)
        if what == "engine":
            self._kill_engine(engine)
            return True
        child = engine.scheduler
        if what == "rank":
            living = [(rank, child) for rank, child in engine.ranks.items() if child.alive]
            rank, child = self._random.choice(living) if living else (0, None)
        if child is None or not child.alive or (child.asleep and verb != "kill"):
            return False
        if verb == "stop":
            self._nap(child)
        elif verb == "cut":
            child.say("cut")
        elif what == "rank":
            child.kill()
            self._after(_REPLACE_S, lambda: self._replace_rank(engine, rank, child))
        else:
            child.kill()
            self._replace_engine(engine)
        return True

    def _harm_server(self, verb: str) -> bool:
        server, observer = self._server.child, self._observer
        assert server is not None
        assert observer is not None
        if verb == "stop":
            if not server.asleep:
                self._nap(server)
            return True
        # A rank that is alive and silent keeps the next server in grace, where nothing is evicted: what
        # lookups miss then was lost in the restart.
        guard = self._rank_known_to(observer) if observer.wait_connected(2.0) and not server.asleep else None
        before = set()
        if guard is not None:
            guard.stop()
            before = observer.pin()
            self.score.left.update(ways_out(observer.status()))
        if verb == "kill":
            server.kill()
        else:
            server.wake()
            server.terminate()
            if server.wait() != 0:
                self.score.broken.append("the server did not stop in order")
        self._server.start()
        if not observer.wait_connected(_BACK_S):
            self.score.broken.append("the observer did not get back to a restarted server")
        elif guard is not None:
            after = observer.pin()
            if observer.status().in_grace:
                with self._lock:
                    self.score.recovered(before, after)
            else:
                self.score.broken.append("grace was over before a rank that lives had attached again")
        observer.unpin()
        if guard is not None:
            guard.wake()
        return True

    def _rank_known_to(self, observer: Observer) -> Child | None:
        """Which the server has in its books, that is."""
        known = {(one.name, rank) for one in observer.status().sessions for rank in one.ranks}
        ranks = [
            child
            for engine in self._engines
            for rank, child in engine.ranks.items()
            if (engine.session, rank) in known
        ]
        settled = [child for child in ranks if child.alive and not child.asleep and child.age > _SETTLED_S]
        return self._random.choice(settled) if settled else None

    def _nap(self, child: Child) -> None:
        child.stop()
        self._after(_NAP_S, child.wake)

    def _kill_engine(self, engine: Engine) -> None:
        for child in engine.children:
            child.kill()
        engine.ranks.clear()
        engine.start()

    def _replace_rank(self, engine: Engine, rank: int, child: Child) -> None:
        if engine.ranks.get(rank) is child:  # or the whole engine was replaced meanwhile
            engine.start_rank(rank)

    def _replace_engine(self, engine: Engine) -> None:
        self._leaving += engine.ranks.values()
        engine.ranks.clear()
        engine.start()

    # -- time -------------------------------------------------------------------------------------------

    def _after(self, span: tuple[float, float], action: Callable[[], None]) -> None:
        when = time.monotonic() + self._random.uniform(*span)
        heapq.heappush(self._later, (when, next(self._ids), action))

    def _wait(self, seconds: float) -> None:
        """Let time pass, and do what is due."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            if self._later and self._later[0][0] <= now:
                heapq.heappop(self._later)[2]()
            else:
                due = min(until, self._later[0][0]) if self._later else until
                time.sleep(max(0.0, due - now))

    # -- the end ----------------------------------------------------------------------------------------

    def _repair_all(self) -> None:
        while self._later:
            heapq.heappop(self._later)[2]()
        self._wait(0.5)
        for child in self._leaving:
            if child.wait() is None:
                self.score.broken.append(f"{child.name} did not go home when its scheduler was killed")
        self._leaving = [child for child in self._leaving if child.alive]

    def _pause(self) -> None:
        """Repair everything and ask nothing: then nobody may hold anything. Afterwards the load goes on."""
        self._repair_all()
        for child in self._settle():
            child.say("go on")

    def _settle(self) -> list[Child]:
        """Returns the schedulers, which ask nothing any more."""
        observer, score = self._observer, self.score
        assert observer is not None
        schedulers = [engine.scheduler for engine in self._engines if engine.scheduler]
        with self._lock:
            self._idle.clear()
        for child in schedulers:
            child.say("idle")
        score.broken += eventually(
            lambda: [c.name + " does not settle" for c in schedulers if c not in self._idle], _SETTLE_S
        )
        score.leaks += eventually(lambda: held(observer.status()), _SETTLE_S)
        return schedulers

    def _end(self) -> None:
        assert self._observer is not None
        assert self._server.child is not None
        observer, score = self._observer, self.score
        children = [child for engine in self._engines for child in engine.children]
        schedulers = self._settle()
        for child in schedulers:
            child.say("close")
        for child in children:
            if (code := child.wait(_SETTLE_S)) != 0:
                score.broken.append(f"{child.name} ended with {code}")
        observer.close()
        score.leaks += eventually(lambda: leaks(observer.status()), _SETTLE_S)
        score.left.update(ways_out(observer.status()))
        score.slowest_start = self._server.slowest_start
        self._server.child.terminate()
        if self._server.child.wait() != 0:
            score.broken.append("the server did not stop in order")
        rest = AtRest(self._folder)
        score.at_rest, score.torn = rest.objects, rest.torn
        score.wrong += rest.wrong
        for log in (self._server.log, self._home / "engines.log"):
            if "Traceback" in (text := log.read_text(errors="replace")):
                score.broken.append(f"{log.name}: {text[text.index('Traceback') :][:2000]}")

    def _everybody(self) -> list[Child]:
        server = [self._server.child] if self._server.child else []
        return server + self._leaving + [child for engine in self._engines for child in engine.children]

    def _on_news(self, child: Child, news: News) -> None:
        with self._lock:
            self.score.add(child.name, news)
            for late in news.late:
                took = child.awake_between(late.began, late.ended)
                if took > late.limit + SLACK_S:
                    self.score.late.append(
                        f"{child.name}: {late.call} took {took:.2f} s, limit {late.limit} s"
                    )
            if news.idle:
                self._idle.add(child)
