"""How often a load of KVCellar's was ahead of a peer's in the same round, what it took of its floor, and what
storing cost a new prompt.

    python -m bench.gpu.rounds FILE...

Of the rounds of all files together: unlike report.py, which has one run in the place of another, since each
row there is of one run. Medians of a few rounds say little where a forward takes 20 ms in one and 40 in the
next.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from bench.gpu.engine import CACHES
from bench.gpu.report import ROWS, Entries
from bench.gpu.ttft import over_recompute

OURS = "kvcellar"
Length = tuple[str, int]  # of a model's prompts, in tokens


class Figures(NamedTuple):
    """Of one length: rounds by peer, then of our own."""

    less: dict[str, list[float]]  # milliseconds that the peer took less; below 0 we were ahead
    of_floor: list[float]
    over: list[float]
    stored: list[float]  # milliseconds that a prompt nobody had seen took more than without a connector


def gather(runs: Iterable[Entries]) -> dict[Length, Figures]:
    found: dict[Length, Figures] = defaultdict(lambda: Figures(defaultdict(list), [], [], []))
    for entries in runs:
        for length, times in _new_prompts(entries, OURS).items():
            alone = _new_prompts(entries, "recompute").get(length, [])
            found[length].stored.extend(mine - its for mine, its in zip(times, alone, strict=False))
        rows = {
            (entry["model"], row["tokens"], entry["mode"]): row
            for entry in entries
            for row in entry.get("rows", [])
            if "warm" in row
        }
        for (model, tokens, mode), row in rows.items():
            ours = rows.get((model, tokens, OURS))
            if ours is None:
                continue
            figures, times = found[model, tokens], row["times"]
            if mode != OURS:
                pairs = zip(ours["times"]["warm"], times["warm"], strict=False)  # one may have failed
                figures.less[mode] += [mine - its for mine, its in pairs]
            elif "floor" in row:
                bus_ms = row["floor"] - row["kept"]
                rounds = list(zip(times["warm"], times["kept"], strict=True))
                figures.of_floor.extend(warm / (kept + bus_ms) for warm, kept in rounds)
                figures.over.extend(warm - kept - bus_ms for warm, kept in rounds)
    return dict(found)


def _new_prompts(entries: Entries, mode: str) -> dict[Length, list[float]]:
    found: dict[Length, list[float]] = defaultdict(list)
    for entry in entries:
        for row in (row for part in ROWS.values() for row in entry.get(part, []) if entry["mode"] == mode):
            found[entry["model"], row["tokens"]] += row["times"]["cold"]
    return found


def line(length: Length, figures: Figures) -> str:
    parts = [f"{length[0]:8} {length[1]:7}"]
    for peer in CACHES:
        if less := figures.less.get(peer):
            ahead = sum(ms < 0 for ms in less)
            parts.append(f"ahead of {peer} in {ahead:2} of {len(less):2}, {statistics.median(less):7.1f} ms")
    if figures.over:
        of_floor, over = statistics.median(figures.of_floor), statistics.median(figures.over)
        parts.append(f"of floor {of_floor:.3f}, over {over:.1f} ms")
    if figures.stored:
        cost = over_recompute(figures.stored)
        sure = f" give or take {cost['give_or_take']:.1f}" if "give_or_take" in cost else ""
        parts.append(f"storing {cost['over_recompute']:.1f} ms{sure}, {len(figures.stored)} rounds")
    return "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    found = gather(json.loads(path.read_text()) for path in parser.parse_args().files)
    for length in sorted(found):
        print(line(length, found[length]))


if __name__ == "__main__":
    main()
