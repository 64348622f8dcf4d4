"""Engines that take turns: who is asked when, and that a mode which fails or hangs costs nobody else.

Processes, commands, deadlines and KVCellar's server are real. Only vLLM is a stand-in: its faults have to
come when they are asked for.
"""

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import turns
from bench.gpu.scale import SMALL
from tests.server.engine import eventually

WARM_UP = 7  # requests

ENGINE = """
import os, time, types, zlib
from prometheus_client import LOADED

class SamplingParams:
    def __init__(self, max_tokens, **_):
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, kv_transfer_config, **_):
        self.mode, self.requests = "kvcellar" if kv_transfer_config else "recompute", 0
        self.llm_engine = Core(self)
        self.fail("start")

    def fail(self, when):
        if os.environ["FAULT"] == f"{self.mode} fails at {when}":
            raise RuntimeError("as asked")
        if os.environ["FAULT"] == f"{self.mode} hangs at {when}":
            time.sleep(1000)

    def note(self, prompt):
        with open(os.environ["REQUESTS"], "a") as file:
            print(os.getpid(), self.mode, len(prompt), zlib.crc32(repr(prompt).encode()), file=file)

    def generate(self, prompts, *_, **__):
        prompt = prompts[0]["prompt_token_ids"]
        if not self.llm_engine.idle:
            raise RuntimeError("is it done with the request before?")
        self.llm_engine.idle = False
        self.requests += 1
        self.note(prompt)
        self.fail(self.requests)
        told = types.SimpleNamespace(logprobs=None, token_ids=[1])
        return [types.SimpleNamespace(outputs=[told], num_cached_tokens=len(prompt))]

    def reset_prefix_cache(self):
        return True

class Core:
    # Decodes a token of each request in every step.

    def __init__(self, llm):
        self.llm, self.left, self.steps, self.idle = llm, {}, 0, False

    def is_sleeping(self):
        self.idle = True
        return False

    def add_request(self, name, prompt, params):
        self.llm.note(prompt["prompt_token_ids"])
        self.llm.fail("decoding")
        self.left[name] = params.max_tokens
        LOADED.samples[0].value += len(prompt["prompt_token_ids"]) * (params.max_tokens == 1)

    def step(self):
        time.sleep(0.002)
        outputs, running = [], list(self.left.items())
        self.steps += 1
        if os.environ["FAULT"] == f"{self.llm.mode} preempts" and self.steps % 2:
            running = running[1:]
        for name, left in running:
            told = types.SimpleNamespace(token_ids=[1])
            outputs.append(types.SimpleNamespace(
                request_id=name, finished=left == 1, outputs=[told], num_cached_tokens=0))
            self.left[name] -= 1
        self.left = {name: left for name, left in self.left.items() if left}
        return outputs

    def has_unfinished_requests(self):
        return bool(self.left)

    def abort_request(self, names):
        for name in names:
            self.left.pop(name, None)
"""

METRICS = """
import types

LOADED = types.SimpleNamespace(
    samples=[types.SimpleNamespace(name="vllm:external_prefix_cache_hits_total", value=0.0)])
REGISTRY = types.SimpleNamespace(collect=lambda: [LOADED])
"""


