"""What the control path costs: start-up, round trips, lookups and store bookkeeping of a real server.

Every part starts a `kvcellar serve` of its own, of which nothing stays. Hardly any KV is moved. A figure is
from a client's call to its result, the client's part included. With a peer, another cache goes through the
same operations right afterwards, so that both saw the same machine.
"""

import itertools
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live

from kvcellar.bench.child import ServerProcess, child, must, running_server
from kvcellar.bench.control_table import control_table
from kvcellar.bench.crowd import measure_crowd
from kvcellar.bench.engine import CHUNK_TOKENS, Engine, fresh_keys
from kvcellar.bench.growth import measure_growth
from kvcellar.bench.machine import load, machine, percentile, summary
from kvcellar.bench.peers import check_peer, ratios, run_peer
from kvcellar.client import AdminClient
from kvcellar.identity import ChunkKey
from kvcellar.wire import encode
from kvcellar.wire import messages as m

__all__ = ["control_table", "run_control"]

SIZES = {"8k": 8 * 1024, "32k": 32 * 1024, "128k": 128 * 1024}
WORLD_SIZES = (1, 8)
OUTSTANDING = 64  # as the peer's driver has it; 128 and 256 give 5 % more
_MEMORY = 512 << 20
_FULL_MEMORY = 64 << 20
_CROWD_MEMORY = 256 << 20
_WAIT_S = 30.0

NOTES = [
    "Client and server share the machine and talk over a unix socket. Chunks of 256 tokens; one page of KV "
    "per chunk and rank, which nobody writes.",
    "ready_s: from the spawn of `python -m kvcellar serve` to the answer to a first request; median.",
    f"roundtrip, pipelined: Ping; pipelined writes {OUTSTANDING} requests at once and waits for all answers.",
    "roundtrip: over all started servers. It depends on whether the kernel keeps client and server on one "
    "core or wakes another; bare_echo, two processes that only return what they are sent, shows what that "
    "costs.",
    "lookup: SchedulerClient.lookup from keys to places, a full hit on every rank; giving back is not timed.",
    "store_bookkeeping: reserve of new chunks by SchedulerClient, then a Commit from every rank, all under "
    "way at once, until the last answer. There is free memory: what was stored is cleared before the next.",
    "store_evicting: the same in a full server, which evicts as many old chunks as there are new ones.",
    "concurrent: clients with connections and a thread each, in a few processes, as fast as they get "
    "answers; 8k tokens at TP 1. Lookups give back without waiting, which loads the server; stores evict. "
    "cpu: cores used. starved: share of the time that the server was kept waiting for a core. client_bound: "
    "the server had nothing to do for a good part of the time.",
    "index: prompts of 128k tokens at TP 1 until there are that many objects; rss includes stripe tables.",
]


class Budget(NamedTuple):
    seconds: float  # includes what is not timed
    samples: int


class Plan(NamedTuple):
    starts: int
    roundtrips: int  # to each of the started servers
    pipelined_s: float
    lookup: Budget
    store: Budget
    clients: int
    concurrent_s: float
    objects: int


FULL = Plan(11, 1000, 3.0, Budget(5.0, 2000), Budget(3.0, 500), 64, 5.0, 1_000_000)
QUICK = Plan(3, 500, 0.5, Budget(0.3, 500), Budget(0.3, 100), 64, 1.0, 100_000)

Say = Callable[[str], None]


def run_control(*, quick: bool = False, peer: str = "") -> dict[str, Any]:
    """Measure everything: about a minute, quick ten seconds; a peer takes minutes more."""
    if peer:
        check_peer(peer)
    options = "".join([" --quick" if quick else "", f" --peer {peer}" if peer else ""])
    result: dict[str, Any] = {
        "command": f"kvcellar bench control --json{options}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
    }
    # Refreshed by nobody but us: a thread that draws would be measured as well.
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as line:
        result |= measure(QUICK if quick else FULL, lambda step: line.update(f"{step} ...", refresh=True))
    result["machine"]["load_after"] = load()  # of our part: what the peer starts with
    if peer:
        result["peer"] = run_peer(peer, quick=quick)
        result["ratio"] = ratios(result, result["peer"])
    return result


def measure(plan: Plan, say: Say) -> dict[str, Any]:
    say(f"starting a server {plan.starts} times, and round trips")
    figures = _starts(plan.starts, plan.roundtrips)
    with running_server(_MEMORY) as server:
        say("pipelined requests")
        figures["pipelined_per_s"] = _pipelined(server, plan.pipelined_s)
        say("lookups")
        figures["lookup"] = _cases(_lookups(server, plan.lookup))
        say("stores")
        figures["store_bookkeeping"] = _cases(_stores(server, plan.store))
    say("stores that evict")
    figures["store_evicting"] = _cases(_evicting_stores(plan.store))
    say(f"{plan.clients} clients at once")
    with running_server(_CROWD_MEMORY) as server:
        figures["concurrent"] = measure_crowd(server, plan.clients, plan.concurrent_s)
    say(f"an index of {plan.objects:,} objects")
    figures["index"] = measure_growth(plan.objects, plan.lookup.samples)
    return figures | {"notes": NOTES}


