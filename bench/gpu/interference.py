"""What loads and stores of long prompts do to requests that are being answered beside them.

Many requests decode all the time. Measured are their tokens per second, and the times between two of their
steps, in phases: `alone`; `loads`, a long prompt from the cache every so often; `stores`, new long prompts,
which are computed and, where there is a cache, stored. Computing takes the GPU from the others in any case:
of the last phase, the difference to the mode without a connector is what counts. Every phase has decoders of
its own, so that they never grow large: the pool of an engine that shares the GPU is small.

Three prompts are loaded in turn. With two, where the GPU has room for one and a half, vLLM would still have
the beginning of each: it gives up the ends first. Knows nothing of other modes' engines: turns.py drives
them.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.gpu.engine import Engine
from bench.gpu.progress import say
from bench.gpu.ttft import settle

LOADED = 3  # prompts
ROUNDS = 2  # the last one with stores: they drive out of the cache what is loaded
EVERY_S = 0.5
_NEW = 2  # prompts that are stored
_PROMPT = 100  # tokens of those that decode: what they store is to leave room for what is loaded
_REST = 512  # tokens: chunks differ, and of a prompt its end is always computed
_NUMBERS = itertools.count()  # of requests: no two have the same name
_BEHIND = 8  # tokens: all of them get one in every step, but for those that were preempted
_LOADED = "vllm:external_prefix_cache_hits_total"


class _Driver:
    """Requests that decode without end, and long ones beside them, on one engine's loop."""

    def __init__(self, engine: Engine) -> None:
        from vllm import SamplingParams  # noqa: PLC0415 - after the environment is set
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        self._core = engine.llm.llm_engine
        self._greedy: Callable[[int], Any] = lambda tokens: SamplingParams(
            max_tokens=tokens,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        self._decoding: dict[str, int] = {}  # tokens of each
        self._asked: dict[str, float] = {}
        self.answered: list[tuple[float, int]] = []  # of the long ones: seconds, tokens not computed

    def decode(self, prompts: list[list[int]], tokens: int) -> None:
        """Start them, and wait until each has decoded a little."""
        waiting = set()
        for prompt in prompts:
            name = self._add("decode", prompt, tokens)
            self._decoding[name] = 0
            waiting.add(name)
        deadline = time.monotonic() + 60
        while waiting:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(waiting)} requests do not begin to decode")
            waiting -= {output.request_id for output in self._core.step()}
        for _ in range(20):
            self._core.step()

    def ask(self, prompt: list[int]) -> None:
        self._asked[self._add("long", prompt, 1)] = time.monotonic()

    def _add(self, what: str, prompt: list[int], tokens: int) -> str:
        name = f"{what}-{next(_NUMBERS)}"
        self._core.add_request(name, {"prompt_token_ids": prompt}, self._greedy(tokens))
        return name

    def step(self) -> int:
        """Tokens that were decoded."""
        decoded = 0
        if not self._core.has_unfinished_requests():  # the engine would never answer
            raise RuntimeError("nothing decodes any more")
        for output in self._core.step():
            if output.request_id in self._decoding:
                if output.finished:
                    raise RuntimeError("a request that should decode to the end has come to its own")
                fresh = len(output.outputs[0].token_ids)
                self._decoding[output.request_id] += fresh
                decoded += fresh
            elif output.finished and output.request_id in self._asked:
                took = time.monotonic() - self._asked.pop(output.request_id)
                self.answered.append((took, output.num_cached_tokens or 0))
        return decoded

    def phase(self, seconds: float, long: Iterator[list[int]], every: float) -> dict[str, Any]:
        """Decode for so long, and start a long prompt every so often."""
        self._decoding = dict.fromkeys(self._decoding, 0)
        begun = time.monotonic()
        due, last, decoded, asked = begun, begun, 0, 0
        gaps = []
        while (now := time.monotonic()) < begun + seconds:
            if now >= due and due + every <= begun + seconds:
                prompt = next(long, None)
                if prompt is not None:
                    self.ask(prompt)
                    asked += 1
                due += every
            fresh = self.step()
            decoded += fresh
            if fresh:
                now = time.monotonic()
                gaps.append((now - last) * 1e3)
                last = now
        took = time.monotonic() - begun
        most = max(self._decoding.values())
        preempted = sum(tokens < most - _BEHIND for tokens in self._decoding.values())
        found = {"tokens_per_s": decoded / took, "seconds": took, "asked": asked, "preempted": preempted}
        return found | _spread(gaps)

    def settle(self, seconds: float = 10) -> None:
        """Until the long ones are answered."""
        deadline = time.monotonic() + seconds
        while self._asked and time.monotonic() < deadline:
            self.step()

    def stop(self) -> None:
        self._core.abort_request([*self._decoding, *self._asked])
        deadline = time.monotonic() + 20
        while self._core.has_unfinished_requests() and time.monotonic() < deadline:
            self._core.step()


