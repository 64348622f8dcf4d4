"""What loads and stores of long prompts do to requests that are being answered beside them.

Many requests decode all the time. Measured are their tokens per second, and the times between two of their
steps, in phases of equal length: `alone`; while a long prompt is loaded every half second; while long prompts
are computed and, where there is a cache, stored. Computing takes the GPU from the others in any case: of
the last phase, the difference to the mode without a connector is what counts.
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

from bench.gpu.engine import Engine
from bench.gpu.progress import say

LOADED = 4  # prompts, in turn: more than the GPU has room for
EVERY_S = 0.5
_PROMPT = 500  # tokens of those that decode


class _Driver:
    """Requests that decode without end, and long ones beside them, on one engine's loop."""

    def __init__(self, engine: Engine) -> None:
        from vllm import SamplingParams  # noqa: PLC0415 - after the environment is set
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        self._core = engine.llm.llm_engine
        self._greedy = lambda tokens: SamplingParams(
            max_tokens=tokens,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        self._numbers = itertools.count()
        self._decoding: set[str] = set()
        self._asked: dict[str, float] = {}
        self.answered: list[tuple[float, int]] = []  # of the long ones: seconds, tokens that were cached

    def decode(self, prompts: list[list[int]], tokens: int) -> None:
        """Start them, and wait until each has decoded a little."""
        waiting = set()
        for prompt in prompts:
            name = self._add("decode", prompt, tokens)
            self._decoding.add(name)
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
        name = f"{what}-{next(self._numbers)}"
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
                decoded += len(output.outputs[0].token_ids)
            elif output.finished and output.request_id in self._asked:
                took = time.monotonic() - self._asked.pop(output.request_id)
                self.answered.append((took, output.num_cached_tokens or 0))
        return decoded

    def phase(self, seconds: float, long: Iterator[list[int]], every: float) -> dict[str, Any]:
        """Decode for so long, and start a long prompt every so often."""
        self.answered.clear()
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
        result = {"tokens_per_s": decoded / took, "seconds": took, "asked": asked} | _spread(gaps)
        return result | {"answered": [[seconds, cached] for seconds, cached in self.answered]}

    def settle(self, seconds: float = 30) -> None:
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


def measure(engine: Engine, *, loads: bool) -> dict[str, Any]:
    """`loads`: whether the engine has anything to load from."""
    scale = engine.scale
    prompts = [engine.prompt(scale.long) for _ in range(LOADED if loads else 0)]
    engine.forget()
    for prompt in prompts:
        engine.run(prompt)
    time.sleep(1)
    engine.forget()
    driver = _Driver(engine)
    try:
        return _phases(engine, driver, prompts)
    finally:
        driver.stop()
        engine.forget()


def _phases(engine: Engine, driver: _Driver, prompts: list[list[int]]) -> dict[str, Any]:
    scale = engine.scale
    driver.decode([engine.prompt(_PROMPT) for _ in range(scale.decoders)], scale.decode)
    result = {"alone": driver.phase(scale.phase_s / 2, iter(()), EVERY_S)}
    say(_line("alone", result["alone"]))
    if prompts:
        result["loads"] = driver.phase(scale.phase_s, itertools.cycle(prompts), EVERY_S)
        say(_line("loads", result["loads"]))
        driver.settle()
    fresh = iter([engine.prompt(scale.long) for _ in range(2)])
    result["stores"] = driver.phase(scale.phase_s, fresh, scale.phase_s / 2)
    say(_line("stores", result["stores"]))
    driver.settle()
    return result


def _line(name: str, phase: dict[str, Any]) -> str:
    answered = [f"{seconds * 1e3:.0f} ms" for seconds, _ in phase["answered"]]
    cached = sorted({cached for _, cached in phase["answered"]})
    return (
        f"{name}: {phase['tokens_per_s']:.0f} tokens/s, steps {phase['gap_ms']:.1f} ms "
        f"(p99 {phase['gap_p99_ms']:.1f}, worst {phase['gap_max_ms']:.0f}); "
        f"{len(answered)} of {phase['asked']} answered in {answered[:3]}..., cached {cached}"
    )
