"""What KVCellar must show on a GPU, with real vLLM, beside its peers.

    python -m bench.gpu.prove ttft interference --model llama8b --modes recompute kvcellar offload lmcache
    python -m bench.gpu.prove tokens flip --model mla
    python -m bench.gpu.prove pair

    ttft          time to first token: computed, loaded, still on the GPU        all modes
    interference  decoding beside loads and stores of long prompts               all modes
    cold          new prompts only, many of them: what storing costs             all modes
    timeline      where the time of a load goes, stage by stage                  kvcellar
    tokens        greedy tokens of 20 prompts, computed and loaded               kvcellar
    flip          a flipped bit in every stored object is found                  kvcellar, models of one group
    pair          two engines on one GPU share a cache; the server uses no GPU   kvcellar

Those of all modes come first: their engines are on the GPU at once, and take turns. For the other parts every
model and mode is a fresh engine, which goes through all of them. --out is added to, after each round: what it
has of other models and modes stays. Exits with 1 if anything failed. --small tries all of it on a machine
without a GPU, with vLLM for CPU: its figures mean nothing.
"""

import argparse
import functools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu import turns
from bench.gpu.children import Child, Site, cache_gib, site
from bench.gpu.engine import MODES
from bench.gpu.progress import say
from bench.gpu.report import Entries, merge, print_report
from bench.gpu.scale import FULL, SMALL, Scale
from bench.gpu.shapes import CONFIGS
from bench.gpu.turns import Found, Keep

ORDER = ("timeline", "tokens", "flip")
LEAST_S, END_S = 75.0, 15.0  # for an engine to be worth starting; for it to be stopped


def parts_of(asked: list[str], model: str, mode: str) -> list[str]:
    """Those that make sense for one engine: vLLM 0.26 with several groups stops when a load fails."""
    possible = {"timeline", "tokens"} | ({"flip"} if model != "hybrid" else set())
    return [part for part in ORDER if part in asked and part in possible and mode == "kvcellar"]


def parts_in_turns(asked: list[str]) -> list[str]:
    return [part for part in turns.PARTS if part in asked]


def run(scale: Scale, args: argparse.Namespace, model: str, what: str, left: float, keep: Keep) -> Found:
    """`what`: a part that takes turns, pair, or the mode of an engine for all other parts."""
    try:
        if what in turns.PARTS:
            return run_turns(scale, args, model, what, left, keep)
        run_one = run_pair if what == "pair" else run_engine
        return {what: run_one(scale, args, model, what, min(args.limit, left))}
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        say(f"{model}, {what}: {error}")
        return failed(args, what, str(error))


def failed(args: argparse.Namespace, what: str, why: str) -> Found:
    if what in turns.PARTS:
        return {mode: {"errors": {what: why}} for mode in args.modes}
    return {what: {"error": why}}


def run_turns(
    scale: Scale, args: argparse.Namespace, model: str, part: str, left: float, keep: Keep
) -> Found:
    say(f"{model}: {part} of {', '.join(args.modes)} in turns")
    about = turns.Run(scale, model, part, args.small, args.out, args.rounds, time.monotonic() + left)
    return turns.measure(about, args.modes, keep)


def run_engine(scale: Scale, args: argparse.Namespace, model: str, mode: str, limit: float) -> dict[str, Any]:
    parts = parts_of(args.parts, model, mode)
    say(f"{model}, {mode}: {', '.join(parts)}")
    log = args.out.with_name(f"{args.out.stem}.{model}.{mode}.log")
    log.unlink(missing_ok=True)
    _, gib = scale.cache_of(model, beside=False)
    with site(scale, model, mode, cache_gib(gib), small=args.small) as where:
        about = {"server_s": where.seconds, "cache_gib": where.job["cache_gib"]}
        job = where.job | {"parts": parts, "prompts": args.prompts}
        if "timeline" in parts:
            job["transfer"]["kv_connector_module_path"] = "bench.gpu.noting"
        with Child(job, f"{model}-{mode}", log) as child:
            return about | child.wait(limit)


