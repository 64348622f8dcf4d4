"""One vLLM engine for the GPU benches, and the server that its mode needs.

Modes: `recompute` (no connector), `nothing` (a connector that does nothing), and caches: `kvcellar`,
`offload` (vLLM's OffloadingConnector), `lmcache` (LMCache's multiprocess server and connector).
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.scale import Scale

MODES = ("recompute", "nothing", "kvcellar", "offload", "lmcache")
CACHES = MODES[2:]
LMCACHE_PORT = 5555
READY_S = 90.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "PYTHONUNBUFFERED": "1",
}


class Backing(NamedTuple):
    """The server of a mode, if it has one, and what vLLM is told of it."""

    command: list[str] | None
    address: Path | tuple[str, int] | None
    transfer: dict[str, Any] | None
    memory: Path | None  # the folder of its shared memory


def backing(mode: str, folder: Path, gib: int, *, several_groups: bool) -> Backing:
    if mode == "kvcellar":
        path, memory = folder / "cellar.sock", Path(f"/dev/shm/kvcellar-bench-{os.getpid()}")
        serve = [sys.executable, "-m", "kvcellar", "serve", "--memory", f"{gib}GiB"]
        # The one engine may hold more than its share: two loads of the longest prompt, as with its peers.
        serve += ["--socket", str(path), "--folder", str(memory), "--hold-percent", "75"]
        name = "KVCellarHybridConnector" if several_groups else "KVCellarConnector"
        transfer = _transfer(name, {"socket": str(path), "require": True}, "kvcellar.vllm")
        return Backing(serve, path, transfer, memory)
    if mode == "offload":
        size = {"cpu_bytes_to_use": gib << 30, "num_cpu_blocks": gib * 400}
        return Backing(None, None, _transfer("OffloadingConnector", size), None)
    if mode == "lmcache":
        serve = [sys.executable, "-m", "lmcache.cli.main", "server", "--l1-size-gb", str(gib)]
        serve += ["--eviction-policy", "LRU", "--max-workers", "4", "--port", str(LMCACHE_PORT)]
        where = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": LMCACHE_PORT}
        module = "lmcache.integration.vllm.lmcache_mp_connector"
        transfer = _transfer("LMCacheMPConnector", where, module)
        return Backing(serve, ("127.0.0.1", LMCACHE_PORT), transfer, None)
    if mode == "nothing":
        return Backing(None, None, _transfer("NothingConnector", {}, "bench.gpu.nothing"), None)
    return Backing(None, None, None, None)


def _transfer(name: str, extra: dict[str, Any], module: str | None = None) -> dict[str, Any]:
    where = {"kv_connector_module_path": module} if module else {}
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra} | where


@contextlib.contextmanager
def server(back: Backing, log: Path) -> Iterator[subprocess.Popen[bytes] | None]:
    """From when it answers to when it and its memory are gone."""
    if back.command is None:
        yield None
        return
    with log.open("wb") as out:
        process = subprocess.Popen(
            back.command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | ENVIRONMENT,
        )
    try:
        _wait_for(back.address, process, log)
        yield process
    finally:
        end(process)
        if back.memory is not None:
            shutil.rmtree(back.memory, ignore_errors=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop it and whatever it has started: nicely, then not. When it returns, their GPU memory is free."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and _alive(process.pid):
            process.poll()
            time.sleep(0.05)
    process.wait(10)


def _alive(group: int) -> bool:
    """Whether anybody of a process group has not ended; who has, but was not waited for, does not count."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its = path.read_text().rpartition(") ")[2].split()[:3]
            if int(its) == group and state not in "ZX":
                return True
    return False


def _wait_for(address: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket(family) as sock, contextlib.suppress(OSError):
            sock.connect(str(address) if isinstance(address, Path) else address)
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server is not up; its log:\n{log.read_text(errors='replace')[-2000:]}")


class Answer(NamedTuple):
    ms: float
    cached: int  # tokens
    tokens: list[int]
    best: list[tuple[float, float]]  # log-probability of the token, and by how much the next is worse


class Engine:
    """Stock vLLM, with the weights of weights.py."""

    def __init__(
        self, scale: Scale, model: str, folder: Path, transfer: dict[str, Any] | None, **options: Any
    ) -> None:
        from vllm import LLM  # noqa: PLC0415 - after the environment is set
        from vllm.config import KVTransferConfig  # noqa: PLC0415

        (folder / model).mkdir(exist_ok=True)
        (folder / model / "config.json").write_text(json.dumps(scale.config(model)))
        self.scale, self.model = scale, model
        self.llm = LLM(
            model=str(folder / model),
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
            **scale.options(model) | options,
        )
        self._random = random.Random(7)

    def prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(10, self.scale.vocabulary) for _ in range(tokens)]

    def run(self, prompt: list[int], tokens: int = 1, *, logprobs: int | None = None) -> Answer:
        from vllm import SamplingParams  # noqa: PLC0415

        greedy = SamplingParams(
            max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True, logprobs=logprobs
        )
        self.idle()
        start = time.perf_counter()
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        elapsed = (time.perf_counter() - start) * 1e3
        told = output.outputs[0]
        best = [_best(place) for place in told.logprobs or []]
        return Answer(elapsed, output.num_cached_tokens or 0, list(told.token_ids), best)

    def idle(self) -> None:
        """Wait until it is done with what it was asked before: it tidies up after its answer."""
        self.llm.llm_engine.is_sleeping()  # answered in turn

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, so that KV must come from elsewhere."""
        deadline = time.monotonic() + 20
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise RuntimeError("vLLM does not reset its prefix cache: something still holds blocks")
            time.sleep(0.02)


def _best(place: dict[int, Any]) -> tuple[float, float]:
    first, second = sorted((entry.logprob for entry in place.values()), reverse=True)[:2]
    return first, first - second
