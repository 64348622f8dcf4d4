"""The plot that `kvcellar simulate --plot` writes: hit rate by size of memory, as an SVG of its own.

One line per policy (colour) and write filter (dashes), named where it ends. Memory is on a logarithmic scale.
"""

import math
from collections.abc import Iterator
from html import escape
from typing import Any, NamedTuple

from kvcellar.simulate.compare import by_row
from kvcellar.simulate.table import percent, size

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 190, 60, 60
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # told apart by everybody
_DASHES = ("", "7 4", "2 3", "9 3 2 3")
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.title{font-size:16px;font-weight:600}"
    ".grid{stroke:#e3e3e3}.axis{stroke:#888}.line{fill:none;stroke-width:2.2;stroke-linejoin:round}"
)


class _Scale(NamedTuple):
    """From sizes and shares to points."""

    low: float
    high: float
    top: float

    def x(self, size: float) -> float:
        width = _WIDTH - _LEFT - _RIGHT
        if self.low == self.high:
            return _LEFT + width / 2
        return _LEFT + width * math.log(size / self.low) / math.log(self.high / self.low)

    def y(self, share: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share / self.top


def draw(result: dict[str, Any]) -> str:
    sizes = sorted({run["memory_bytes"] for run in result["runs"]})
    step = 0.1 if result["ceiling"] > 0.3 else 0.05
    scale = _Scale(sizes[0], sizes[-1], max(step, math.ceil(result["ceiling"] / step) * step))
    below = f" over a disk of {size(result['disk_bytes'])}" if result["disk_bytes"] else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}"'
        f' height="{_HEIGHT}"><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        _text(_LEFT, 28, f"Prompt tokens found in the cache: {result['trace']}", "start", "title"),
        *_grid(scale, sizes, step),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 16, f"size of memory{below}", "middle"),
        *_lines(result, scale),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _grid(scale: _Scale, sizes: list[int], step: float) -> Iterator[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for number in range(round(scale.top / step) + 1):
        y = scale.y(number * step)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>'
        yield _text(_LEFT - 8, y + 4, f"{number * step:.0%}", "end")
    for one in sizes:
        x = scale.x(one)
        yield f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>'
        yield _text(x, bottom + 20, size(one), "middle")
    yield f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>'


def _lines(result: dict[str, Any], scale: _Scale) -> Iterator[str]:
    ends = [(scale.y(result["ceiling"]), f"ceiling {percent(result['ceiling'])}", "#888")]
    y = ends[0][0]
    yield f'<path class="line" stroke="#888" stroke-dasharray="1 4" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
    rows = by_row(result)
    policies = list(dict.fromkeys(policy for policy, _ in rows))
    filters = list(dict.fromkeys(write for _, write in rows))
    for (policy, write), runs in rows.items():
        colour = _COLOURS[policies.index(policy) % len(_COLOURS)]
        dashes = _DASHES[filters.index(write) % len(_DASHES)]
        points = [(scale.x(run["memory_bytes"]), scale.y(run["hit_rate"])) for run in runs]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in sorted(points))
        yield f'<path class="line" stroke="{colour}" stroke-dasharray="{dashes}" d="M{path}"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
        last = max(runs, key=lambda run: run["memory_bytes"])
        name = f"{policy}, {write}" if write else policy
        ends.append((scale.y(last["hit_rate"]), f"{name} {percent(last['hit_rate'])}", colour))
    yield from _labels(ends)


def _labels(ends: list[tuple[float, str, str]]) -> Iterator[str]:
    """Beside the end of each line, pushed down where two would overlap, then back up off the bottom."""
    ends = sorted(ends, key=lambda end: end[0])
    places: list[float] = []
    for y, _, _ in ends:
        places.append(max(y, places[-1] + 16) if places else y)
    limit = float(_HEIGHT - 30)
    for number in reversed(range(len(places))):
        places[number] = min(places[number], limit)
        limit = places[number] - 16
    for place, (_, text, colour) in zip(places, ends, strict=True):
        yield _text(_WIDTH - _RIGHT + 10, place + 4, text, "start", fill=colour)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "", fill: str = "") -> str:
    extra = (f' class="{kind}"' if kind else "") + (f' style="fill:{fill}"' if fill else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'
