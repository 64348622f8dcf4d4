"""The tables of prove.py, from what its engines have found out.

python -m bench.gpu.report FILE... [--out FILE]      those of several calls, put together
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

Entries = list[dict[str, Any]]
# Parts where engines take turns, and what they leave in an entry: a row for each length, or something else.
ROWS = {"ttft": "rows", "cold": "cold"}
_IN_TURNS = {**ROWS, "interference": "interference"}


def merge(entries: Entries, entry: dict[str, Any]) -> Entries:
    """An entry of the same model and mode is replaced part by part; rows length by length.

    Errors stay until their part is run again: parts where engines take turns each by itself, the other parts
    together.
    """
    same = [old for old in entries if (old["model"], old["mode"]) == (entry["model"], entry["mode"])]
    rest = [old for old in entries if old not in same]
    old = same[0] if same else {}
    tried = {part for part, key in _IN_TURNS.items() if key in entry or part in entry.get("errors", {})}
    again = tried or {part for part in old.get("errors", {}) if part not in _IN_TURNS}
    errors = {part: why for part, why in old.get("errors", {}).items() if part not in again}
    merged = old | entry | {"errors": errors | entry.get("errors", {})}
    for key in merged.keys() & ROWS.values():
        rows = {row["tokens"]: row for row in [*old.get(key, []), *entry.get(key, [])]}
        merged[key] = [rows[tokens] for tokens in sorted(rows)]
    if not tried and "error" not in entry:
        merged.pop("error", None)
    if not merged["errors"]:
        merged.pop("errors")
    return [*rest, merged]


def print_report(entries: Entries) -> bool:
    """Whether everything is as it should be."""
    _print_ttft([entry for entry in entries if entry.get("rows")])
    _print_cold([entry for entry in entries if entry.get("cold")])
    _print_interference([entry for entry in entries if entry.get("interference")])
    for entry in entries:
        _print_timeline(entry)
    good = True
    for entry in entries:
        head = f"{entry['model']:8} {entry['mode']:10}"
        for part in ("tokens", "flip"):
            if found := entry.get(part):
                told = ", ".join(f"{name} {value}" for name, value in found.items() if name != "ok")
                print(f"{head} {part}: {'ok' if found['ok'] else 'FAILED'}: {told}")
                good &= found["ok"]
        if pair := entry.get("pair"):
            good &= pair["ok"]
            _print_pair(head, pair)
        for what in [entry.get("error"), *entry.get("errors", {}).items()]:
            if what:
                print(f"{head} FAILED: {what}")
                good = False
        took = f"{entry.get('took_s', 0):.0f} s, of which the server {entry.get('server_s', 0):.1f}"
        print(f"{head} took {took}, the engine's start {entry.get('engine_s', 0):.0f}")
    return good


def _print_ttft(entries: Entries) -> None:
    """Lengths in turn, so that modes are side by side; * is the fastest load of a length."""
    if not entries:
        return
    print(
        "model     tokens mode           cold of recompute"
        "      warm     kept    floor of floor     over  cached"
    )
    rows = [(entry["model"], row["tokens"], entry["mode"], row) for entry in entries for row in entry["rows"]]
    fastest: dict[tuple[str, int], float] = {}
    for model, tokens, _, row in rows:
        if "warm" in row:
            fastest[model, tokens] = min(row["warm"], fastest.get((model, tokens), row["warm"]))
    for model, tokens, mode, row in sorted(rows, key=lambda one: one[:2]):
        line = f"{model:8} {tokens:7} {mode:10} {row['cold']:8.1f} {_figure(row, 'of_recompute', 12, 3)}"
        if "warm" in row:
            mark = "*" if row["warm"] == fastest[model, tokens] else " "
            line += f"  {row['warm']:8.1f}{mark}{row['kept']:8.1f} {_figure(row, 'floor', 8, 1)}"
            line += f" {_figure(row, 'of_floor', 8, 3)} {_figure(row, 'over', 8, 1)}"
            line += f"  {sorted(set(row['cached']))}" + ("" if row["same"] else "  TOKENS DIFFER")
        elif "kept" in row:
            line += f"  {'':9}{row['kept']:8.1f}"
        print(line)


def _print_cold(entries: Entries) -> None:
    """New prompts only."""
    if entries:
        print("model     tokens mode           cold of recompute over recompute ms")
    for entry in entries:
        for row in entry["cold"]:
            line = f"{entry['model']:8} {row['tokens']:7} {entry['mode']:10} {row['cold']:8.1f}"
            line += f" {_figure(row, 'of_recompute', 12, 3)} {_figure(row, 'over_recompute', 12, 2)}"
            print(line + f" give or take {_figure(row, 'give_or_take', 4, 2)}")


def _figure(row: dict[str, Any], name: str, width: int, digits: int) -> str:
    return f"{row[name]:{width}.{digits}f}" if name in row else " " * width


def _print_interference(entries: Entries) -> None:
    """Tokens per second, and of those alone just before; of each long prompt, what was loaded."""
    if not entries:
        return
    print(
        "model    mode          alone    loads of alone   stores of alone"
        "   worst step ms     loads after ms  tokens"
    )
    for entry in entries:
        found = entry["interference"]
        line = f"{entry['model']:8} {entry['mode']:10} {found['alone']['tokens_per_s']:8.0f}"
        for name in ("loads", "stores"):
            phase = found.get(name, {})
            line += f" {_figure(phase, 'tokens_per_s', 8, 0)} {_figure(phase, 'of_alone', 8, 3)}"
        phases = [found.get(name, {}) for name in ("alone", "loads", "stores")]
        line += "  " + "".join(_figure(phase, "gap_max_ms", 6, 0) for phase in phases)
        loads = found.get("loads", {})
        line += f" {_figure(loads, 'answered_ms', 16, 0)} {_figure(loads, 'loaded', 7, 0)}"
        lost = sum(phase.get("asked", 0) - phase.get("answered", 0) for phase in phases)
        preempted = sum(phase.get("preempted", 0) for phase in phases)
        line += f"  {lost} NOT ANSWERED" if lost else ""
        print((line + (f"  {preempted} PREEMPTED" if preempted else "")).rstrip())


def _print_timeline(entry: dict[str, Any]) -> None:
    """Stages side by side: loaded, still on the GPU, computed; `bus` is what the copies take at least."""
    rows, rate = entry.get("timeline", []), entry.get("bus_gbps")
    if not rows:
        return
    heads = "".join(f"{row['tokens']:>20} tokens" for row in rows)
    print(f"{entry['model']}, ms: loaded / still there / computed {heads}")
    for stage in rows[0]["warm"]:
        cells = [
            " / ".join(f"{row.get(how, {}).get(stage, 0):7.2f}" for how in ("warm", "kept", "cold"))
            for row in rows
        ]
        print(f"  {stage:36} " + "  ".join(cells))
    if rate:
        cells = [f"{row['bytes'] / rate / 1e6:7.2f}{' ' * 20}" for row in rows]
        print(f"  {'(bus alone)':36} " + "  ".join(cells))


def _print_pair(head: str, pair: dict[str, Any]) -> None:
    warm, cold = pair["second"].get("warm", {}), pair["first"]["cold"]
    print(f"{head} two engines: {'ok' if pair['ok'] else 'FAILED'}: the second's first request had")
    print(
        f"{'':19} {warm.get('cached')} tokens from the first, {warm.get('ms', 0):.0f} ms against "
        f"{cold['ms']:.0f}; same tokens {pair['same']}, bit for bit {pair['bit_for_bit']}"
    )
    print(f"{'':19} server {pair['server_pid']}: files of the GPU driver {pair['server_gpu_files']}")
    print(f"{'':19} nvidia-smi: {pair['nvidia_smi']}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    entries: Entries = []
    for path in args.files:
        for entry in json.loads(path.read_text()):
            entries = merge(entries, entry)
    if args.out:
        args.out.write_text(json.dumps(entries, indent=1) + "\n")
    sys.exit(0 if print_report(entries) else 1)


if __name__ == "__main__":
    main()
