"""Greedy tokens of many prompts, computed, still on the GPU, and loaded; and with bits flipped in the cache.

Loaded KV is compared with KV that never left the GPU (`kept`). Where both leave vLLM the same tokens to
compute, the same kernels run on the same bytes: tokens must be equal, and log-probabilities bit for bit.
Computing a prompt as a whole (`cold`) rounds differently in bfloat16, which turns a token where two are
nearly as likely. So the prompts are the third of those drawn whose answers are the surest, by their cold run.
And with the first block of a prompt changed, answers must change, or equal tokens would mean nothing.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.engine import Answer, Engine
from bench.gpu.progress import say
from kvcellar.slab import HEADER_MAGIC, OBJECT_HEADER, PAGE, SlabShape

TOKENS = 4
DRAWN = 3  # times as many prompts as are compared
FAR = 16  # tokens at the beginning, changed to see that they count
NEAR = 0.05  # nats between the two likeliest tokens


def compare(engine: Engine, count: int) -> dict[str, Any]:
    prompts, cold = _surest(engine, count)
    kept = [engine.run(prompt, TOKENS, logprobs=2) for prompt in prompts]
    time.sleep(1)
    engine.forget()
    warm = [engine.run(prompt, TOKENS, logprobs=2) for prompt in prompts]
    changed = [engine.run(engine.prompt(FAR) + prompt[FAR:], TOKENS) for prompt in prompts]
    alike = [(a, b) for a, b in zip(warm, kept, strict=True) if a.cached == b.cached]
    result = {
        "prompts": count,
        "hits": sum(answer.cached > 0 for answer in warm),
        "cold_is_warm": _equal(cold, warm),
        "cold_is_kept": _equal(cold, kept),  # vLLM's own prefix cache: what rounding alone does
        "nearly": sum(turned(a, b) for a, b in zip(cold, warm, strict=True)),
        "comparable": len(alike),
        "kept_is_warm": sum(a.tokens == b.tokens for a, b in alike),
        "bit_for_bit": sum(a.tokens == b.tokens and a.best == b.best for a, b in alike),
        "depends_on_far": count - _equal(cold, changed),
        "least_gap": min(_gap(answer) for answer in cold),
    }
    result["ok"] = (
        result["hits"] == count
        and result["cold_is_warm"] + result["nearly"] == count
        and result["kept_is_warm"] == result["comparable"] >= count // 2
        and result["depends_on_far"] > count // 2
    )
    say(f"tokens: {result}")
    return result


def _surest(engine: Engine, count: int) -> tuple[list[list[int]], list[Answer]]:
    """Prompts and their cold answers. Half of them end just after a chunk: there, a load leaves as much to
    compute as the prefix cache does.
    """
    chunk = engine.scale.chunk
    engine.forget()
    found: list[tuple[list[int], Answer]] = []
    for after in (range(1, 16), range(17, chunk)):
        some = []
        for number in range(DRAWN * count // 2):
            prompt = engine.prompt(chunk * (2 + number % 8) + after[7 * number % len(after)])
            some.append((prompt, engine.run(prompt, TOKENS, logprobs=2)))
        found += sorted(some, key=lambda pair: _gap(pair[1]), reverse=True)[: count // 2]
    return [prompt for prompt, _ in found], [answer for _, answer in found]


def _gap(answer: Answer) -> float:
    """How sure the least sure of its tokens is."""
    return min(gap for _, gap in answer.best)


def _equal(some: list[Answer], others: list[Answer]) -> int:
    return sum(a.tokens == b.tokens for a, b in zip(some, others, strict=True))


def turned(one: Answer, other: Answer) -> bool:
    """Whether they differ, and first where the two likeliest tokens were nearly as likely."""
    pairs = zip(one.tokens, other.tokens, one.best, strict=True)
    first = next((gap for a, b, (_, gap) in pairs if a != b), None)
    return first is not None and first < NEAR


def flip(engine: Engine, memory: Path, corrupt: Any) -> dict[str, Any]:
    """A flipped bit in every object of the cache: found, and computed instead. `corrupt` asks the server."""
    chunks = 6
    prompts = [engine.prompt(engine.scale.chunk * chunks + 5) for _ in range(3)]
    engine.forget()
    cold = [engine.run(prompt, TOKENS, logprobs=2) for prompt in prompts]
    time.sleep(1)
    engine.forget()
    before, flipped = corrupt(), flip_everywhere(memory)
    again = [engine.run(prompt, TOKENS, logprobs=2) for prompt in prompts]
    found = corrupt() - before
    equal = sum(a.tokens == b.tokens or turned(a, b) for a, b in zip(cold, again, strict=True))
    ok = flipped > 0 and found == chunks * len(prompts) and equal == len(prompts)
    result = {"flipped": flipped, "found": found, "prompts": len(prompts), "equal": equal, "ok": ok}
    say(f"flipped bits: {result}")
    return result


def flip_everywhere(memory: Path) -> int:
    """One bit of every object, each somewhere else."""
    flipped, pick = 0, np.random.default_rng(3)
    for path in memory.rglob("*.slab"):
        whole = np.memmap(path, dtype=np.uint8, mode="r+")
        first = whole[: OBJECT_HEADER.itemsize * (PAGE // OBJECT_HEADER.itemsize)].view(OBJECT_HEADER)
        sizes = first["object_bytes"][first["magic"] == HEADER_MAGIC]
        if not len(sizes):
            continue  # nothing in its first page of slots, and so nowhere: they are filled in order
        shape = _shape(len(whole), -(-int(sizes[0]) // PAGE) * PAGE)
        headers = whole[: shape.slots * OBJECT_HEADER.itemsize].view(OBJECT_HEADER)
        for slot in np.flatnonzero(headers["magic"] == HEADER_MAGIC).tolist():
            at = shape.header_bytes + slot * shape.slot_bytes + int(pick.integers(sizes[0]))
            whole[at] ^= np.uint8(1 << int(pick.integers(8)))
            flipped += 1
    return flipped


def _shape(file_bytes: int, slot_bytes: int) -> SlabShape:
    """The shape of a slab of that size."""
    shape = SlabShape(file_bytes // slot_bytes, slot_bytes)
    while shape.file_bytes > file_bytes:
        shape = SlabShape(shape.slots - 1, slot_bytes)
    if shape.file_bytes != file_bytes:
        raise ValueError(f"no slab of slots of {slot_bytes} bytes has {file_bytes} bytes")
    return shape
