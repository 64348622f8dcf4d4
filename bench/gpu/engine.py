"""One vLLM engine for the GPU benches, in a process of its own: what a mode needs, started and stopped.

Modes: `recompute` (no connector), `kvcellar`, `offload` (vLLM's OffloadingConnector), `lmcache` (LMCache's
multiprocess server and connector).
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.shapes import CONFIGS

MODES = ("recompute", "kvcellar", "offload", "lmcache")
CACHE_GIB = 32
LMCACHE_PORT = 5555
READY_S = 120.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


class Backing(NamedTuple):
    """The server of a mode, if it has one, and what vLLM is told of it."""

    command: list[str] | None
    address: Path | tuple[str, int] | None
    transfer: dict[str, Any] | None


def backing(mode: str, folder: Path, *, several_groups: bool) -> Backing:
    if mode == "kvcellar":
        path = folder / "cellar.sock"
        serve = [sys.executable, "-m", "kvcellar", "serve", "--memory", f"{CACHE_GIB}GiB"]
        serve += ["--socket", str(path), "--folder", f"/dev/shm/kvcellar-bench-{os.getpid()}"]
        name = "KVCellarHybridConnector" if several_groups else "KVCellarConnector"
        return Backing(
            serve,
            path,
            {
                "kv_connector": name,
                "kv_connector_module_path": "kvcellar.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"socket": str(path)},
            },
        )
    if mode == "offload":
        size = {"cpu_bytes_to_use": CACHE_GIB << 30, "num_cpu_blocks": CACHE_GIB * 400}
        return Backing(
            None,
            None,
            {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": size},
        )
    if mode == "lmcache":
        serve = [sys.executable, "-m", "lmcache.cli.main", "server", "--l1-size-gb", str(CACHE_GIB)]
        serve += ["--eviction-policy", "LRU", "--max-workers", "4", "--port", str(LMCACHE_PORT)]
        where = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": LMCACHE_PORT}
        return Backing(
            serve,
            ("127.0.0.1", LMCACHE_PORT),
            {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                "kv_connector_extra_config": where,
            },
        )
    return Backing(None, None, None)


@contextlib.contextmanager
def server(back: Backing, log: Path) -> Iterator[subprocess.Popen[bytes] | None]:
    if back.command is None:
        yield None
        return
    with log.open("wb") as out:
        process = subprocess.Popen(back.command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait_for(back.address, process, log)
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _wait_for(address: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket(family) as sock, contextlib.suppress(OSError):
            sock.connect(str(address) if isinstance(address, Path) else address)
            return
        time.sleep(0.05)
    sys.exit(f"the server is not up; its log:\n{log.read_text()[-2000:]}")


class Engine:
    """Stock vLLM with random weights."""

    def __init__(self, model: str, transfer: dict[str, Any] | None, **options: Any) -> None:
        from vllm import LLM  # noqa: PLC0415 - after the environment is set
        from vllm.config import KVTransferConfig  # noqa: PLC0415

        folder = Path(tempfile.gettempdir()) / f"kvcellar-bench-{model}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIGS[model]))
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 66_000,
            "gpu_memory_utilization": 0.6,
            "enable_prefix_caching": True,
            "max_num_batched_tokens": 16_384,
            "disable_log_stats": False,
        }
        self.llm = LLM(
            model=str(folder),
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
            **settings | options,
        )
        self._random = random.Random(7)

    def prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(10, 100_000) for _ in range(tokens)]

    def run(self, prompt: list[int], tokens: int = 1) -> tuple[float, int, list[int]]:
        """Milliseconds, tokens that were cached, and the tokens that came out."""
        from vllm import SamplingParams  # noqa: PLC0415

        greedy = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        start = time.perf_counter()
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        elapsed = (time.perf_counter() - start) * 1e3
        return elapsed, output.num_cached_tokens or 0, list(output.outputs[0].token_ids)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, so that KV must come from elsewhere."""
        deadline = time.monotonic() + 20
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                sys.exit("vLLM does not reset its prefix cache: something still holds blocks")
            time.sleep(0.02)
