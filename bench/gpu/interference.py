"""What loads and stores of long prompts do to requests that are being answered beside them.

Many requests decode all the time. Measured are their tokens per second, and the times between two of their
steps, in spells: `alone`; then `loads`, a long prompt from the cache every so often, or `stores`, new long
prompts, which are computed and, where there is a cache, stored; then alone again. What is compared are two
neighbours: a host's speed drifts within seconds. Computing takes the GPU from the others in any case: of
`stores`, the difference to other modes is what counts. Both have decoders of their own, so that they never
grow large: the pool of an engine that shares the GPU is small.

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
ROUNDS = 4  # the last one with stores: they drive out of the cache what is loaded
SPELLS = {"loads": 2, "stores": 2}  # of each kind, in one round
EVERY_S = {"loads": 0.5, "stores": 60.0}  # seconds until the next long prompt: a new one comes by itself
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

    def spell(self, seconds: float, long: Iterator[list[int]], every: float) -> dict[str, Any]:
        """Decode for so long, and start a long prompt every so often."""
        self._decoding = dict.fromkeys(self._decoding, 0)
        self.answered = []
        before = _loaded()
        begun = time.monotonic()
        due, last, decoded, asked = begun, begun, 0, 0
        gaps = []
        while (now := time.monotonic()) < begun + seconds:
            if now >= due and (prompt := next(long, None)) is not None:
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
        self._settle()
        return found | _spread(gaps) | {"answered": self.answered, "loaded": _loaded() - before}

    def _settle(self, seconds: float = 10) -> None:
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


def one_round(engine: Engine, number: int, *, loads: bool) -> list[dict[str, Any]]:
    """Of one mode: pairs of spells. `loads`: whether it has anything to load from; else only alone."""
    long = prompts(engine) if loads else []
    _keep(engine, long)
    found = _pairs(engine, "loads", number, itertools.cycle(long) if loads else None)
    if number == ROUNDS - 1:
        new = _draw(engine, "stores", SPELLS["stores"], engine.scale.long)
        found += _pairs(engine, "stores", number, iter(new))
    return found


def prompts(engine: Engine) -> list[list[int]]:
    """Those that are loaded."""
    return _draw(engine, "loads", LOADED, engine.scale.loaded)


def _draw(engine: Engine, name: str, count: int, tokens: int) -> list[list[int]]:
    """The same in every mode, whatever else it was asked."""
    drawn = random.Random(name)
    return [[drawn.randrange(10, engine.scale.vocabulary) for _ in range(tokens)] for _ in range(count)]


def _keep(engine: Engine, long: Sequence[list[int]]) -> None:
    """All of it in the cache, and asked for again: some caches prefer what was."""
    for prompt in long:
        engine.forget()
        if engine.run(prompt).cached < len(prompt) - _REST:
            settle(len(prompt))
            engine.forget()
            engine.run(prompt)


def _pairs(engine: Engine, name: str, number: int, long: Iterator[list[int]] | None) -> list[dict[str, Any]]:
    """Spells of that kind, if there are prompts for it, each after one alone."""
    seconds, pairs = engine.scale.seconds, []
    engine.forget()  # waits for what is being stored
    driver = _Driver(engine)
    try:
        driver.decode(_draw(engine, f"{name} {number}", engine.scale.decoders, _PROMPT), engine.scale.decode)
        for _ in range(SPELLS[name]):
            pair = {"alone": driver.spell(seconds["alone"], iter(()), EVERY_S[name])}
            if long is not None:
                pair[name] = driver.spell(seconds[name], long, EVERY_S[name])
            pairs.append(pair)
            say("; ".join(_line(*spell) for spell in pair.items()))
    finally:
        driver.stop()
    return pairs


def _loaded() -> int:
    """Tokens that came through the connector, as vLLM counts them.

    Not by its get_metrics, which reads all metrics, and raises an error for a connector's that it does not
    understand.
    """
    from prometheus_client import REGISTRY  # noqa: PLC0415 - comes with vLLM

    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    return sum(int(sample.value) for sample in samples if sample.name == _LOADED)


def _line(name: str, spell: dict[str, Any]) -> str:
    line = f"{name} {spell['tokens_per_s']:.0f} tokens/s, steps {spell['gap_ms']:.1f} ms"
    line += f" (worst {spell['gap_max_ms']:.0f})"
    if spell["asked"]:
        answered = [f"{seconds * 1e3:.0f}" for seconds, _ in spell["answered"]]
        line += f", {len(answered)} of {spell['asked']} answered in {', '.join(answered)} ms"
        line += f", {spell['loaded']} tokens loaded"
    return line + (f", {spell['preempted']} PREEMPTED" if spell["preempted"] else "")


def summary(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one mode: by kind of spell, medians, the worst step of all, and the pairs themselves."""
    found: dict[str, Any] = {"pairs": pairs}
    for name in ("alone", "loads", "stores"):
        if having := [one for one in pairs if name in one]:
            found[name] = _over([one[name] for one in having])
            of_alone = [one[name]["tokens_per_s"] / one["alone"]["tokens_per_s"] for one in having]
            found[name]["of_alone"] = statistics.median(of_alone)
    return found


def _over(spells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`loaded`: tokens through the connector, of each long prompt on average; `cached`: tokens that were not
    computed, the least of all.
    """
    names = ("tokens_per_s", "gap_ms", "gap_p99_ms")
    found: dict[str, Any] = {name: statistics.median(one[name] for one in spells) for name in names}
    found["gap_max_ms"] = max(one["gap_max_ms"] for one in spells)
    found["preempted"] = sum(one["preempted"] for one in spells)
    asked = sum(one["asked"] for one in spells)
    answered = [each for one in spells for each in one["answered"]]
    if asked:
        found |= {"asked": asked, "answered": len(answered)}
        found["loaded"] = sum(one["loaded"] for one in spells) / asked
    if answered:
        found["answered_ms"] = statistics.median(seconds for seconds, _ in answered) * 1e3
        found["cached"] = min(cached for _, cached in answered)
    return found
