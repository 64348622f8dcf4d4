"""A stock vLLM engine, as its user has it: `vllm serve` with the connector's line, asked over HTTP.

Does not import vLLM, which lives in an environment of its own.
"""

import http.client
import json
import random
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from programs import DemoError, Programs

_START_S, _ANSWER_S = 300.0, 180.0
_HOST, _JSON = "127.0.0.1", {"Content-Type": "application/json"}
ANSWER_TOKENS = 16


def serve_command(vllm: Path, model: Path, transfer: str, tokens: int, cores: str) -> list[str | Path]:
    """vllm serve MODEL --kv-transfer-config ..., and what makes it fit a small machine and the story."""
    environment = [
        "HF_HUB_OFFLINE=1",  # the model is a folder: nothing is asked for
        "VLLM_NO_USAGE_STATS=1",  # and nothing reported
        f"VLLM_CPU_OMP_THREADS_BIND={cores}",
    ]
    flags = f"--host {_HOST} --served-model-name demo --dtype float32 --enforce-eager"
    flags += f" --max-model-len {tokens} --max-num-seqs 4 --kv-cache-memory-bytes 128M"
    flags += " --skip-tokenizer-init"  # prompts are token ids
    # So that whatever is reused came from KVCellar, and so that the answer says how much it was.
    flags += " --no-enable-prefix-caching --enable-prompt-tokens-details"
    return ["env", *environment, vllm, "serve", model, *flags.split(), "--kv-transfer-config", transfer]


class Answer(NamedTuple):
    first_token_s: float
    tokens: tuple[int, ...]
    prompt_tokens: int
    reused: int  # prompt tokens that were not computed


def transfer_config(server_socket: Path) -> str:
    """The README's line, where the server is, since the demo's has a socket of its own, and more patience:
    two cores are few for two engines and a server.
    """
    config = {
        "kv_connector": "KVCellarConnector",
        "kv_connector_module_path": "kvcellar.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": str(server_socket), "lookup_timeout_ms": 5000},
    }
    return json.dumps(config, separators=(",", ":"))


class Engine:
    """Starting returns at once, so that several can start side by side; `wait_ready` waits."""

    def __init__(self, name: str, programs: Programs, command: Sequence[str | Path], log: Path) -> None:
        """The command has everything but the port."""
        self.name = name
        self._port = _free_port()
        self._program = programs.start([*command, "--port", str(self._port)], log)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while not self._is_healthy():
            if self._program.has_ended():
                raise DemoError(f"Engine {self.name} did not start.", self._program.log)
            if time.monotonic() > deadline:
                raise DemoError(f"Engine {self.name} is not up after {_START_S:.0f} s.", self._program.log)
            time.sleep(0.1)

    def ask(self, prompt: list[int]) -> Answer:
        """Greedy tokens, streamed, so that the first one can be timed."""
        try:
            return self._ask(prompt)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise DemoError(f"Engine {self.name} did not answer: {error}", self._program.log) from None

    def _ask(self, prompt: list[int]) -> Answer:
        request = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=_ANSWER_S)
        started = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(request), _JSON)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(response.read(500).decode(errors="replace"))
        first, tokens, usage = 0.0, list[int](), dict[str, Any]()
        for event in _events(response):
            for choice in event["choices"]:
                tokens += choice["token_ids"] or []
            if tokens:
                first = first or time.perf_counter() - started
            usage = event.get("usage") or usage
        connection.close()
        if len(tokens) < ANSWER_TOKENS or not usage:
            raise ValueError("the stream ended early")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answer(first, tuple(tokens), usage["prompt_tokens"], cached)

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=5.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            if "choices" not in event:
                raise ValueError(line.decode(errors="replace"))
            yield event


def _free_port() -> int:
    """Below those that Linux gives to outgoing connections: vLLM takes it only half a minute later."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe:
            if probe.connect_ex((_HOST, port)):
                return port
    raise DemoError("No free port from 20000 to 30000.")
