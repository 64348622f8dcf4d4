"""The parts that compare modes: their engines are on the GPU at once, and take turns.

A host's speed drifts, to half within minutes: what is to be compared must be measured within seconds. So
every round goes through all modes, in another order each time, with the same prompts; one is at work, the
others are idle. A mode that fails or hangs is left out from then on, and the others go on. Each part has
engines of its own. Time to first token goes through all lengths again and again: where time is short, all of
them have fewer rounds. Knows nothing of what a round is (interference.py, ttft.py).
"""

import contextlib
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bench.gpu import interference, ttft
from bench.gpu.children import TURNS, Child, cache_gib, site
from bench.gpu.engine import CACHES
from bench.gpu.progress import say
from bench.gpu.report import ROWS
from bench.gpu.scale import Scale
from bench.gpu.shapes import kv_bytes

# Seconds that each may take, some three times of what it should.
START_S, WARM_UP_S, ROUND_S, BUS_S = 240.0, 120.0, 45.0, 60.0
BESIDE_S = 90.0
PARTS = ("interference", "ttft", "cold")
_ROOM = {"lmcache": 4 / 3}  # for the same prompts: it gives up what it has when four fifths are full
CLOSING_S = 30.0  # before the end: no round is begun
# Tokens. Shorter prompts take no time, and are noisy: launched by Python, a forward takes 20 or 40 ms. So
# they have more rounds; and still more where all that is asked is what storing costs: half a millisecond.
_SHORT, _MORE = 10_000, {"ttft": 4, "cold": 24}

_Any = TypeVar("_Any")
Found = dict[str, dict[str, Any]]  # by mode
Keep = Callable[[Found], Any]


class Run(NamedTuple):
    """What is to be measured, and where its logs go."""

    scale: Scale
    model: str
    part: str
    small: bool
    out: Path
    rounds: int
    end: float  # of time.monotonic()

    def left(self, most: float) -> float:
        return max(0.0, min(most, self.end - time.monotonic()))


