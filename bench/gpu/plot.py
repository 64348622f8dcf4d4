"""The figure of the README: time to first token by prompt length, as an SVG, from one run's figures.

    python -m bench.gpu.plot FILE docs/ttft.svg [--model llama8b]

One panel per length, each with its own scale. Draws measured figures only: a file that lacks a mode is
refused, and a prompt that did not come from the cache as a whole leaves a gap. Knows nothing but the file.
"""

import argparse
import html
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

WHOLE = 0.97  # of the prompt: less was not a load of it

PANEL, HEIGHT, TOP, BOTTOM, LEFT = 215, 210, 92, 62, 18
BAR, GAP = 38, 10


class Mode(NamedTuple):
    name: str  # in the file
    label: str
    colour: str
    figure: str  # of a row


MODES = (
    Mode("recompute", "computed", "#9aa0a6", "cold"),
    Mode("offload", "vLLM offloading", "#e0a030", "warm"),
    Mode("lmcache", "LMCache 0.5.3", "#4a90d9", "warm"),
    Mode("kvcellar", "KVCellar", "#b0185b", "warm"),
)


def figures(entries: list[dict[str, Any]], model: str) -> dict[int, dict[str, float]]:
    """By length and mode: milliseconds; and "floor", with the fastest of all that were still on the GPU: what
    nobody can beat, also not where a mode's own were slow that day.
    """
    found: dict[int, dict[str, float]] = {}
    by_mode = {entry["mode"]: entry.get("rows", []) for entry in entries if entry["model"] == model}
    if missing := [mode.name for mode in MODES if not by_mode.get(mode.name)]:
        raise ValueError(f"no figures of {', '.join(missing)} with {model}: they must be of one run")
    for mode in MODES:
        for row in by_mode[mode.name]:
            if mode.figure == "warm" and min(row["cached"]) < WHOLE * row["tokens"]:
                continue
            here = found.setdefault(row["tokens"], {})
            here[mode.name] = row[mode.figure]
            if "floor" in row:
                floor = row["floor"] - row["kept"] + min(row["times"]["kept"])
                here["floor"] = min(floor, here.get("floor", floor))
    return dict(sorted(found.items()))


def draw(found: dict[int, dict[str, float]], model: str, source: str) -> str:
    width = LEFT + PANEL * len(found) + LEFT
    height = TOP + HEIGHT + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(LEFT, 28, _title(found), size=19, weight="bold"),
    ]
    at = LEFT
    for mode in MODES:
        lines.append(f'<rect x="{at}" y="46" width="13" height="13" fill="{mode.colour}"/>')
        lines.append(_text(at + 19, 57, mode.label))
        at += 34 + 8 * len(mode.label)
    lines.append(f'<path d="M{at} 53h22" stroke="black" stroke-dasharray="5 3"/>')
    lines.append(_text(at + 28, 57, "what the bus allows"))
    for number, (tokens, here) in enumerate(found.items()):
        lines += _panel(LEFT + number * PANEL, tokens, here)
    about = f"{model} shapes, one H200, real vLLM; every panel has its own scale. From {source}"
    lines.append(_text(LEFT, height - 14, about, size=11, colour="#666"))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _title(found: dict[int, dict[str, float]]) -> str:
    whole = [tokens for tokens, here in found.items() if {"recompute", "kvcellar"} <= set(here)]
    if not whole:
        return "Time to first token"
    tokens = max(whole)
    slow, fast = found[tokens]["recompute"], found[tokens]["kvcellar"]
    return f"First token of a {tokens:,}-token prompt: {_time(fast)} instead of {_time(slow)}"


def _panel(x: int, tokens: int, here: dict[str, float]) -> list[str]:
    scale = (HEIGHT - 18) / max(here.values())
    base = TOP + HEIGHT
    lines = []
    for number, mode in enumerate(MODES):
        if mode.name not in here:
            continue
        left, tall = x + number * (BAR + GAP), here[mode.name] * scale
        lines.append(
            f'<rect x="{left}" y="{base - tall:.1f}" width="{BAR}" height="{tall:.1f}" fill="{mode.colour}"/>'
        )
        weight = "bold" if mode.name == "kvcellar" else "normal"
        lines.append(
            _text(left + BAR / 2, base - tall - 5, _time(here[mode.name]), anchor="middle", weight=weight)
        )
    across = len(MODES) * (BAR + GAP) - GAP
    if "floor" in here:
        level = base - here["floor"] * scale
        lines.append(
            f'<path d="M{x - 4} {level:.1f}h{across + 8}" stroke="black" stroke-dasharray="5 3" fill="none"/>'
        )
    lines.append(f'<path d="M{x - 4} {base}h{across + 8}" stroke="#444" fill="none"/>')
    lines.append(_text(x + across / 2, base + 20, f"{tokens:,} tokens", anchor="middle", size=14))
    return lines


def _time(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 1000 else f"{ms:.0f} ms"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    weight: str = "normal",
    anchor: str = "start",
    colour: str = "#222",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{colour}">{html.escape(text)}</text>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--model", default="llama8b")
    args = parser.parse_args()
    try:
        found = figures(json.loads(args.source.read_text()), args.model)
    except ValueError as error:
        sys.exit(f"{args.source}: {error}")
    args.target.write_text(draw(found, args.model, str(args.source)))


if __name__ == "__main__":
    main()
