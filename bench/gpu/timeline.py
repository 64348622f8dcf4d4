"""Where the time of a load goes, from a request's arrival to its first token.

Asks for prompts that were never seen, are in the cache, and are still on the GPU, and reads what noting.py,
in the engine's process, has noted of them: a moment per stage, which ends where the next begins.
CLOCK_MONOTONIC is the same for all processes.
"""

import statistics
import time
from pathlib import Path
from typing import Any

from bench.gpu.engine import Engine
from bench.gpu.progress import say
from bench.gpu.shapes import kv_bytes
from bench.gpu.ttft import settle

VARIABLE, NAME = "KVCELLAR_BENCH_TIMELINE", "timeline.txt"  # where the engine finds the name of the file
ROUNDS = 9

# A stage, and the moment with which it ends. Only a prompt that is loaded goes through all.
STAGES = (
    ("request to the engine", "offer"),
    ("lookup", "offered"),
    ("blocks, metadata, hand-over", "load"),
    ("until a copy is launched", "copying"),
    ("copies", "copied"),
    ("telling vLLM", "told"),
    ("vLLM acts on it", "forward"),
    ("forward", "finished"),
    ("the answer back", "answer"),
)


def measure(engine: Engine, file: Path) -> list[dict[str, Any]]:
    rows = []
    for tokens in engine.scale.lengths[:3]:
        cold, warm, kept = [], [], []
        for _ in range(ROUNDS):
            prompt = engine.prompt(tokens)
            engine.forget()
            cold.append(_stages(engine, prompt, file))
            settle(tokens)
            engine.run(prompt)  # the first after a pause, as in ttft.py
            kept.append(_stages(engine, prompt, file))
            engine.forget()
            warm.append(_stages(engine, prompt, file, least=tokens - engine.scale.chunk))
        row: dict[str, Any] = {"tokens": tokens, "bytes": kv_bytes(engine.model, tokens)}
        rows.append(row | {"cold": _medians(cold), "warm": _medians(warm), "kept": _medians(kept)})
        say(f"{tokens} tokens: " + ", ".join(f"{name} {ms:.2f}" for name, ms in rows[-1]["warm"].items()))
    return rows


def _stages(engine: Engine, prompt: list[int], file: Path, least: int = 0) -> dict[str, float]:
    """Milliseconds of each stage that this request went through. `least`: tokens that are not computed, or it
    would be another request's profile.
    """
    engine.idle()
    file.write_text("")
    answer = engine.run(prompt)
    ended = time.monotonic()
    last = begun = ended - answer.ms / 1e3
    if answer.cached < least:
        raise RuntimeError(
            f"of {len(prompt)} tokens only {answer.cached} were loaded: is the cache too small?"
        )
    moments: dict[str, float] = {"answer": ended}
    for line in file.read_text().splitlines():
        at, moment = line.split()
        moments.setdefault(moment, float(at))  # the first of each
    stages = {}
    for stage, moment in STAGES:
        if moment in moments:
            stages[stage] = (moments[moment] - last) * 1e3
            last = moments[moment]
    return stages | {"all": (ended - begun) * 1e3}


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds if name in one) for name in rounds[-1]}
