# ruff: noqa: E402 -- this file has the name of the package it imports, see the line on sys.path
"""What LMCache's control path costs: the peer's side of `kvcellar bench control --peer lmcache`.

Run it with the python of the environment that tools/peer_lmcache.sh makes. It starts LMCache's own
server on loopback, talks to it through LMCache's own client classes (the adapters of its vLLM connector
and the request client below them), prints one JSON object on stdout and stops the server. Everything
else goes to stderr.

The engine is fake, with a KV cache of one tiny layer, but what the server is asked is real: workers
register, prompts are stored, and every lookup must be a full hit in L1 or the run fails.
Knows nothing of kvcellar, and moves hardly any KV: what is left is the bookkeeping.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

import numpy as np
import psutil
import torch
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transport.base import RequestClient
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

SIZES = {"8k": 8 * 1024, "32k": 32 * 1024, "128k": 128 * 1024}
WORLD_SIZES = (1, 8)
OUTSTANDING = 64
CLIENTS = 64
CHUNK = 256
BLOCK = 16
BLOCKS = 64  # the fake engine's whole KV cache; prompts use its blocks over and over
KV_SHAPE = (2, BLOCKS, BLOCK, 1, 4)  # K and V, block, token, head, element: 4 KiB of float16 per chunk
L1_GB = 2  # a full run stores about 0.7 GB; stores come last, so an eviction could not turn a hit into a miss
VOCABULARY = 128_000
POLL_S = 200e-6  # 0..500 us tried: below 100 it slows the reader thread, above 250 it adds waiting
WAIT_S = 30.0  # no single answer may take longer

NOTES = [
    "One server process with default thread counts and metrics on; one client process; loopback TCP.",
    "Token ids are uniform in 1..127999; every prompt is a whole number of 256-token chunks.",
    "roundtrip, pipelined: noop, which the server answers inside its receive loop.",
    "lookup: the scheduler adapter's submit, then its non-blocking check, repeated after a 200 us sleep "
    "until the hit length is known (vLLM repeats it once per scheduler step).",
    "lookup_blocking: the same two requests sent with the request client, waiting on each reply, no polling.",
    "Both lookups: a full hit in L1 on every rank; freeing the locks and ending the session is not timed.",
    "store_bookkeeping: PREPARE_STORE, then COMMIT_STORE (engine-driven mode over shared memory), no KV "
    "copied; all ranks' requests are under way at once; until the last reply.",
    "store_full: STORE (lmcache-driven, the mode used on GPUs), the server copies 4 KiB of KV per chunk and "
    "rank; all ranks at once; until the last reply. Lookups see the data some time after that.",
    "concurrent: 64 clients, each with its own socket, thread and 8k prompt at TP 1, as lookup_blocking; the "
    "locks are freed without waiting, which loads the server. cpu: cores used while measuring.",
]

Prompt = list[int]
Figures = dict[str, float | int]

_context: "zmq.Context[zmq.Socket[bytes]]" = zmq.Context()
_context.setsockopt(zmq.LINGER, 0)  # a dead server must not keep us from exiting
_numbers = itertools.count()
_random = np.random.default_rng(7)


class Budget(NamedTuple):
    seconds: float  # includes what is not timed
    samples: int


class Plan(NamedTuple):
    roundtrips: int
    pipelined_s: float
    lookup: Budget
    store: Budget
    concurrent_s: float
    limit_s: int  # the whole run is given up after this


FULL = Plan(5000, 3.0, Budget(5.0, 300), Budget(3.0, 40), 8.0, limit_s=180)
QUICK = Plan(1000, 1.0, Budget(1.0, 100), Budget(0.5, 20), 3.0, limit_s=100)


class Server(NamedTuple):
    process: subprocess.Popen[bytes]
    port: int
    url: str
    started: float


class Missed(Exception):
    """A lookup that should have been a full hit was not."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure LMCache's control path.")
    parser.add_argument("--quick", action="store_true", help="a short run with fewer samples")
    plan = QUICK if parser.parse_args().quick else FULL
    logging.disable(logging.INFO)
    signal.signal(signal.SIGALRM, give_up)
    signal.signal(signal.SIGTERM, give_up)
    signal.alarm(plan.limit_s)
    with os.fdopen(os.dup(1), "w") as answer, running_server() as server:
        os.dup2(2, 1)  # what anyone else prints goes to stderr
        print(json.dumps(measure(server, plan), indent=2), file=answer)


def give_up(number: int, _frame: FrameType | None) -> None:
    if number == signal.SIGALRM:
        raise TimeoutError("the whole run took too long")
    sys.exit(128 + number)


