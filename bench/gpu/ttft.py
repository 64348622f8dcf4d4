"""Time to first token of real vLLM, with KV computed, still there, or from a cache.

Per prompt length, medians: `cold` (never seen), `warm` (vLLM's own prefix cache emptied, so KV comes through
the connector) and `kept` (still on the GPU, which nothing outside can beat).
floor = kept + bytes of KV / what the bus reaches; a mode's own figures of the same run.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.gpu.engine import Engine
from bench.gpu.progress import say
from bench.gpu.shapes import kv_bytes

_SHORT = 10_000  # tokens; shorter prompts are noisy, and take no time


def bus_rate() -> float:
    """Bytes per second from page-locked memory to the GPU."""
    import torch  # noqa: PLC0415 - not before vLLM: it would find CUDA in use, and start slowly

    size = 1 << 30
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    rates = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(size / (time.perf_counter() - start))
    return statistics.median(rates)


def warm_up(engine: Engine, *, rest: bool) -> None:
    """Kernels are compiled, memory is mapped and page-locked: every mode is measured as it runs for days."""
    for _ in range(3):
        prompt = engine.prompt(min(4_000, engine.scale.long))
        engine.run(prompt), time.sleep(0.3), engine.forget(), engine.run(prompt)
    engine.run(engine.prompt(engine.scale.long))
    time.sleep(engine.scale.rest_s if rest else 1.0)


def measure(engine: Engine, rounds: int, *, reload: bool) -> list[dict[str, Any]]:
    """A row per length. Without `reload`, cold figures only: there is nothing that could be loaded."""
    rows = []
    for tokens in engine.scale.lengths:
        count = rounds * (5 if tokens < _SHORT else 1)
        row = _measure_length(engine, tokens, count) if reload else _measure_cold(engine, tokens, count)
        rows.append(row)
        say(
            ", ".join(f"{name} {row[name]:.1f}" for name in ("tokens", "cold", "warm", "kept") if name in row)
        )
    return rows


def settle(tokens: int) -> None:
    """Between a cold run and its reload: until it is stored, in any mode."""
    time.sleep(0.3 + tokens / 100_000)


def _measure_cold(engine: Engine, tokens: int, count: int) -> dict[str, Any]:
    times = []
    for _ in range(count):
        engine.forget()
        times.append(engine.run(engine.prompt(tokens)).ms)
    return {"tokens": tokens, "cold": statistics.median(times), "times": {"cold": times}}


def _measure_length(engine: Engine, tokens: int, count: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"cold": [], "warm": [], "kept": []}
    cached, same = [], []
    for _ in range(count):
        prompt = engine.prompt(tokens)
        engine.forget()
        cold = engine.run(prompt)
        settle(tokens)
        engine.forget()
        warm = engine.run(prompt)
        kept = engine.run(prompt)
        for name, answer in zip(times, (cold, warm, kept), strict=True):
            times[name].append(answer.ms)
        cached.append(warm.cached)
        # With more to compute in one of them, they round differently.
        same.append(warm.tokens == kept.tokens or warm.cached != kept.cached)
    row: dict[str, Any] = {name: statistics.median(values) for name, values in times.items()}
    return row | {"tokens": tokens, "cached": cached, "same": all(same), "times": times}


def add_floor(rows: Sequence[dict[str, Any]], model: str, rate: float) -> None:
    for row in rows:
        if "kept" in row:
            row["floor"] = row["kept"] + kv_bytes(model, row["tokens"]) / rate * 1e3