class Bench:
    """Two modes; of ttft, two lengths, three rounds each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.requests, self.out = folder / "requests", folder / "run.json"
        self.kept: list[dict[str, dict]] = []

    def measure(self, part: str = "ttft", rounds: int = 1) -> dict[str, dict]:
        end, out = time.monotonic() + 300, self._folder / "o.json"
        run = turns.Run(SMALL, "llama8b", part, small=True, out=out, rounds=rounds, end=end)
        return turns.measure(run, ["recompute", "kvcellar"], self._keep)

    def _keep(self, found: dict[str, dict]) -> None:
        """As a file would: what comes later changes nothing."""
        self.kept.append(json.loads(json.dumps(found)))

    def prove(self) -> subprocess.Popen[bytes]:
        """The program itself, with no more than one length."""
        command = [sys.executable, "-m", "bench.gpu.prove", "ttft", "--small", "--lengths", "512"]
        command += ["--modes", "recompute", "kvcellar", "--out", str(self.out)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def asked(self) -> list[tuple[str, int, str]]:
        """Since all are warmed up: mode, tokens, prompt."""
        lines = [line.split() for line in self.requests.read_text().splitlines()]
        return [(mode, int(tokens), prompt) for _, mode, tokens, prompt in lines[2 * WARM_UP :]]

    def engines(self) -> set[int]:
        return {int(line.split()[0]) for line in self.requests.read_text().splitlines()}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    engine = tmp_path / "site" / "vllm"
    engine.mkdir(parents=True)
    (engine / "__init__.py").write_text(ENGINE)
    (engine / "config.py").write_text("import types\nKVTransferConfig = types.SimpleNamespace\n")
    (engine.parent / "prometheus_client.py").write_text(METRICS)
    (engine / "sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 1\n")
    monkeypatch.setenv("PYTHONPATH", str(engine.parent))
    monkeypatch.setenv("REQUESTS", str(tmp_path / "requests"))
    monkeypatch.setenv("FAULT", "none")
    monkeypatch.setattr(turns, "_MORE", {"ttft": 3, "cold": 4})
    bench = Bench(tmp_path)
    yield bench
    assert not [pid for pid in bench.engines() if Path(f"/proc/{pid}").exists()]


def test_of_cold_prompts_every_mode_is_asked_the_same_and_nothing_twice(bench):
    found = bench.measure("cold")
    asked = bench.asked()
    assert [mode for mode, _, _ in asked] == ["recompute", "kvcellar", "kvcellar", "recompute"] * 4
    for (_, *one), (_, *other) in zip(asked[::2], asked[1::2], strict=True):
        assert one == other
    assert len({prompt for _, _, prompt in asked}) == len(asked) / 2
    for its in found.values():
        assert [row["tokens"] for row in its["cold"]] == list(SMALL.lengths)
        assert [len(row["times"]["cold"]) for row in its["cold"]] == [4, 4]
        assert "rows" not in its


def test_long_prompts_have_fewer_rounds_and_are_not_passed_over(bench, monkeypatch):
    monkeypatch.setattr(turns, "_SHORT", SMALL.lengths[1])
    for its in bench.measure("cold").values():
        rounds = [(row["tokens"], len(row["times"]["cold"])) for row in its["cold"]]
        assert rounds == [(SMALL.lengths[0], 4), (SMALL.lengths[1], 1)]


def test_all_lengths_come_again_and_again_so_that_none_is_lost_where_time_is_short(bench, monkeypatch):
    short, long = SMALL.lengths
    monkeypatch.setattr(turns, "_SHORT", long)
    found = bench.measure("cold", rounds=2)
    assert [tokens for _, tokens, _ in bench.asked()[::2]] == ([short] * 4 + [long]) * 2
    for its in found.values():
        assert [(row["tokens"], len(row["times"]["cold"])) for row in its["cold"]] == [(short, 8), (long, 2)]


def test_a_program_that_is_told_to_end_takes_engines_and_servers_along_and_leaves_what_it_has(
    bench, monkeypatch
):
    monkeypatch.setenv("FAULT", f"kvcellar hangs at {WARM_UP + 5}")
    with bench.prove() as program:
        hung = "kvcellar 512"
        eventually(lambda: bench.requests.exists() and bench.requests.read_text().count(hung) == 5, 60)
        memory = Path(f"/dev/shm/kvcellar-bench-{program.pid}")
        assert memory.exists()
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) == 128 + signal.SIGTERM
    assert not memory.exists()
    rounds = {
        entry["mode"]: len(entry["rows"][0]["times"]["cold"]) for entry in json.loads(bench.out.read_text())
    }
    assert rounds == {"recompute": 1, "kvcellar": 1}


def test_every_round_goes_through_all_modes_with_the_same_prompt(bench):
    found = bench.measure()
    computed, loaded = (["recompute"] * 4, ["kvcellar"] * 4)
    asked = bench.asked()
    modes = computed + loaded + loaded + computed + computed + loaded
    assert [mode for mode, _, _ in asked] == modes * 2
    for start in range(0, len(asked), 8):
        assert len({prompt for _, _, prompt in asked[start : start + 8]}) == 1
    assert len({prompt for _, _, prompt in asked}) == 6
    for its in found.values():
        assert [(row["tokens"], len(row["times"]["cold"])) for row in its["rows"]] == [(512, 3), (1024, 3)]
        assert all("of_recompute" in row and "kept" in row for row in its["rows"])
        assert "errors" not in its
    kept = [[len(row["times"]["cold"]) for row in its["kvcellar"]["rows"]] for its in bench.kept]
    assert kept == [[1], [2], [3], [3, 1], [3, 2], [3, 3]]


def test_interference_takes_turns_too(bench):
    found = bench.measure("interference")
    decoding = [(mode, prompt) for mode, tokens, prompt in bench.asked() if tokens == 100]
    in_turn = [(mode, len(list(its))) for mode, its in itertools.groupby(mode for mode, _ in decoding)]
    each = SMALL.decoders  # of four rounds; in the last one also beside stores
    turns_of_each = [("recompute", 1), ("kvcellar", 2), ("recompute", 2), ("kvcellar", 3), ("recompute", 2)]
    assert in_turn == [(mode, each * times) for mode, times in turns_of_each]
    mine, others = ({one for mode, one in decoding if mode == whose} for whose in ("recompute", "kvcellar"))
    assert mine == others
    assert len(mine) == each * 5
    pairs = {mode: [list(one) for one in its["interference"]["pairs"]] for mode, its in found.items()}
    stores = [["alone", "stores"]] * 2
    assert pairs["recompute"] == [["alone"]] * 8 + stores
    assert pairs["kvcellar"] == [["alone", "loads"]] * 8 + stores
    assert found["kvcellar"]["interference"]["stores"]["asked"] == 2
    loads = found["kvcellar"]["interference"]["loads"]
    assert loads["answered"] == loads["asked"] > 0
    assert loads["loaded"] == SMALL.loaded
    assert loads["preempted"] == 0
    assert not any("errors" in its for its in found.values())
    assert [len(its["kvcellar"]["interference"]["pairs"]) for its in bench.kept] == [2, 4, 6, 10]


def test_requests_that_do_not_decode_as_the_others_do_are_counted(bench, monkeypatch):
    monkeypatch.setenv("FAULT", "recompute preempts")
    found = {mode: its["interference"] for mode, its in bench.measure("interference").items()}
    each = [one["alone"]["preempted"] for one in found["recompute"]["pairs"]]
    assert len(each) == 10
    assert set(each) <= {0, 1}  # 0: a spell in which the machine did not get so far
    assert found["recompute"]["alone"]["preempted"] == sum(each) > 0
    assert found["kvcellar"]["alone"]["preempted"] == 0


def test_a_mode_that_fails_in_interference_is_out_and_the_other_goes_on(bench, monkeypatch):
    monkeypatch.setenv("FAULT", "kvcellar fails at decoding")
    found = bench.measure("interference")
    assert found["kvcellar"]["errors"] == {"interference": "RuntimeError: as asked"}
    assert "interference" not in found["kvcellar"]
    assert len(found["recompute"]["interference"]["pairs"]) == 10
    assert "errors" not in found["recompute"]


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_mode_that_does_so_in_a_round_is_left_out_and_the_other_goes_on(bench, monkeypatch, how):
    monkeypatch.setenv("FAULT", f"kvcellar {how} at {WARM_UP + 5}")
    monkeypatch.setattr(turns, "ROUND_S", 10.0)
    found = bench.measure()
    told = {"fails": "RuntimeError: as asked", "hangs": "no end within 10 s"}[how]
    assert found["kvcellar"]["errors"]["ttft"] == told
    (row,) = found["kvcellar"]["rows"]
    assert len(row["times"]["warm"]) == 1
    assert [mode for mode, _, _ in bench.asked()].count("kvcellar") == 5
    assert [len(row["times"]["cold"]) for row in found["recompute"]["rows"]] == [3, 3]
    assert "errors" not in found["recompute"]


def test_a_mode_whose_engine_does_not_come_up_is_reported_and_the_other_goes_on(bench, monkeypatch):
    monkeypatch.setenv("FAULT", "recompute fails at start")
    found = bench.measure()
    assert found["recompute"]["errors"]["ttft"] == "ended with 1"
    assert "rows" not in found["recompute"]
    assert [len(row["times"]["kept"]) for row in found["kvcellar"]["rows"]] == [3, 3]
    assert "of_recompute" not in found["kvcellar"]["rows"][0]


def test_when_the_time_is_over_what_was_measured_stays(bench, monkeypatch):
    monkeypatch.setattr(turns, "CLOSING_S", 1000.0)
    found = bench.measure("interference")
    for its in found.values():
        assert its["errors"] == {"interference": "no time left for round 1 of interference"}
        assert its["engine_s"] >= 0
