"""The table that `kvcellar status` prints."""

from collections import defaultdict
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.table import Table

from kvcellar.client import AdminClient
from kvcellar.wire.report import NamespaceReport, SessionReport, StatusReport, TierReport


def fetch_status(socket: Path) -> StatusReport:
    with AdminClient(socket) as admin:
        return admin.status()


def print_status(report: StatusReport, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
        return
    # What engines call themselves, their models and paths is text, whatever it looks like.
    Console(markup=False, emoji=False).print(status_view(report))


def status_view(report: StatusReport) -> Group:
    parts: list[Table | str] = [
        _namespaces(report.namespaces),
        *_differences(report.namespaces),
        _sessions(report.sessions),
    ]
    if report.tiers:
        parts.append(_tiers(report.tiers))
    return Group(_headline(report), *parts)


def _headline(report: StatusReport) -> str:
    waiting = "waiting for engines of an earlier server" if report.in_grace else "serving"
    state = "draining" if report.draining else waiting
    share = report.memory_used / report.memory_limit
    troubles = ", ".join(
        f"{count} {name}" for name, count in report.counts.items() if count and name != "stale"
    )
    since = _duration(report.uptime_s)
    return (
        f"kvcellar {report.version}, pid {report.pid}, {state} for {since} on {report.socket}\n"
        f"memory {_size(report.memory_used)} of {_size(report.memory_limit)} ({share:.0%})"
        + (f"; {troubles}" if troubles else "")
    )


def _namespaces(reports: list[NamespaceReport]) -> Table:
    table = Table(title="namespaces", title_justify="left", expand=False)
    for name in ("id", "model", "kv", "chunk", "shards", "engines"):
        table.add_column(name, justify="left" if name in ("id", "model", "kv") else "right", overflow="fold")
    for name in ("chunks", "room for", "evicted", "memory"):
        table.add_column(name, justify="right")
    for report in reports:
        table.add_row(
            report.id,
            report.identity["model"] + (" (pinned)" if report.pinned else ""),
            report.identity["kv_dtype"],
            f"{report.identity['chunk_tokens']} tokens",
            str(report.shards),
            str(report.engines),
            " + ".join(f"{group.stripes:,}" for group in report.groups),
            " + ".join(f"{group.slots:,}" for group in report.groups),
            f"{sum(group.left_by.get('evicted', 0) for group in report.groups):,}",
            _size(report.memory_bytes),
        )
    return table


def _differences(reports: list[NamespaceReport]) -> list[str]:
    """Why engines of one model do not share, a line for each model."""
    models = defaultdict[str, list[dict[str, str]]](list)
    for report in reports:
        models[report.identity["model"]].append(report.identity)
    return [
        f"{model}: {len(several)} namespaces, which differ in "
        + ", ".join(field for field in several[0] if len({each[field] for each in several}) > 1)
        for model, several in models.items()
        if len(several) > 1
    ]


def _sessions(reports: list[SessionReport]) -> Table:
    table = Table(title="engines", title_justify="left", expand=False)
    for name in ("session", "engine", "ranks", "namespace"):
        table.add_column(name, overflow="fold")
    for name in ("lookups", "hit rate", "stored", "leases", "held"):
        table.add_column(name, justify="right")
    for report in reports:
        asked, hit = report.counts.get("asked_chunks", 0), report.counts.get("hit_chunks", 0)
        table.add_row(
            report.name,
            report.label,
            ", ".join(_rank(rank, rank in report.connected) for rank in report.ranks),
            ", ".join(namespace[:8] for namespace in report.namespaces),
            f"{report.counts.get('lookups', 0):,}",
            f"{hit / asked:.0%}" if asked else "-",
            f"{report.counts.get('committed', 0):,}",
            str(report.leases),
            _size(report.held_bytes),
        )
    return table


def _tiers(reports: list[TierReport]) -> Table:
    table = Table(title="tiers", title_justify="left", expand=False)
    for name in ("tier", "state"):
        table.add_column(name, overflow="fold")
    for name in ("objects", "bytes", "read", "written", "hits", "misses", "queued", "dropped", "errors"):
        table.add_column(name, justify="right")
    for report in reports:
        counts = report.counts
        capacity = f" of {_size(report.capacity_bytes)}" if report.capacity_bytes else ""
        troubles = sum(counts.get(name, 0) for name in ("errors", "corrupt", "stuck"))
        table.add_row(
            report.label,
            report.state + (f": {report.reason}" if report.reason else ""),
            f"{report.objects:,}" if report.objects else "-",
            f"{_size(report.used_bytes)}{capacity}" if report.used_bytes else "-",
            f"{_size(report.read_bytes)}, {_size(report.read_rate)}/s",
            f"{_size(report.written_bytes)}, {_size(report.write_rate)}/s",
            f"{counts.get('hits', 0):,}",
            f"{counts.get('misses', 0):,}",
            f"{report.queued:,}",
            f"{sum(report.dropped.values()):,}",
            f"{troubles:,}",
        )
    return table


def _rank(rank: int, connected: bool) -> str:
    name = "scheduler" if rank < 0 else str(rank)
    return name if connected else f"{name} (no connection)"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return (
        f"{seconds:.0f} s" if seconds < 120 else f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h"
    )
