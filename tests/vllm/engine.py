"""A real vLLM engine behind a pipe. A program for vLLM's own interpreter; `harness.VllmEngine` drives it.

Reads one JSON line on stdin, the job:
    {"model": folder, "options": {keyword arguments of vllm.LLM}, "warm": whether to run a first request,
     "apart": whether scheduler and ranks have a process each, as vLLM has it by default,
     "ahead": whether it schedules ahead, as on GPUs (see ahead.py),
     "connector": null | {extra config of the connector}, "role": of the connector, "kv_both" if absent}
and answers {"ready": seconds, "block": tokens, "groups": [spec class names]} when it is up. Then, until end
of file, reads a round per line and answers each with one line (see `Engine.play`):
    {"prompts": [[token ids]...], "max_tokens": n, "together": false, "salt": text,
     "adapter": [name, number, folder] of a LoRA adapter for all of them,
     "abort": {index of a prompt: after n tokens}, "abort_at": {index: after n steps of the engine},
     "interrupt": {"step": n, "call": name of a method of vllm.LLM, "arguments": {}}, "settle": true}
    {"call": name of a method of vllm.LLM, "arguments": {}}

The prompts of a round go in one after the other, or all at once with "together"; the steps of "abort_at" and
"interrupt" are counted from there. A round ends when the engine has nothing left to do: inside one process
vLLM steps only while a request is unfinished, so this program steps it on, as the loop of a served engine
would, until the connector's stores have landed; and waits until the server has heard of that, if there is
one. With "settle": false it leaves the engine where vllm.LLM would.
"""

# mypy: disable-error-code="import-not-found"

import json
import os
import sys
import time
from collections import Counter
from typing import Any, TextIO

from tests.vllm.ahead import schedule_ahead

EXIT = 30  # seconds that ranks in other processes have to end; killed, they leave files in /dev/shm
SETTLE = 30.0  # seconds that the connector may keep an engine without requests stepping

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,  # or there are no metrics
    "enable_prefix_caching": False,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 256 << 20,
    "seed": 0,
}


def main() -> None:
    answers = take_stdout()
    job = json.loads(sys.stdin.readline())
    options = job["options"]
    ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    set_environment(ranks, apart=job["apart"])
    if job["ahead"]:
        schedule_ahead()
    started = time.monotonic()
    engine = Engine(job)
    if job["warm"]:
        engine.warm_up()
    _answer(answers, {"ready": time.monotonic() - started} | engine.describe())
    for line in sys.stdin:
        _answer(answers, engine.play(json.loads(line)))
    engine.core.engine_core.shutdown(timeout=EXIT)
    os._exit(0)  # taking the interpreter down by the book adds seconds to every test


