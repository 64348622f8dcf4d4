"""Is an engine ever slower for asking a slow tier? Time to first token, by prompt length.

Run it in the project's environment; it starts a Valkey of its own and engines of vLLM's interpreter:

    python -m bench.slow_tier > bench/results/slow_tier.json

Two engines of the demo's model (tests/vllm/models.py) take turns in one run: one without the connector, which
computes, and one with it, whose chunks are never in the server's memory and always in a Valkey behind a door
that lets so many bytes a second pass, each way. The engines' own prefix caches are off. For each rate server
and engine are new, so the first prompts are those of an engine that knows nothing of the tier yet.

Prints JSON on stdout, everything else on stderr. Says how fast the door is, not what a network does.
"""

import argparse
import contextlib
import datetime
import json
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvcellar.bench.child import ServerProcess, running_server
from kvcellar.bench.machine import load, machine
from kvcellar.client import AdminClient
from tests.vllm.harness import VllmEngine
from tests.vllm.models import VOCAB
from tools import backends

LENGTHS = (256, 1024, 2048, 4096, 8192)
RATES = (50, 1)  # MB/s; one core computes 1.0 to 1.5 MB/s of this model's KV, so the second is no use
PATIENT = 8192  # tokens; a tier that is slower than computing takes minutes to write so many
LIMIT = 1.05
_PIECE = 1 << 16
_SETTLE_S = 120.0


class Door:
    """Lets `rate` bytes a second pass in each direction, over all connections together."""

    def __init__(self, port: int, rate: float) -> None:
        self._target = ("127.0.0.1", port)
        self._rate = rate
        self._free_at = {"in": 0.0, "out": 0.0}
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for source, target, way in ((client, server, "in"), (server, client, "out")):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._pass, args=(source, target, way), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                with self._lock:
                    self._free_at[way] = max(self._free_at[way], time.monotonic()) + len(data) / self._rate
                    until = self._free_at[way]
                time.sleep(max(0.0, until - time.monotonic()))
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def cellar(port: int) -> contextlib.AbstractContextManager[ServerProcess]:
    """A server whose only tier is behind the door."""
    return running_server(512 << 20, ["--tier", f"redis://127.0.0.1:{port}"])


def cool(sock: Path) -> None:
    """When all is written back, forget what is in memory."""
    with AdminClient(sock) as admin:
        wait_until(lambda: not admin.status().tiers[0].queued)
        admin.clear()


def counts(sock: Path) -> dict[str, int]:
    with AdminClient(sock) as admin:
        status = admin.status()
    return {
        "tier_chunks": sum(session.counts.get("tier_chunks", 0) for session in status.sessions),
        "corrupt": status.tiers[0].counts.get("corrupt", 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES), help="MB/s")
    options = parser.parse_args()
    about, rows, draw = machine(), [], random.Random(1)
    prompts = {length: [draw.randrange(VOCAB) for _ in range(length)] for length in LENGTHS}
    with tempfile.TemporaryDirectory() as text:
        home = Path(text)
        backends.install()
        with (
            backends.Valkey(home / "valkey") as valkey,
            VllmEngine("demo", home / "plain.log", max_model_len=10_000) as plain,
        ):
            fill(home, valkey, prompts)
            for rate in options.rates:
                asked = {length: one for length, one in prompts.items() if rate > 1 or length < PATIENT}
                rows += measure(home, valkey, plain, rate, options.repeats, asked)
    result = {
        "command": " ".join(["python -m bench.slow_tier", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": about | {"load_after": load()},
        "model": "KINDS['demo'] of tests/vllm/models.py, 4 KiB of KV a token",
        "limit": LIMIT,
        "rows": rows,
    }
    print(json.dumps(result, indent=2))


def fill(home: Path, valkey: backends.Valkey, prompts: dict[int, list[int]]) -> None:
    """Past the door: what is measured is reading."""
    with cellar(valkey.port) as server, engine(server.socket, home) as filling:
        for prompt in prompts.values():
            filling.round([prompt], max_tokens=1)
        cool(server.socket)


def measure(
    home: Path,
    valkey: backends.Valkey,
    plain: VllmEngine,
    rate: int,
    repeats: int,
    prompts: dict[int, list[int]],
) -> list[dict[str, Any]]:
    times: dict[tuple[str, int], list[float]] = {}
    place = home / str(rate)
    place.mkdir()
    with (
        throttled(valkey.port, rate * 1e6) as port,
        cellar(port) as server,
        engine(server.socket, place) as cold,
    ):
        for number in range(repeats):
            for length, prompt in prompts.items():
                order = (("computing", plain), ("tier", cold))
                for name, one in order if number % 2 else order[::-1]:
                    cool(server.socket)
                    first = one.round([prompt], max_tokens=1).outputs[0].first
                    assert first is not None
                    times.setdefault((name, length), []).append(first)
                    print(f"{rate} MB/s {length:5} {name}: {first:.3f} s", file=sys.stderr)
        seen = counts(server.socket)
    return [row(rate, length, times, seen) for length in prompts]


@contextlib.contextmanager
def throttled(port: int, rate: float) -> Iterator[int]:
    door = Door(port, rate)
    try:
        yield door.port
    finally:
        door.close()


def engine(sock: Path, home: Path) -> VllmEngine:
    return VllmEngine("demo", home / "engine.log", connector={"socket": str(sock)}, max_model_len=10_000)


def row(
    rate: int, length: int, times: dict[tuple[str, int], list[float]], counts: dict[str, int]
) -> dict[str, Any]:
    computing, tier = times["computing", length], times["tier", length]
    ratio = statistics.median(tier) / statistics.median(computing)
    return {
        "rate_mb_s": rate,
        "tokens": length,
        "computing_ms": round(1e3 * statistics.median(computing), 1),
        "tier_ms": round(1e3 * statistics.median(tier), 1),
        "ratio": round(ratio, 3),
        "within_limit": ratio <= LIMIT,
        "computing_all_ms": [round(1e3 * one, 1) for one in computing],
        "tier_all_ms": [round(1e3 * one, 1) for one in tier],
        "in_this_rate": counts,
    }


def wait_until(predicate: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SETTLE_S
    while not predicate():
        if time.monotonic() > deadline:
            raise TimeoutError("the server did not come to rest")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