class Entrant:
    """One mode: its server, its engine, and what it has shown so far."""

    def __init__(self, run: Run, mode: str) -> None:
        self.run, self.mode = run, mode
        self.about: dict[str, Any] = {}
        self.beside: list[dict[str, Any]] = []  # pairs of spells
        self.rounds: dict[int, list[dict[str, Any]]] = {}  # by tokens
        self.error: str | None = None
        self._stack = contextlib.ExitStack()
        self._child: Child | None = None

    def open(self, gib: int) -> None:
        """Its server is up when this returns, and its engine about to be."""
        run = self.run
        log = run.out.with_name(f"{run.out.stem}.{run.model}.{self.mode}.{run.part}.log")
        log.unlink(missing_ok=True)
        gib = _gib_of(self.mode, gib)
        with self._or_out():
            where = self._stack.enter_context(site(run.scale, run.model, self.mode, gib, small=run.small))
            self.about = {"server_s": where.seconds, "cache_gib": gib}
            job = where.job | {"parts": [TURNS], "options": run.scale.turns_options(run.model, run.part)}
            self._child = self._stack.enter_context(Child(job, f"{run.model}-{self.mode}", log))

    def tell(self, what: str, **more: Any) -> None:
        if self._child is not None:
            with self._or_out():
                self._child.tell(do=what, **more)

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """Nothing from one that is out."""
        if self._child is not None:
            with self._or_out():
                return self._child.hear(self.run.left(seconds))
        return None

    @contextlib.contextmanager
    def _or_out(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            self.give_up(str(error))
            say(f"{self.run.model}, {self.mode} is out: {error}")
            self.close()  # it must not take the others' time

    def give_up(self, why: str) -> None:
        """The first reason is the one that counts."""
        self.error = self.error or why

    def close(self) -> None:
        self._child = None
        # One that cannot be killed is nobody else's trouble.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._stack.close()


def measure(run: Run, modes: Sequence[str], keep: Keep) -> Found:
    """`keep` gets what there is after each round: whoever is ended loses no more than one."""
    if run.scale.gpu:
        refuse_too_many(run.model, len(modes), run.scale.turns_bytes(run.model), _free_on_gpu())
    gib = _cache(run, [mode for mode in modes if mode in CACHES])
    entrants = [Entrant(run, mode) for mode in modes]
    rate = None
    try:
        _together(entrants, lambda entrant: entrant.open(gib))
        for entrant, about in zip(entrants, _hear_all(entrants, START_S), strict=True):
            entrant.about |= about or {}
        for entrant in entrants:  # all at the same time: most of it is waiting
            entrant.tell("warm_up")
        _hear_all(entrants, WARM_UP_S)
        if run.part == "interference":
            _take_turns_beside(run, entrants, keep)
        else:
            _take_turns(run, entrants, keep)
        if run.part == "ttft" and run.scale.gpu:
            rate = _bus_rate(entrants)
    finally:
        _together(entrants, Entrant.close)
    return _all(entrants, rate)


def refuse_too_many(model: str, count: int, each: int, free: int) -> None:
    """More engines than fit would not all come up, and which ones would be chance."""
    if count * each > free:
        raise RuntimeError(
            f"{count} engines of {model} take {count * each / 1e9:.0f} GB of the GPU, which has "
            f"{free / 1e9:.0f}: ask for {free // each} modes at once"
        )


def _free_on_gpu() -> int:
    """Bytes. Not by CUDA: this process is to have no part of the GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    return int(told.split()[0]) << 20


def _cache(run: Run, modes: Sequence[str]) -> int:
    """GiB for each of them, before what it needs beyond the others."""
    least, wanted = run.scale.cache_of(run.model, beside=run.part == "interference")
    gib = cache_gib(wanted)
    if gib < least:
        raise RuntimeError(
            f"the longest prompt of {run.model} takes {least} GiB of cache, /dev/shm has {gib}"
        )
    told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(told["MemAvailable"].split()[0]) >> 20
    taken = sum(_gib_of(mode, gib) for mode in modes)
    if taken > available:  # said, not refused: a virtual machine's memory may grow with its use
        say(f"the caches take {taken} GiB, where {available} GiB of memory are available")
    return gib


def _gib_of(mode: str, gib: int) -> int:
    return round(gib * _ROOM.get(mode, 1))


def _hear_all(entrants: Sequence[Entrant], seconds: float) -> list[dict[str, Any] | None]:
    """Within that time for all of them."""
    end = time.monotonic() + seconds
    return [entrant.hear(max(0.0, end - time.monotonic())) for entrant in entrants]


def in_turn(items: Sequence[_Any], number: int) -> list[_Any]:
    """Another one begins each time."""
    first = number % len(items) if items else 0
    return [*items[first:], *items[:first]]


def _no_time(run: Run, entrants: Sequence[Entrant], what: str) -> bool:
    if run.left(CLOSING_S) == CLOSING_S:
        return False
    for entrant in entrants:
        entrant.give_up(f"no time left for {what}")
    return True


def _take_turns_beside(run: Run, entrants: Sequence[Entrant], keep: Keep) -> None:
    for number in range(interference.ROUNDS):
        if _no_time(run, entrants, f"round {number + 1} of interference"):
            return
        for entrant in in_turn(entrants, number):
            entrant.tell("interference", round=number)
            if found := entrant.hear(BESIDE_S):
                entrant.beside += found["pairs"]
        keep(_all(entrants))


def _take_turns(run: Run, entrants: Sequence[Entrant], keep: Keep) -> None:
    for again in range(run.rounds):
        for tokens in run.scale.lengths:
            more = _MORE[run.part] if tokens < _SHORT else 1
            for number in range(again * more, (again + 1) * more):
                if _no_time(run, entrants, f"round {number + 1} of {tokens} tokens"):
                    return
                for entrant in in_turn(entrants, number):
                    entrant.tell(run.part, tokens=tokens)
                    if found := entrant.hear(ROUND_S):
                        entrant.rounds.setdefault(tokens, []).append(found)
                keep(_all(entrants))
            say(f"{tokens} tokens: " + "; ".join(_line(entrant, tokens) for entrant in entrants))


def _line(entrant: Entrant, tokens: int) -> str:
    rounds = entrant.rounds.get(tokens, [])
    names = [name for name in ("cold", "warm", "kept") if rounds and name in rounds[0]]
    return f"{entrant.mode} " + ", ".join(
        f"{name} {statistics.median(one[name] for one in rounds):.1f}" for name in names
    )


def _bus_rate(entrants: Sequence[Entrant]) -> float | None:
    """As the first one that can tell has measured it. Last: vLLM starts faster where CUDA is not in use."""
    for entrant in entrants:
        entrant.tell("bus")
        if found := entrant.hear(BUS_S):
            return float(found["bus_gbps"])
    return None


def _all(entrants: Sequence[Entrant], rate: float | None = None) -> Found:
    return {entrant.mode: _found(entrant, entrants, rate) for entrant in entrants}


def _found(entrant: Entrant, entrants: Sequence[Entrant], rate: float | None) -> dict[str, Any]:
    model, part = entrant.run.model, entrant.run.part
    alone = next((other.rounds for other in entrants if other.mode == "recompute"), {})
    rows = []
    for tokens, rounds in entrant.rounds.items():
        bus_ms = kv_bytes(model, tokens) / rate / 1e6 if rate else None
        rows.append({"tokens": tokens} | ttft.row(rounds, alone.get(tokens, []), bus_ms))
    found = entrant.about | ({ROWS[part]: rows} if rows else {})
    found |= {"bus_gbps": rate} if rate else {}
    if entrant.beside:
        cache = {"cache_gib": entrant.about.get("cache_gib")}  # another than that of ttft
        found["interference"] = interference.summary(entrant.beside) | cache
    return found | ({"errors": {part: entrant.error}} if entrant.error else {})


def _together(entrants: Sequence[Entrant], what: Callable[[Entrant], None]) -> None:
    with ThreadPoolExecutor(len(entrants)) as pool:
        list(pool.map(what, entrants))