def measure(server: Server, plan: Plan) -> dict[str, Any]:
    ready_s = wait_ready(server)
    engines = [Engine(server.url, tp) for tp in WORLD_SIZES]
    client = engines[0].client
    figures: dict[str, Any] = {
        "peer": "lmcache",
        "version": version("lmcache"),
        "load_before": round(os.getloadavg()[0], 2),
        "ready_s": round(ready_s, 3),
        "roundtrip_op": "noop",
        **roundtrip(client, plan.roundtrips),
        "pipelined_per_s": pipelined(client, plan.pipelined_s),
        "pipelined_outstanding": OUTSTANDING,
    }
    print("lmcache: lookups", file=sys.stderr)
    figures |= lookups(engines, plan.lookup)
    print(f"lmcache: {CLIENTS} clients", file=sys.stderr)
    figures["concurrent"] = concurrent(server, engines[0], plan.concurrent_s)
    print("lmcache: stores", file=sys.stderr)
    figures |= stores(engines, plan.store)
    return figures | {"notes": NOTES}


# ---- the measurements


def roundtrip(client: RequestClient, count: int) -> Figures:
    """One request at a time."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        client.noop().result(timeout=WAIT_S)
        times.append(time.perf_counter() - start)
    taken = summary(times)
    return {f"roundtrip_{name}_us": round(taken[f"{name}_ms"] * 1e3, 1) for name in ("p50", "p99")}


def pipelined(client: RequestClient, seconds: float) -> int:
    """Requests answered per second with OUTSTANDING of them under way."""
    waiting = deque(client.noop() for _ in range(OUTSTANDING))
    answered = 0
    start = time.perf_counter()
    while (taken := time.perf_counter() - start) < seconds:
        waiting.popleft().result(timeout=WAIT_S)
        waiting.append(client.noop())
        answered += 1
    for future in waiting:
        future.result(timeout=WAIT_S)
    return round(answered / taken)


def lookups(engines: list["Engine"], budget: Budget) -> dict[str, dict[str, Figures]]:
    figures: dict[str, dict[str, Figures]] = {"lookup": {}, "lookup_blocking": {}}
    for engine, (size, tokens) in itertools.product(engines, SIZES.items()):
        case = f"{size}_tp{engine.tp}"
        prompt = next(fresh_prompts(tokens))
        engine.store(prompt)
        engine.wait_visible(prompt)
        figures["lookup"][case] = sample(budget, engine.lookup, itertools.repeat(prompt))
        figures["lookup_blocking"][case] = sample(budget, engine.lookup_blocking, itertools.repeat(prompt))
    return figures


def stores(engines: list["Engine"], budget: Budget) -> dict[str, dict[str, Figures]]:
    figures: dict[str, dict[str, Figures]] = {"store_bookkeeping": {}, "store_full": {}}
    for engine, (size, tokens) in itertools.product(engines, SIZES.items()):
        case = f"{size}_tp{engine.tp}"
        figures["store_bookkeeping"][case] = sample(budget, engine.reserve_and_commit, fresh_prompts(tokens))
        figures["store_full"][case] = sample(budget, engine.store, fresh_prompts(tokens))
    return figures


def concurrent(server: Server, engine: "Engine", seconds: float) -> Figures:
    """Lookups by CLIENTS clients at once, each repeating its own 8k prompt."""
    prompts = list(itertools.islice(fresh_prompts(SIZES["8k"]), CLIENTS))
    for prompt in prompts:
        engine.store(prompt)
        engine.wait_visible(prompt)
    clients = [RequestClientFactory.create(server.url, context=_context) for _ in prompts]
    server_cpu = psutil.Process(server.process.pid).cpu_times
    cpu_before, start = (time.process_time(), sum(server_cpu()[:2])), time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        loops = [
            pool.submit(repeat_lookup, client, prompt, start + seconds)
            for client, prompt in zip(clients, prompts, strict=True)
        ]
        times = [each for loop in loops for each in loop.result()]
    taken = time.perf_counter() - start
    cpu_after = time.process_time(), sum(server_cpu()[:2])  # user and system
    for client in clients:
        client.close()
    return {
        "clients": CLIENTS,
        **summary(times),
        "lookups_per_s": round(len(times) / taken),
        "client_cpu": round((cpu_after[0] - cpu_before[0]) / taken, 2),
        "server_cpu": round((cpu_after[1] - cpu_before[1]) / taken, 2),
    }


def repeat_lookup(client: RequestClient, prompt: Prompt, until: float) -> list[float]:
    times = []
    while time.perf_counter() < until:
        taken, key = timed_lookup(client, prompt, tp=1)
        release(client, key)
        times.append(taken)
    return times


def sample(budget: Budget, operation: Callable[[Prompt], float], prompts: Iterator[Prompt]) -> Figures:
    """Repeat an operation that times itself until the budget is spent; the first does not count."""
    operation(next(prompts))
    until = time.perf_counter() + budget.seconds
    times: list[float] = []
    while len(times) < 3 or (time.perf_counter() < until and len(times) < budget.samples):
        times.append(operation(next(prompts)))
    return summary(times)


def summary(times: list[float]) -> Figures:
    p50, p99 = (round(sorted(times)[int(len(times) * share)] * 1e3, 4) for share in (0.5, 0.99))
    return {"p50_ms": p50, "p99_ms": p99, "samples": len(times)}


def fresh_prompts(tokens: int) -> Iterator[Prompt]:
    while True:
        yield _random.integers(1, VOCABULARY, tokens).tolist()


# ---- the peer's client, used as its vLLM connector uses it


class Engine:
    """What a vLLM engine of `tp` ranks is to the server: a scheduler and tp workers, without a model.

    There are two sets of workers, because a worker stores in one of two ways: `workers` let the server
    copy (STORE), `copiers` would copy themselves (PREPARE_STORE, COMMIT_STORE). Each set is one model.
    """

    def __init__(self, url: str, tp: int) -> None:
        self.tp = tp
        self.scheduler = LMCacheMPSchedulerAdapter(
            [url], _context, model(tp), BLOCK, strategy(tp, 0), extra_config={"lmcache.mp.mq_timeout": WAIT_S}
        )
        self.client = self.scheduler.req_clients[url]
        self.workers = [connect_worker(url, tp, rank, "lmcache_driven") for rank in range(tp)]
        self.copiers = [connect_worker(url, tp, rank, "engine_driven") for rank in range(tp)]

    def lookup(self, prompt: Prompt) -> float:
        """Seconds until the scheduler knows that the whole prompt is cached.

        The check is not bounded here: after mq_timeout the adapter says 0, which is a miss.
        """
        request = f"bench-{next(_numbers)}"
        start = time.perf_counter()
        self.scheduler.maybe_submit_lookup_request(request, prompt)
        while (hit := self.scheduler.check_lookup_result(request)) is None:
            time.sleep(POLL_S)
        taken = time.perf_counter() - start
        self.scheduler.cleanup_lookup_result(request)
        release(self.client, make_key(prompt, self.tp, request))
        self.settle()
        check_hit(hit, prompt)
        return taken

    def lookup_blocking(self, prompt: Prompt) -> float:
        taken, key = timed_lookup(self.client, prompt, self.tp)
        release(self.client, key)
        self.settle()
        return taken

    def store(self, prompt: Prompt) -> float:
        """Seconds until the server has answered every rank's STORE."""
        request = f"bench-{next(_numbers)}"
        # Not block 0: to the server it means "no data", and a chunk of it is not stored.
        blocks = [1 + index % (BLOCKS - 1) for index in range(len(prompt) // BLOCK)]
        operation = LoadStoreOp(token_ids=prompt, block_ids=[blocks], start=0, end=len(prompt))
        start = time.perf_counter()
        for worker in self.workers:
            worker.submit_store_request(request, operation, worker.create_recorded_event())
        stored = [worker.store_futures.pop(request).result(timeout=WAIT_S) for worker in self.workers]
        taken = time.perf_counter() - start
        for worker in self.workers:
            worker.store_events.pop(request)
        self.client.end_session(request)
        self.settle()
        if not all(stored):
            raise RuntimeError(f"store of {len(prompt)} tokens was refused")
        return taken

    def reserve_and_commit(self, prompt: Prompt) -> float:
        """Seconds until every rank was given slots for the prompt and has committed them, unfilled."""
        request = f"bench-{next(_numbers)}"
        start = time.perf_counter()
        keys = [make_key(prompt, self.tp, request, rank, "engine_driven") for rank in range(self.tp)]
        ranks = list(zip(self.copiers, keys, strict=True))
        asked = [worker.req_client.prepare_store(key, worker.instance_id) for worker, key in ranks]
        given = [future.result(timeout=WAIT_S).context.get("slots", []) for future in asked]
        asked = [worker.req_client.commit_store(key, worker.instance_id, b"") for worker, key in ranks]
        committed = [future.result(timeout=WAIT_S) for future in asked]
        taken = time.perf_counter() - start
        self.client.end_session(request)
        self.settle()
        if not all(committed) or any(len(slots) != len(prompt) // CHUNK for slots in given):
            raise RuntimeError(f"reserving {len(prompt)} tokens was refused")
        return taken

    def wait_visible(self, prompt: Prompt) -> None:
        """A stored prompt can be looked up only some time after the reply to the store."""
        deadline = time.perf_counter() + WAIT_S
        while time.perf_counter() < deadline:
            with contextlib.suppress(Missed):
                self.lookup(prompt)
                return
            time.sleep(0.01)
        raise TimeoutError(f"{len(prompt)} stored tokens never became visible")

    def settle(self) -> None:
        """Wait until the server has done what was sent without waiting; one thread does these in order."""
        self.client.ping(None).result(timeout=WAIT_S)


def timed_lookup(client: RequestClient, prompt: Prompt, tp: int) -> tuple[float, IPCCacheServerKey]:
    """LOOKUP, then QUERY_PREFETCH_STATUS until it answers; the key is what release() needs."""
    request = f"bench-{next(_numbers)}"
    start = time.perf_counter()
    key = make_key(prompt, tp, request)
    client.lookup(key, tp).result(timeout=WAIT_S)
    while (chunks := client.query_prefetch_status(request).result(timeout=WAIT_S)) is None:
        if time.perf_counter() - start > WAIT_S:
            raise TimeoutError(f"lookup of {len(prompt)} tokens")
        time.sleep(POLL_S)
    taken = time.perf_counter() - start
    check_hit(chunks * CHUNK, prompt)
    return taken, key


def release(client: RequestClient, key: IPCCacheServerKey) -> None:
    """Give back the locks a lookup took and end its session; does not wait."""
    client.free_lookup_locks(key, key.world_size)
    client.end_session(key.request_id)


def check_hit(hit: int, prompt: Prompt) -> None:
    if hit != len(prompt):
        raise Missed(f"{hit} of {len(prompt)} tokens hit")


def connect_worker(url: str, tp: int, rank: int, mode: str) -> LMCacheMPWorkerAdapter:
    extra = {"lmcache.mp.mq_timeout": WAIT_S, "lmcache.mp.mp_transfer_mode": mode}
    name = model(tp, mode)
    worker = LMCacheMPWorkerAdapter(url, _context, name, BLOCK, strategy(tp, rank), extra_config=extra)
    kv_caches = {"layer.0": torch.zeros(KV_SHAPE, dtype=torch.float16)}
    worker.register_kv_caches(kv_caches, layout_hints={"kv_layout": "NHD"})
    return worker


def make_key(
    prompt: Prompt, tp: int, request: str, rank: int | None = None, mode: str = "lmcache_driven"
) -> IPCCacheServerKey:
    return IPCCacheServerKey(
        model_name=model(tp, mode),
        world_size=tp,
        worker_id=rank,  # None: all ranks, as a scheduler asks
        token_ids=tuple(prompt),
        start=0,
        end=len(prompt),
        request_id=request,
        num_kv_readers=1,
    )


def model(tp: int, mode: str = "lmcache_driven") -> str:
    return f"bench-{mode}-tp{tp}"


def strategy(tp: int, rank: int) -> ParallelStrategy:
    return ParallelStrategy(
        mla_only=False, vllm_world_size=tp, vllm_worker_id=rank, tp_size=tp, pp_size=1, n_servers=1
    )


# ---- the server process


@contextlib.contextmanager
def running_server() -> Iterator[Server]:
    """LMCache's server on free loopback ports; on the way out it is stopped, whatever happened."""
    port, http_port, prometheus_port = free_ports(3)
    shm_name = f"lmcache-bench-{os.getpid()}"
    program = Path(sys.executable).with_name("lmcache")
    command = ["env", "LMCACHE_DISABLE_BANNER=1", "LMCACHE_TRACK_USAGE=false", str(program), "server"]
    command += f"--host 127.0.0.1 --port {port} --http-port {http_port}".split()
    command += f"--prometheus-port {prometheus_port} --chunk-size {CHUNK}".split()
    command += f"--l1-size-gb {L1_GB} --eviction-policy LRU".split()
    command += f"--supported-transfer-mode auto --shm-name {shm_name}".split()
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent()
        )
        try:
            yield Server(process, port, f"tcp://127.0.0.1:{port}", started)
        except BaseException:
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()[-20:]
            print("the server's last lines:", *lines, sep="\n  ", file=sys.stderr)
            raise
        finally:
            signal.alarm(0)  # let the stopping be finished
            stop(process)
            Path("/dev/shm", shm_name).unlink(missing_ok=True)  # left behind when it had to be killed


def wait_ready(server: Server) -> float:
    """Seconds from the spawn until the server has answered a request."""
    while time.perf_counter() - server.started < WAIT_S:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server exited with {server.process.returncode}")
        # A bare socket first: the request client backs off for up to a second between attempts.
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", server.port)) == 0:
                break
        time.sleep(0.01)
    client = RequestClientFactory.create(server.url, context=_context)
    client.noop().result(timeout=WAIT_S)
    ready_s = time.perf_counter() - server.started
    client.close()
    return ready_s


def stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
            return


def die_with_parent() -> Callable[[], None]:
    """For Popen: the child gets SIGTERM when we die, even by SIGKILL (Linux's PR_SET_PDEATHSIG)."""
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, int(signal.SIGTERM))


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


if __name__ == "__main__":
    main()
