"""Time to first token of real vLLM, with KV computed, still there, or from a cache.

A round has up to three figures: `cold` (never seen), `warm` (vLLM's own prefix cache emptied, so KV comes
through the connector) and `kept` (still on the GPU, which nothing outside can beat). A row has their medians,
and medians of what is compared within a round, since a host's speed drifts from round to round:

    floor           kept + bytes of KV / what the bus reaches
    of_floor        warm / floor
    over            warm - floor: what loading costs beyond the bus
    of_recompute    cold / cold without a connector: what storing costs
    over_recompute  the same as a difference; `give_or_take` is how sure that is, by the notch of a box plot

Knows nothing of other modes' engines: turns.py drives them.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.gpu.engine import Engine

Rounds = Sequence[dict[str, Any]]


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


def warm_up(engine: Engine, long: list[int], *, rest: bool) -> None:
    """Kernels are compiled, memory is mapped and page-locked: every mode is measured as it runs for days.
    `long`: the last prompt to be computed, which stays in the cache.
    """
    for _ in range(3):
        prompt = engine.prompt(min(4_000, engine.scale.long))
        engine.run(prompt)
        time.sleep(0.3)
        engine.forget()
        engine.run(prompt)
    engine.run(long)
    time.sleep(engine.scale.rest_s if rest else 1.0)


def settle(tokens: int, least: float = 0.3) -> None:
    """After a cold run: until it is stored, in any mode."""
    time.sleep(least + tokens / 100_000)


def one_round(engine: Engine, tokens: int, *, reload: bool) -> dict[str, Any]:
    """Milliseconds. Without `reload` nothing is loaded: there is nothing that could be."""
    prompt = engine.prompt(tokens)
    engine.forget()
    cold = engine.run(prompt)
    settle(tokens)
    # What comes first after a pause may take longer: so it is neither of those that are compared.
    engine.run(prompt)
    # Before it is loaded: of a window, a load leaves a block less than vLLM needs to find it again.
    kept = engine.run(prompt)
    if not reload:
        engine.run(prompt)  # as the others do: all that differs should be the connector
        return {"cold": cold.ms, "kept": kept.ms}
    engine.forget()
    warm = engine.run(prompt)
    # With more to compute in one of them, they round differently.
    same = warm.tokens == kept.tokens or warm.cached != kept.cached
    return {"cold": cold.ms, "warm": warm.ms, "kept": kept.ms, "cached": warm.cached, "same": same}


def cold_round(engine: Engine, tokens: int) -> dict[str, Any]:
    """A prompt that was never seen, and nothing else: the same calls with a connector and without."""
    cold = engine.run(engine.prompt(tokens))
    settle(tokens, 0.1)  # nobody loads it
    return {"cold": cold.ms}


def row(rounds: Rounds, alone: Rounds, bus_ms: float | None) -> dict[str, Any]:
    """Of one mode and length. `alone`: the same rounds without a connector; `bus_ms`: to move the KV."""
    times = {name: [one[name] for one in rounds] for name in ("cold", "warm", "kept") if name in rounds[0]}
    found: dict[str, Any] = {name: statistics.median(values) for name, values in times.items()}
    found["times"] = times
    if alone:
        pairs = [(one["cold"], base["cold"]) for one, base in zip(rounds, alone, strict=False)]
        found["of_recompute"] = statistics.median(one / base for one, base in pairs)
        found |= over_recompute([one - base for one, base in pairs])
    if "warm" in times:
        found |= {"cached": [one["cached"] for one in rounds], "same": all(one["same"] for one in rounds)}
    if "warm" in times and bus_ms is not None:
        found["floor"] = found["kept"] + bus_ms
        found["of_floor"] = statistics.median(one["warm"] / (one["kept"] + bus_ms) for one in rounds)
        found["over"] = statistics.median(one["warm"] - one["kept"] - bus_ms for one in rounds)
    return found


def over_recompute(differences: list[float]) -> dict[str, float]:
    """Their median, and a notch for it: unlike a standard deviation, that minds no few that are far off."""
    found = {"over_recompute": statistics.median(differences)}
    if len(differences) > 3:
        low, _, high = statistics.quantiles(differences)
        found["give_or_take"] = 1.57 * (high - low) / len(differences) ** 0.5
    return found
