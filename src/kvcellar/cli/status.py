"""What `kvcellar status` prints: an entry for each namespace, engine and tier, readable at any width and in
pipes.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from kvcellar.cli.plain import plain
from kvcellar.client import AdminClient
from kvcellar.wire.report import NamespaceReport, SessionReport, StatusReport, TierReport

# Of a namespace's id: enough to tell it from others, and for `pin` and `clear`.
_ID_DIGITS = 8
_SHOWN = 4  # of the values in which namespaces differ


def fetch_status(socket: Path) -> StatusReport:
    with AdminClient(socket) as admin:
        return admin.status()


def print_status(report: StatusReport, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print("\n".join(map(plain, _lines(report))))


def _lines(report: StatusReport) -> Iterator[str]:
    yield from _headlines(report)
    yield from _section("namespaces", [_namespace(one) for one in report.namespaces])
    yield from _differences(report.namespaces)
    yield from _section("engines", [_session(one) for one in report.sessions])
    if report.tiers:
        yield from _section("tiers", [_tier(one) for one in report.tiers])


def _section(title: str, entries: list[list[str]]) -> Iterator[str]:
    """The first line of each entry names it, the others tell more."""
    yield ""
    yield title if entries else f"{title}: none"
    for first, *more in entries:
        yield f"  {first}"
        yield from (f"      {line}" for line in more)


def _headlines(report: StatusReport) -> Iterator[str]:
    waiting = "waiting for engines of an earlier server" if report.in_grace else "serving"
    state = "draining" if report.draining else waiting
    since = _duration(report.uptime_s)
    yield f"kvcellar {report.version}, pid {report.pid}, {state} for {since} on {report.socket}"
    yield f"{_size(report.memory_used)} of {_size(report.memory_limit)} of memory given to namespaces"
    if troubles := _each({name: count for name, count in report.counts.items() if name != "stale"}):
        yield f"what should be rare: {troubles}"


def _namespace(report: NamespaceReport) -> list[str]:
    identity = report.identity
    chunks = " + ".join(f"{group.stripes:,}" for group in report.groups)
    slots = " + ".join(f"{group.slots:,}" for group in report.groups)
    evicted = sum(group.left_by.get("evicted", 0) for group in report.groups)
    return [
        f"{report.id[:_ID_DIGITS]}  {identity['model']}, {identity['kv_dtype']}" + ", pinned" * report.pinned,
        f"{chunks} chunks of {identity['chunk_tokens']} tokens in memory, with room for {slots}; "
        f"{evicted:,} evicted",
        f"{_size(report.memory_bytes)} in {_count(report.shards, 'shard')}; used by "
        f"{_count(report.engines, 'engine')}",
    ]


def _differences(reports: list[NamespaceReport]) -> Iterator[str]:
    """Why engines of one model do not share: for each model, in what they differ."""
    models = defaultdict[str, list[dict[str, str]]](list)
    for report in reports:
        models[report.identity["model"]].append(report.identity)
    for model, several in models.items():
        if len(several) > 1:
            yield f"  {model}: {len(several)} namespaces, which differ in"
            for field in several[0]:
                if len(values := list(dict.fromkeys(each[field] for each in several))) > 1:
                    shown = [text or "none" for text in _unlike(values[:_SHOWN])]
                    more = [f"and {len(values) - _SHOWN} more"] if len(values) > _SHOWN else []
                    yield f"      {field}: {' / '.join(shown + more)}"


def _unlike(values: list[str]) -> list[str]:
    """Without the words that all of them have at the same place."""
    words = [value.split() for value in values]
    if len(set(map(len, words))) > 1:
        return values
    places = [len(set(column)) > 1 for column in zip(*words, strict=True)]
    return [" ".join(itertools.compress(each, places)) for each in words]


def _session(report: SessionReport) -> list[str]:
    counts = report.counts
    asked, hit = counts.get("asked_chunks", 0), counts.get("hit_chunks", 0)
    ranks = ", ".join(_rank(rank, rank in report.connected) for rank in report.ranks)
    namespaces = ", ".join(namespace[:_ID_DIGITS] for namespace in report.namespaces)
    found = f" found {hit:,} of {asked:,} chunks ({hit / asked:.0%})" if asked else ""
    return [
        f"{report.name}  {report.label}, ranks {ranks}; "
        + (f"namespace {namespaces}" if namespaces else "no namespace yet"),
        f"{_count(counts.get('lookups', 0), 'lookup')}{found}; {counts.get('committed', 0):,} chunks stored",
        f"{_count(report.leases, 'lease')} with {_size(report.held_bytes)}",
    ]


def _tier(report: TierReport) -> list[str]:
    counts = report.counts
    capacity = f" of {_size(report.capacity_bytes)}" if report.capacity_bytes else ""
    holds = f"{report.objects:,} objects" if report.objects else ""
    if report.used_bytes:
        holds += f", {_size(report.used_bytes)}{capacity}"
    troubles = {name: counts.get(name, 0) for name in ("errors", "corrupt", "stuck")}
    moved = [
        ("read", report.read_bytes, report.read_rate),
        ("written", report.written_bytes, report.write_rate),
    ]
    lines = [
        f"{report.label}  {report.state}",
        report.reason,
        holds.removeprefix(", "),
        "; ".join(f"{_size(size)} {how}, lately {_size(rate)}/s" for how, size, rate in moved),
        f"{_count(counts.get('hits', 0), 'hit')}, {_count(counts.get('misses', 0), 'miss', 'misses')}, "
        f"{report.queued:,} waiting to be written",
        f"not written: {dropped}" if (dropped := _each(report.dropped)) else "",
        f"trouble: {trouble}" if (trouble := _each(troubles)) else "",
    ]
    return [line for line in lines if line]


def _each(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def _rank(rank: int, connected: bool) -> str:
    name = "scheduler" if rank < 0 else str(rank)
    return name if connected else f"{name} (no connection)"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if round(count) < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return (
        f"{seconds:.0f} s" if seconds < 120 else f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h"
    )
