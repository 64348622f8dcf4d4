"""The table that `kvcellar bench control` prints: a row per figure, beside its target and the peer's."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table


class Target(NamedTuple):
    bound: float
    text: str
    at_least: bool = False  # else: at most

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


TARGETS = {
    "ready": Target(0.5, "<= 0.5 s"),
    "round trip": Target(50, "<= 50 us"),
    "pipelined": Target(20_000, ">= 20,000 /s", at_least=True),
    "lookup 128k TP8": Target(0.5, "<= 0.5 ms"),
    "memory per object": Target(400, "<= 400 B"),
}
RATIO_TARGETS = {"lookup 128k TP8": Target(50, "50 x", at_least=True)}


class Row(NamedTuple):
    name: str
    ours: float  # of times: the median
    unit: str
    p99: float | None = None
    theirs: float | None = None
    ratio: float | None = None


def control_table(result: dict[str, Any]) -> Table:
    machine, peer, index = result["machine"], result.get("peer"), result["index"]
    table = Table(
        title=f"Control path: {machine['cpu']}, {machine['cores']} cores, load {machine['load_before']}",
        caption=index.get("note"),
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for name in ("ours", "p99", "target", *([peer["peer"], "ratio"] if peer else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for rows in (_single(result), _cases(result), _crowd(result), _index(index)):
        for row in rows:
            cells = [_cell(row.ours, row.unit, TARGETS.get(row.name)), _cell(row.p99, row.unit)]
            cells.append(_targets(row.name))
            if peer:
                cells += [_cell(row.theirs, row.unit), _cell(row.ratio, "x", RATIO_TARGETS.get(row.name))]
            table.add_row(row.name, *cells)
        table.add_section()
    return table


def _single(result: dict[str, Any]) -> Iterator[Row]:
    peer, ratio = result.get("peer", {}), result.get("ratio", {})
    for name, key, unit in (
        ("ready", "ready_s", "s"),
        ("round trip", "roundtrip_p50_us", "us"),
        ("  a bare echo", "bare_echo_p50_us", "us"),
        ("pipelined", "pipelined_per_s", "/s"),
    ):
        p99 = result["roundtrip_p99_us"] if key == "roundtrip_p50_us" else None
        yield Row(name, result[key], unit, p99, peer.get(key), ratio.get(key))


def _cases(result: dict[str, Any]) -> Iterator[Row]:
    peer, ratio = result.get("peer", {}), result.get("ratio", {})
    for name, key, peer_key in (
        ("lookup", "lookup", "lookup_blocking"),
        ("store", "store_bookkeeping", "store_bookkeeping"),
        ("evicting store", "store_evicting", ""),
    ):
        for case, figures in result[key].items():
            size, _, tp = case.partition("_tp")
            theirs = peer.get(peer_key, {}).get(case, {}).get("p50_ms")
            times = ratio.get(key, {}).get(case)
            yield Row(f"{name} {size} TP{tp}", figures["p50_ms"], "ms", figures["p99_ms"], theirs, times)


def _crowd(result: dict[str, Any]) -> Iterator[Row]:
    crowd, peer = result["concurrent"], result.get("peer", {}).get("concurrent", {})
    ratio = result.get("ratio", {}).get("concurrent", {})
    for operation in ("lookup", "store"):
        figures, name = crowd[operation], f"{crowd['clients']} clients, {operation} 8k"
        theirs = peer if operation == "lookup" else {}
        times = ratio.get(f"{operation}_p50_ms")
        yield Row(name, figures["p50_ms"], "ms", figures["p99_ms"], theirs.get("p50_ms"), times)
        who = ", client-bound" if figures["client_bound"] else ""
        rate = theirs.get("lookups_per_s")
        yield Row(f"  together{who}", figures["per_s"], "/s", None, rate, ratio.get(f"{operation}_per_s"))


def _index(index: dict[str, Any]) -> Iterator[Row]:
    lookup = index["lookup"]["128k_tp1"]
    yield Row("objects in the index", index["objects"], "")
    yield Row("memory per object", index["bytes_per_object"], "B")
    yield Row("  second half / first", index["memory_ratio"], "x")
    yield Row("store per object", index["us_per_object"], "us")
    yield Row("  second half / first", index["time_ratio"], "x")
    yield Row("lookup 128k TP1 in it", lookup["p50_ms"], "ms", lookup["p99_ms"])


def _targets(name: str) -> str:
    return ", ".join(targets[name].text for targets in (TARGETS, RATIO_TARGETS) if name in targets)


def _cell(value: float | None, unit: str, target: Target | None = None) -> str:
    if value is None:
        return ""
    digits = 0 if value >= 1000 else 1 if value >= 10 else 2 if unit in ("x", "s") else 3
    text = f"{value:,.{digits}f} {unit}".rstrip()
    if target is None:
        return text
    return f"[green]{text}[/]" if target.is_met(value) else f"[red]{text}[/]"
