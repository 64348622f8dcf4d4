"""Time to first token of real vLLM on a GPU, with KV computed, still there, or from a cache, side by side.

    python bench/gpu/ttft.py recompute kvcellar offload lmcache --model llama8b --out ttft.json

Each mode is a fresh engine. Per prompt length, medians of --rounds: `cold` (never seen), `warm` (vLLM's own
prefix cache emptied, so KV comes through the connector) and `kept` (still on the GPU, which nothing outside
can beat). floor = kept + bytes of KV / what the bus reaches; a mode's own figures of the same run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu.engine import ENVIRONMENT, MODES, Engine, backing, server
from bench.gpu.shapes import CONFIGS, kv_bytes

REST_S = 12.0
LENGTHS = (2_048, 8_192, 32_768, 64_000)


def bus_rate() -> float:
    """Bytes per second from page-locked memory to the GPU."""
    import torch  # noqa: PLC0415 - in the child only

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
    del host, device
    torch.cuda.empty_cache()
    return statistics.median(rates)


def measure_mode(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    rate = bus_rate()
    with tempfile.TemporaryDirectory(prefix="kvcellar-bench-") as name:
        back = backing(mode, Path(name), several_groups=args.model == "hybrid")
        begun = time.monotonic()
        with server(back, Path(name) / "server.log"):
            up = time.monotonic() - begun
            engine = Engine(args.model, back.transfer)
            result: dict[str, Any] = {
                "mode": mode,
                "model": args.model,
                "bus_gbps": rate / 1e9,
                "server_s": up,
            }
            warm_up(engine)
            result["rows"] = [measure_length(engine, tokens, args, rate) for tokens in args.lengths]
            if args.prompts:
                result["equal"] = compare_tokens(engine, args.prompts)
    return result


def warm_up(engine: Engine) -> None:
    """Kernels are compiled, memory is mapped and page-locked: every mode is measured as it runs for days."""
    for _ in range(3):
        prompt = engine.prompt(4_000)
        engine.run(prompt), time.sleep(0.5), engine.forget(), engine.run(prompt)
    engine.run(engine.prompt(64_000))
    time.sleep(REST_S)


def measure_length(engine: Engine, tokens: int, args: argparse.Namespace, rate: float) -> dict[str, Any]:
    times: dict[str, list[float]] = {"cold": [], "warm": [], "kept": []}
    cached, same = [], []
    for _ in range(args.rounds * (3 if tokens < 10_000 else 1)):  # short ones are noisy
        prompt = engine.prompt(tokens)
        engine.forget()
        cold, _, computed = engine.run(prompt)
        time.sleep(args.settle)
        engine.forget()
        warm, hit, loaded = engine.run(prompt)
        kept, _, _ = engine.run(prompt)
        for name, value in zip(times, (cold, warm, kept), strict=True):
            times[name].append(value)
        cached.append(hit)
        same.append(computed == loaded)
    row: dict[str, Any] = {name: statistics.median(values) for name, values in times.items()}
    row |= {"tokens": tokens, "cached": cached, "same": all(same), "times": times}
    row["floor"] = row["kept"] + kv_bytes(args.model, tokens) / rate * 1e3
    print("ROW", json.dumps(row), flush=True)
    return row


def compare_tokens(engine: Engine, count: int) -> dict[str, Any]:
    """Greedy tokens of prompts around every border, computed and loaded."""
    prompts = [engine.prompt(300 + 97 * number) for number in range(count)]
    prompts += [prompts[number][:200] + engine.prompt(150) for number in range(0, count, 4)]
    engine.forget()
    computed = [engine.run(prompt, 16)[2] for prompt in prompts]
    time.sleep(1)
    engine.forget()
    loaded = [engine.run(prompt, 16) for prompt in prompts]
    equal = sum(tokens == again for tokens, (_, _, again) in zip(computed, loaded, strict=True))
    return {"prompts": len(prompts), "equal": equal, "hits": sum(hit > 0 for _, hit, _ in loaded)}


def print_table(results: list[dict[str, Any]]) -> None:
    names = ("cold", "warm", "kept", "floor")
    print(f"{'model':8} {'mode':10} {'tokens':>7}" + "".join(f"{name:>9}" for name in names) + "  of floor")
    for result in results:
        for row in result["rows"]:
            figures = "".join(f"{row[name]:9.1f}" for name in names)
            head = f"{result['model']:8} {result['mode']:10} {row['tokens']:7}"
            print(f"{head}{figures}  {row['warm'] / row['floor']:8.3f}  same={row['same']} {row['cached']}")
        bus, up, equal = result["bus_gbps"], result["server_s"], result.get("equal")
        print(f"{'':8} {result['mode']}: bus {bus:.1f} GB/s, server up in {up:.1f} s, tokens {equal}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modes", nargs="+", choices=MODES)
    parser.add_argument("--model", choices=CONFIGS, default="llama8b")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle", type=float, default=1.0, help="seconds between a cold run and its reload")
    parser.add_argument(
        "--prompts", type=int, default=0, help="compare the tokens of so many prompts as well"
    )
    parser.add_argument("--out", type=Path, default=Path("ttft.json"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        os.environ.update(ENVIRONMENT)
        args.out.write_text(json.dumps(measure_mode(args.modes[0], args)))
        return
    results = []
    options = [argument for argument in sys.argv[1:] if argument not in MODES]
    for mode in args.modes:
        part, log = (args.out.with_suffix(f".{mode}.{kind}") for kind in ("json", "log"))
        with log.open("wb") as out:
            child = [sys.executable, "-m", "bench.gpu.ttft", mode, *options, "--out", str(part), "--child"]
            code = subprocess.run(child, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
        if code:
            print(f"{mode} failed; the end of {log}:\n{log.read_text(errors='replace')[-3000:]}", flush=True)
            continue
        results.append(json.loads(part.read_text()))
    args.out.write_text(json.dumps(results, indent=1))
    print_table(results)


if __name__ == "__main__":
    main()