class Case(NamedTuple):
    tp: int
    size: str
    figures: dict[str, Any]


def _cases(cases: Iterator[Case]) -> dict[str, Any]:
    return {f"{case.size}_tp{case.tp}": case.figures for case in cases}


def _starts(starts: int, count: int) -> dict[str, Any]:
    """Start-up, and round trips to each of these servers: one may happen to run on our core, another not."""
    ready, pings, echoes = [], [], []
    for _ in range(starts):
        with running_server(_MEMORY) as server:
            ready.append(server.ready_s)
            pings += _pings(server, count)
        echoes += _echoes(count)
    return {
        "ready_s": round(statistics.median(ready), 3),
        "roundtrip_p50_us": round(percentile(pings, 0.5) * 1e6, 1),
        "roundtrip_p99_us": round(percentile(pings, 0.99) * 1e6, 1),
        "bare_echo_p50_us": round(percentile(echoes, 0.5) * 1e6, 1),
    }


def _pings(server: ServerProcess, count: int) -> list[float]:
    link = server.connect()
    times = [_timed(lambda: link.call(m.Ping(), _WAIT_S, m.Pong)) for _ in range(count)]
    link.close()
    return times


def _echoes(count: int) -> list[float]:
    """What two processes that do nothing else need for 20 bytes there and back: the machine's own part."""
    echo = "import socket\nend = socket.socket(fileno=0)\nwhile data := end.recv(64):\n    end.send(data)"
    ours, theirs = socket.socketpair()
    with ours, theirs, child([sys.executable, "-c", echo], stdin=theirs.fileno(), stdout=subprocess.DEVNULL):
        theirs.close()  # the other process has it now: should that end, we do not wait for ever

        def there_and_back() -> None:
            ours.send(bytes(20))
            must(bool(ours.recv(64)), "the echo ended")

        there_and_back()  # it is running
        return [_timed(there_and_back) for _ in range(count)]


def _timed(operation: Callable[[], object]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


def _pipelined(server: ServerProcess, seconds: float) -> int:
    """Requests answered per second when OUTSTANDING of them travel together."""
    link = server.connect()
    answered = 0
    start = time.perf_counter()
    while (taken := time.perf_counter() - start) < seconds:
        frames = [encode(m.Request(number, 1000, (m.Ping(),))) for number in range(OUTSTANDING)]
        link.sock.sendall(b"".join(frames))
        missing = OUTSTANDING
        while missing:
            replies = link.receive(time.monotonic() + _WAIT_S)
            must(bool(replies), "no answer in time")
            missing -= len(replies)
        answered += OUTSTANDING
    link.close()
    return round(answered / taken)


def _lookups(server: ServerProcess, budget: Budget) -> Iterator[Case]:
    for tp in WORLD_SIZES:
        with Engine(server.socket, tp) as engine:
            for size, tokens in SIZES.items():
                keys = fresh_keys(tokens // CHUNK_TOKENS)
                engine.fill(keys)
                yield Case(tp, size, _sample(budget, engine.settled_lookup, itertools.repeat(keys)))


def _stores(server: ServerProcess, budget: Budget) -> Iterator[Case]:
    with AdminClient(server.socket) as admin:
        for tp in WORLD_SIZES:
            with Engine(server.socket, tp) as engine:

                def store(keys: list[ChunkKey], engine: Engine = engine) -> float:
                    admin.clear(engine.namespace.id)
                    return engine.store(keys)

                engine.fill(fresh_keys(SIZES["128k"] // CHUNK_TOKENS))  # from here on there is memory
                for size, tokens in SIZES.items():
                    yield Case(tp, size, _sample(budget, store, _fresh(tokens)))


def _evicting_stores(budget: Budget) -> Iterator[Case]:
    for tp in WORLD_SIZES:
        with running_server(_FULL_MEMORY) as server, Engine(server.socket, tp) as engine:
            with AdminClient(server.socket) as admin:
                while not admin.status().namespaces[0].groups[0].left_by.get("evicted"):
                    engine.fill(fresh_keys(SIZES["128k"] // CHUNK_TOKENS))
            for size, tokens in SIZES.items():
                yield Case(tp, size, _sample(budget, engine.store, _fresh(tokens)))


def _fresh(tokens: int) -> Iterator[list[ChunkKey]]:
    while True:
        yield fresh_keys(tokens // CHUNK_TOKENS)


def _sample(
    budget: Budget, operation: Callable[[list[ChunkKey]], float], prompts: Iterator[list[ChunkKey]]
) -> dict[str, Any]:
    """Repeat an operation that times itself until the budget is spent; the first does not count."""
    operation(next(prompts))
    until = time.perf_counter() + budget.seconds
    times: list[float] = []
    while len(times) < 3 or (time.perf_counter() < until and len(times) < budget.samples):
        times.append(operation(next(prompts)))
    return summary(times)