def run_pair(scale: Scale, args: argparse.Namespace, model: str, _: str, limit: float) -> dict[str, Any]:
    """The second engine's first request is one that the first engine has answered."""
    say(f"{model}: two engines, one server")
    log = args.out.with_name(f"{args.out.stem}.{model}.pair.log")
    log.unlink(missing_ok=True)
    end = time.monotonic() + limit
    with (
        site(scale, model, "kvcellar", cache_gib(scale.cache_gib["one"]), small=args.small) as where,
        Child(where.job | {"parts": ["first"]}, "first", log) as one,
    ):
        first = one.wait(limit)
        if "kept" not in first:
            return {"error": "the first engine did not answer"}
        with Child(where.job | {"parts": ["second"]}, "second", log) as two:
            second = two.wait(end - time.monotonic())
            pair = {"first": first, "second": second} | server_on_gpu(where)
    warm, kept = second.get("warm", {}), first["kept"]
    pair["same"] = warm.get("tokens") == kept["tokens"]
    pair["bit_for_bit"] = warm.get("best") == kept["best"]
    pair["ok"] = pair["same"] and warm.get("cached", 0) >= scale.chunk * 8 and not pair["server_gpu_files"]
    return {"pair": pair}


def server_on_gpu(where: Site) -> dict[str, Any]:
    """What nvidia-smi says, and, since it may not see the processes of a container, what the kernel says."""
    assert where.server is not None
    pid = where.server.pid
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        told = f"nvidia-smi: {error}"
    maps = Path(f"/proc/{pid}/maps").read_text()
    held = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    files = [name for name in held if name.startswith("/dev/nvidia")]
    files += sorted(
        {line.split()[-1] for line in maps.splitlines() if "libcuda" in line or "/dev/nvidia" in line}
    )
    return {"server_pid": pid, "nvidia_smi": told.splitlines(), "server_gpu_files": files}


def add(out: Path, *found: dict[str, Any]) -> Entries:
    """To what the file has, which is whole at any time."""
    entries: Entries = json.loads(out.read_text()) if out.exists() else []
    for entry in found:
        entries = merge(entries, entry)
    new = out.with_suffix(".new")
    new.write_text(json.dumps(entries, indent=1) + "\n")
    new.rename(out)
    return entries


def add_modes(out: Path, model: str, begun: float, found: Found) -> Entries:
    about = {"model": model, "took_s": time.monotonic() - begun}
    return add(out, *(about | {"mode": mode} | its for mode, its in found.items()))


def leave(*_: object) -> None:
    """As whoever ends it expects, and with engines and servers: these have sessions of their own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=[*turns.PARTS, *ORDER, "pair"])
    parser.add_argument("--model", nargs="+", choices=CONFIGS, default=["llama8b"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["kvcellar"])
    parser.add_argument(
        "--rounds", type=int, default=4, help="of ttft and cold; four and 24 times as many for short prompts"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", help="tokens of the prompts of ttft and cold, if not all"
    )
    parser.add_argument("--prompts", type=int, default=20, help="of tokens")
    parser.add_argument(
        "--limit", type=float, default=270, help="seconds for one engine by itself, its start included"
    )
    parser.add_argument(
        "--total", type=float, default=3600, help="seconds for all: no engine is started in the last minute"
    )
    parser.add_argument("--out", type=Path, default=Path("prove.json"))
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    scale = SMALL if args.small else FULL
    scale = scale._replace(lengths=tuple(args.lengths or scale.lengths))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    todo = [(model, part) for model in args.model for part in parts_in_turns(args.parts)]
    todo += [
        (model, mode) for model in args.model for mode in args.modes if parts_of(args.parts, model, mode)
    ]
    todo += [(args.model[0], "pair")] if "pair" in args.parts else []
    entries: Entries = []
    signal.signal(signal.SIGTERM, leave)
    started = time.monotonic()
    for model, what in todo:
        begun = time.monotonic()
        keep = functools.partial(add_modes, args.out, model, begun)
        left = started + args.total - begun
        if left < LEAST_S:
            entries = keep(failed(args, what, "not begun: no time left"))
        else:
            entries = keep(run(scale, args, model, what, left - END_S, keep))
    sys.exit(0 if print_report(entries) else 1)


if __name__ == "__main__":
    main()
