"""`kvcellar bench control`: what it promises to print, and what it refuses. No figure is judged here."""

import os
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

import kvcellar
from kvcellar.bench import peers
from kvcellar.bench.control import Budget, Plan, control_table, measure, run_control
from kvcellar.bench.machine import machine
from kvcellar.errors import ConfigError

TINY = Plan(1, 5, 0.01, Budget(0.01, 3), Budget(0.01, 3), 4, 0.05, 10_000)
CASES = {f"{size}_tp{tp}" for size in ("8k", "32k", "128k") for tp in (1, 8)}


def leftovers() -> list[Path]:
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return [path for folder in folders for path in folder.glob(f"kvcellar-bench-{os.getpid()}-*")]


@pytest.fixture(scope="module")
def result():
    steps: list[str] = []
    figures = measure(TINY, steps.append)
    assert steps, "nobody was told what is going on"
    assert not leftovers()
    return {"machine": machine()} | figures


@pytest.fixture
def with_peer(result):
    times = {case: {"p50_ms": 20.0, "p99_ms": 30.0} for case in CASES}
    peer = {
        "peer": "lmcache",
        "version": "0.5.6",
        "ready_s": 2.0,
        "roundtrip_p50_us": 300.0,
        "roundtrip_p99_us": 400.0,
        "pipelined_per_s": 1000,
        "lookup": times,
        "lookup_blocking": times,
        "store_bookkeeping": times,
        "concurrent": {"p50_ms": 200.0, "p99_ms": 300.0, "lookups_per_s": 300},
    }
    return result | {"peer": peer, "ratio": peers.ratios(result, peer)}


def rendered(result) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(control_table(result))
    return captured.get()


def test_every_promised_figure_is_there(result):
    for key in ("ready_s", "roundtrip_p50_us", "roundtrip_p99_us", "bare_echo_p50_us", "pipelined_per_s"):
        assert result[key] > 0
    for key in ("lookup", "store_bookkeeping", "store_evicting"):
        assert set(result[key]) == CASES
        assert all(figures["p50_ms"] <= figures["p99_ms"] for figures in result[key].values())
    assert result["concurrent"]["clients"] == 4
    for operation in ("lookup", "store"):
        assert {"p50_ms", "p99_ms", "per_s", "client_bound"} <= set(result["concurrent"][operation])


def test_index_grows_in_ten_steps(result):
    index = result["index"]
    assert [step["objects"] for step in index["steps"]] == list(range(0, 11_000, 1000))
    assert index["bytes_per_object"] > 0
    assert index["lookup"]["128k_tp1"]["samples"] == TINY.lookup.samples


def test_table_shows_figures_and_targets(result):
    table = rendered(result)
    assert "lookup 128k TP8" in table
    assert "<= 0.5 ms" in table
    assert "lmcache" not in table


def test_table_shows_the_peer_and_ratios(with_peer):
    table = rendered(with_peer)
    assert "lmcache" in table
    assert "<= 0.5 ms, 50 x" in table
    assert with_peer["ratio"]["lookup"]["128k_tp8"] == pytest.approx(
        20 / with_peer["lookup"]["128k_tp8"]["p50_ms"], abs=0.006
    )


def test_unknown_peer_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="got 'redis', expected lmcache"):
        run_control(peer="redis")


def test_peer_without_a_checkout_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(kvcellar, "__file__", str(tmp_path / "lib/site-packages/kvcellar/__init__.py"))
    with pytest.raises(ConfigError, match="source checkout"):
        run_control(peer="lmcache")