def _spread(gaps: list[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    return {
        "gap_ms": statistics.median(ordered),
        "gap_p99_ms": ordered[int(len(ordered) * 0.99)],
        "gap_max_ms": ordered[-1],
    }


def one_round(engine: Engine, number: int, *, loads: bool) -> dict[str, Any]:
    """Of one mode. `loads`: whether it has anything to load from."""
    scale, found = engine.scale, {}
    long = _draw(engine, "loads", LOADED, scale.loaded) if loads else []
    _keep(engine, long)
    found["alone"] = _phase(engine, "alone", number, iter(()), EVERY_S)
    if loads:
        _keep(engine, long)
        found["loads"] = _phase(engine, "loads", number, itertools.cycle(long), EVERY_S)
    if number == ROUNDS - 1:
        new = iter(_draw(engine, "stores", _NEW, scale.long))
        found["stores"] = _phase(engine, "stores", number, new, scale.seconds["stores"] / _NEW)
    return found


def _draw(engine: Engine, name: str, count: int, tokens: int) -> list[list[int]]:
    """The same in every mode, whatever else it was asked."""
    drawn = random.Random(name)
    return [[drawn.randrange(10, engine.scale.vocabulary) for _ in range(tokens)] for _ in range(count)]


def _keep(engine: Engine, prompts: Sequence[list[int]]) -> None:
    """All of it in the cache, and asked for again: some caches prefer what was."""
    for prompt in prompts:
        engine.forget()
        if engine.run(prompt).cached < len(prompt) - _REST:
            settle(len(prompt))
            engine.forget()
            engine.run(prompt)


def _phase(engine: Engine, name: str, number: int, long: Iterator[list[int]], every: float) -> dict[str, Any]:
    scale = engine.scale
    engine.forget()  # waits for what is being stored
    driver = _Driver(engine)
    try:
        driver.decode(_draw(engine, f"{name} {number}", scale.decoders, _PROMPT), scale.decode)
        before = _loaded()
        found = driver.phase(scale.seconds[name], long, every)
        driver.settle()
        found["answered"] = driver.answered
        found["loaded"] = _loaded() - before
    finally:
        driver.stop()
    say(_line(name, found))
    return found


def _loaded() -> int:
    """Tokens that came through the connector, as vLLM counts them.

    Not by its get_metrics, which reads all metrics, and raises an error for a connector's that it does not
    understand.
    """
    from prometheus_client import REGISTRY  # noqa: PLC0415 - comes with vLLM

    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    return sum(int(sample.value) for sample in samples if sample.name == _LOADED)


def _line(name: str, phase: dict[str, Any]) -> str:
    line = (
        f"{name}: {phase['tokens_per_s']:.0f} tokens/s, steps {phase['gap_ms']:.1f} ms "
        f"(p99 {phase['gap_p99_ms']:.1f}, worst {phase['gap_max_ms']:.0f})"
    )
    if phase["asked"]:
        answered = [f"{seconds * 1e3:.0f}" for seconds, _ in phase["answered"]]
        line += f"; {len(answered)} of {phase['asked']} answered in {', '.join(answered[:4])} ms"
        line += f", {phase['loaded']} tokens loaded"
    return line + (f"; {phase['preempted']} PREEMPTED" if phase["preempted"] else "")


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one mode: by phase, medians over the rounds, the worst step of all, and the rounds themselves."""
    found: dict[str, Any] = {"rounds": rounds}
    for name in ("alone", "loads", "stores"):
        if having := [one for one in rounds if name in one]:
            found[name] = _over([one[name] for one in having])
            of_alone = [one[name]["tokens_per_s"] / one["alone"]["tokens_per_s"] for one in having]
            found[name]["of_alone"] = statistics.median(of_alone)
    return found


def _over(phases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`loaded`: tokens through the connector, of each long prompt on average; `cached`: tokens that were not
    computed, the least of all.
    """
    names = ("tokens_per_s", "gap_ms", "gap_p99_ms")
    found: dict[str, Any] = {name: statistics.median(one[name] for one in phases) for name in names}
    found["gap_max_ms"] = max(one["gap_max_ms"] for one in phases)
    found["preempted"] = sum(one["preempted"] for one in phases)
    asked = sum(one["asked"] for one in phases)
    answered = [each for one in phases for each in one["answered"]]
    if asked:
        found |= {"asked": asked, "answered": len(answered)}
        found["loaded"] = sum(one["loaded"] for one in phases) / asked
    if answered:
        found["answered_ms"] = statistics.median(seconds for seconds, _ in answered) * 1e3
        found["cached"] = min(cached for _, cached in answered)
    return found