def take_stdout() -> TextIO:
    """Keep stdout for answers only: whatever else the process and its children print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def set_environment(ranks: int, *, apart: bool = False) -> None:
    """Before vLLM or torch is imported; children inherit it."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if not apart:
        # The scheduler is in this process, and so is the only rank; more are forked. Four times as fast.
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    if ranks == 1:
        # One thread: the models are tiny, and threads that spin for each other on cores shared with another
        # engine made a round take ten times as long.
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    else:
        bind = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": bind, "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": str(EXIT)}
        # Ranks that wait spin with sched_yield, one on every core, and Linux 6.18 then lets others
        # starve for up to four seconds: the server answered too late for stores. Idle ones step aside.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class Engine:
    """One vllm.LLM, driven request by request so that requests can be aborted."""

    def __init__(self, job: dict[str, Any]) -> None:
        import vllm  # noqa: PLC0415 -- only after the environment is set
        import vllm.config  # noqa: PLC0415
        import vllm.lora.request  # noqa: PLC0415

        options = DEFAULTS | job["options"]
        if job.get("connector") is not None:
            options["kv_transfer_config"] = vllm.config.KVTransferConfig(
                kv_connector="KVCellarConnector",
                kv_connector_module_path="kvcellar.vllm",
                kv_role=job.get("role", "kv_both"),
                kv_connector_extra_config=job["connector"],
            )
        self.vllm = vllm
        self.lora = vllm.lora.request
        self.llm = vllm.LLM(job["model"], **options)
        self.core = self.llm.llm_engine
        # The loop and its scheduler, where this process has them.
        loop = getattr(self.core.engine_core, "engine_core", None)
        self.scheduler = getattr(loop, "scheduler", None)
        is_ahead = getattr(loop, "batch_queue", None) is not None
        assert is_ahead or not job["ahead"], "it does not schedule ahead"
        self.requests = 0
        self.steps = 0
        self.results: list[Any] = []  # of the calls inside this round
        self.fetched = 0  # loads that the connector's scheduler side told vLLM of
        self.cellar = None  # the connector's options
        if job.get("connector") is not None:
            from kvcellar.vllm.options import read_options  # noqa: PLC0415 -- imports vLLM

            self.cellar = read_options(self.core.vllm_config)
            self._count_fetched()

    def _count_fetched(self) -> None:
        from kvcellar.vllm.near import Landed  # noqa: PLC0415 -- imports vLLM

        fetch = Landed.fetch

        def counting(landed: Landed) -> set[str]:
            found = fetch(landed)
            self.fetched += len(found)
            return found

        Landed.fetch = counting  # type: ignore[method-assign,assignment]

    def warm_up(self) -> None:
        """A first request, shorter than any block: it compiles kernels and caches nothing."""
        self._serve([[0, 1]], {"max_tokens": 2}, 0)

    def describe(self) -> dict[str, Any]:
        """What vLLM made of the options. Groups are known only in this process."""
        groups = self.scheduler.kv_cache_config.kv_cache_groups if self.scheduler else []
        return {
            "block": self.core.vllm_config.cache_config.block_size,
            "groups": [type(group.kv_cache_spec).__name__ for group in groups],
        }

    def play(self, round_: dict[str, Any]) -> dict[str, Any]:
        if "call" in round_:
            return {"result": self._call(round_)}
        before = self._counters()
        started, steps, fetched = time.monotonic(), self.steps, self.fetched
        self.results = []
        prompts = round_["prompts"]
        batches = [prompts] if round_.get("together") else [[prompt] for prompt in prompts]
        outputs: list[dict[str, Any]] = []
        for batch in batches:
            outputs += self._serve(batch, round_, len(outputs))
        seconds = time.monotonic() - started
        settled = self._settle() if round_.get("settle", True) else None
        return {
            "outputs": outputs,
            "counters": dict(self._counters() - before),
            "seconds": seconds,
            "steps": self.steps - steps,
            "fetched": self.fetched - fetched,
            "results": self.results,
            "settled": settled,
        }

    def _call(self, what: dict[str, Any]) -> Any:
        """The result of a method of vllm.LLM, or what it raised."""
        try:
            return getattr(self.llm, what["call"])(**what.get("arguments", {}))
        except Exception as error:  # noqa: BLE001 - the test says what it expects
            return f"{type(error).__name__}: {error}"

    def _serve(self, prompts: list[list[int]], round_: dict[str, Any], first: int) -> list[dict[str, Any]]:
        """Run the prompts at once to their ends. `first`: the index of the first in its round."""
        names = {f"request-{self.requests + i}": i for i in range(len(prompts))}
        self.requests += len(prompts)
        outputs: list[dict[str, Any]] = [
            {"tokens": [], "cached": 0, "finish": "abort", "first": None, "stage": ""} for _ in prompts
        ]
        limits = [round_.get("abort", {}).get(str(first + i), sys.maxsize) for i in range(len(prompts))]
        sampling = self.vllm.SamplingParams(
            temperature=0, max_tokens=round_["max_tokens"], ignore_eos=True, detokenize=False
        )
        salt = {"cache_salt": round_["salt"]} if round_.get("salt") else {}
        adapter = self.lora.LoRARequest(*round_["adapter"]) if "adapter" in round_ else None
        started, steps = time.monotonic(), self.steps
        for name, i in names.items():
            prompt = {"prompt_token_ids": prompts[i]} | salt
            self.core.add_request(name, prompt, sampling, lora_request=adapter)
        self.core.abort_request([name for name, i in names.items() if limits[i] == 0])
        while True:
            self._interrupt(round_, names, outputs, first, self.steps - steps)
            if not self.core.has_unfinished_requests():
                return outputs
            stepped = self._step()
            for output in stepped:
                i = names[output.request_id]
                _note(outputs[i], output, time.monotonic() - started)
                if not output.finished and len(outputs[i]["tokens"]) >= limits[i]:
                    self.core.abort_request([output.request_id])
            if not stepped:
                time.sleep(0.001)  # as vLLM's own loop does when it waits for a load

    def _interrupt(
        self,
        round_: dict[str, Any],
        names: dict[str, int],
        outputs: list[dict[str, Any]],
        first: int,
        step: int,
    ) -> None:
        """What the round wants done after this step."""
        aborts = round_.get("abort_at", {})
        for name, i in names.items():
            if aborts.get(str(first + i)) == step:
                outputs[i]["stage"] = self._stage(name)
                self.core.abort_request([name])
        if round_.get("interrupt", {}).get("step") == step:
            self.results.append(self._call(round_["interrupt"]))

    def _stage(self, name: str) -> str:
        """Where a request is; vLLM gives it a longer name inside."""
        assert self.scheduler is not None
        known = [r for key, r in self.scheduler.requests.items() if key.startswith(f"{name}-")]
        storing = " and storing" if self.scheduler.connector.has_pending_push_work() else ""
        if not known:
            return "over" + storing
        if known[0].status.name != "RUNNING":
            return str(known[0].status.name).lower() + storing
        computed = known[0].num_computed_tokens >= known[0].num_prompt_tokens
        return ("decoding" if computed else "computing") + storing

    def _step(self) -> Any:
        self.steps += 1
        return self.core.step()

    def _settle(self) -> bool | None:
        """Step until nothing is left to do; False if that takes too long, None if another process steps."""
        deadline = time.monotonic() + SETTLE
        while (busy := self.scheduler is not None and self.scheduler.has_requests()) or self._is_owing():
            if time.monotonic() > deadline:
                return False
            if busy:
                self._step()
            time.sleep(0.001)
        return None if self.scheduler is None else True

    def _is_owing(self) -> bool:
        """Is the server still to hear of something? Ranks tell it from threads of their own."""
        if self.cellar is None:
            return False
        from kvcellar.client import AdminClient  # noqa: PLC0415 -- numpy, only after the environment is set
        from kvcellar.errors import CellarError  # noqa: PLC0415

        try:
            with AdminClient(self.cellar.socket) as admin:
                sessions = admin.status().sessions
        except CellarError:
            return False  # it is away
        return any(one.leases for one in sessions if one.name == self.cellar.session)

    def _counters(self) -> Counter[str]:
        """Every counter of vLLM's metrics, over all labels."""
        counters: Counter[str] = Counter()
        for metric in self.llm.get_metrics():
            if type(metric).__name__ == "Counter":
                counters[metric.name] += metric.value
        return counters


def _note(entry: dict[str, Any], output: Any, seconds: float) -> None:
    """Add what a step said of one request to its entry."""
    completion = output.outputs[0]
    entry["tokens"] = list(completion.token_ids)
    entry["cached"] = output.num_cached_tokens or 0
    if entry["first"] is None:
        entry["first"] = seconds
    if output.finished:
        entry["finish"] = completion.finish_reason


if __name__ == "__main__":
    main()
