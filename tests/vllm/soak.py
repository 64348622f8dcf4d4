"""A soak: two real engines at work on one server, hundreds of requests with shared prefixes, aborts and
preemptions, and a server that is killed under them. Every answer must be the one that an engine without a
cache gives, and nothing may be left held.

    python -m tests.vllm.soak [--requests 300] [--kills 3] [--seed 1]     what `make soak` runs
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tests.server.conftest import ServerProcess
from tests.server.engine import eventually
from tests.vllm.harness import Answer, VllmEngine
from tests.vllm.models import VOCAB

KIND = "gqa"
CHUNK = 128
# Twelve blocks of 128 tokens for up to four requests that need one to seven, and one more as they grow: vLLM
# has to preempt.
OPTIONS: dict[str, Any] = {
    "num_gpu_blocks_override": 12,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "max_model_len": 1024,
}
BATCH = 4
TOKENS = 40


class Request(NamedTuple):
    prompt: list[int]
    abort: int | None  # after so many tokens


class Outcome(NamedTuple):
    requests: int
    aborted: int
    preempted: int
    loads: int
    loads_failed: int  # and computed instead
    reused_tokens: int
    prompt_tokens: int
    kills: int
    wrong: int
    corrupt: int
    unsettled: int  # rounds after which an engine did not come to rest
    held_bytes: int

    @property
    def good(self) -> bool:
        bad = self.wrong or self.corrupt or self.unsettled or self.held_bytes
        return not bad and self.reused_tokens > 0


def make_requests(count: int, seed: int) -> list[Request]:
    draw = random.Random(seed)
    documents = [[draw.randrange(VOCAB) for _ in range(6 * CHUNK)] for _ in range(5)]
    requests = []
    for _ in range(count):
        cut = draw.randrange(CHUNK // 2, 6 * CHUNK)
        tail = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 40))]
        abort = draw.randrange(0, TOKENS) if draw.random() < 0.15 else None
        requests.append(Request(draw.choice(documents)[:cut] + tail, abort))
    return requests


def soak(server: ServerProcess, logs: Path, *, requests: int, kills: int, seed: int) -> Outcome:
    todo = make_requests(requests, seed)
    batches = [todo[at : at + BATCH] for at in range(0, len(todo), BATCH)]
    turns = [batches[at : at + 2] for at in range(0, len(batches), 2)]
    kill_at = {len(turns) * (number + 1) // (kills + 1) for number in range(kills)}
    connector = {"socket": str(server.socket), "lookup_timeout_ms": 2000}
    counted: Counter[str] = Counter()
    with (
        VllmEngine(KIND, logs / "plain", **OPTIONS) as plain,
        VllmEngine(KIND, logs / "first", connector=connector, **OPTIONS) as first,
        VllmEngine(
            KIND, logs / "second", connector=connector, enable_prefix_caching=True, **OPTIONS
        ) as second,
    ):
        engines = [first, second]
        for engine in [plain, *engines]:
            engine.ready()
        for number, turn in enumerate(turns):
            working = list(zip(engines, turn, strict=False))
            for engine, batch in working:
                _send(engine, batch)
            if number in kill_at:
                counted["corrupt"] += server.status().counts.get("corrupt", 0)
                server.kill()  # with both of them at it
            truth = [plain.round([request.prompt for request in batch], TOKENS).tokens for batch in turn]
            for (engine, batch), right in zip(working, truth, strict=True):
                _compare(engine.receive(), batch, right, counted)
            if number in kill_at:
                server.start()
        eventually(lambda: not server.leases())
        status = server.status()
    eventually(lambda: not server.status().sessions)
    return Outcome(
        requests=len(todo),
        aborted=sum(request.abort is not None for request in todo),
        preempted=counted["preempted"],
        loads=counted["loads"],
        loads_failed=counted["loads_failed"],
        reused_tokens=counted["reused"],
        prompt_tokens=sum(len(request.prompt) for request in todo),
        kills=len(kill_at),
        wrong=counted["wrong"],
        corrupt=counted["corrupt"] + status.counts.get("corrupt", 0),
        unsettled=counted["unsettled"],
        held_bytes=sum(session.held_bytes for session in status.sessions),
    )


def _send(engine: VllmEngine, batch: list[Request]) -> None:
    aborts = {str(index): r.abort for index, r in enumerate(batch) if r.abort is not None}
    engine.send([request.prompt for request in batch], TOKENS, together=True, abort=aborts)


def _compare(
    answer: Answer, batch: list[Request], truth: list[tuple[int, ...]], counted: Counter[str]
) -> None:
    for output, right, request in zip(answer.outputs, truth, batch, strict=True):
        whole = request.abort is None
        # An aborted request may have got a token more before it was stopped, but never a different one.
        same = output.tokens == right if whole else output.tokens == right[: len(output.tokens)]
        if not same:
            counted["wrong"] += 1
            print(
                f"wrong: {len(request.prompt)} tokens, got {output.tokens}, expected {right}", file=sys.stderr
            )
        counted["reused"] += output.cached
    counted["unsettled"] += not answer.settled
    counted["preempted"] += int(answer.counters.get("vllm:num_preemptions", 0))
    for name in ("loads", "loads_failed"):
        counted[name] += int(answer.counters.get(f"vllm:kvcellar_{name}", 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder, home = Path(tempfile.mkdtemp(dir="/dev/shm")), Path(tempfile.mkdtemp())
    server = ServerProcess(home, folder)
    try:
        server.start(memory="256MiB")
        outcome = soak(server, home, requests=options.requests, kills=options.kills, seed=options.seed)
    finally:
        if server.process is not None:
            server.kill()
        shutil.rmtree(folder, ignore_errors=True)
    for name, value in outcome._asdict().items():
        print(f"{name:>14}  {value:,}")
    print(f"seed {options.seed}: {'good' if outcome.good else 'BAD'}; logs in {home}")
    sys.exit(0 if outcome.good else 1)


if __name__ == "__main__":
    main()
