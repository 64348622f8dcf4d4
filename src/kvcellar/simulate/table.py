"""The table that `kvcellar simulate` prints."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from kvcellar.simulate.compare import by_row

_UNITS = (("TB", 12), ("GB", 9), ("MB", 6))


def simulate_table(result: dict[str, Any]) -> Group:
    return Group(_title(result), _table(result), _caption(result))


def _table(result: dict[str, Any]) -> Table:
    with_disk = result["disk_bytes"] > 0
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("eviction", no_wrap=True)
    if with_disk:
        table.add_column("write to disk", no_wrap=True)
    rows = by_row(result)
    for run in next(iter(rows.values())):
        table.add_column(size(run["memory_bytes"]), justify="right", no_wrap=True)
        if with_disk:
            table.add_column("written", justify="right", no_wrap=True)
    table.add_column("ceiling", justify="right", no_wrap=True)
    for (policy, write), runs in rows.items():
        cells = [policy, write] if with_disk else [policy]
        for run in runs:
            cells.append(percent(run["hit_rate"]))
            if with_disk:
                cells.append(size(run["disk_bytes_written"]))
        table.add_row(*cells, percent(result["ceiling"]))
    return table


def _title(result: dict[str, Any]) -> str:
    below = f", over a disk of {size(result['disk_bytes'])}" if result["disk_bytes"] else ""
    return (
        f"{result['trace']}: {result['requests']:,} requests, {result['tokens'] / 1e6:,.1f} M tokens;"
        f" {result['distinct_blocks']:,} distinct blocks of {result['block_tokens']} tokens"
        f" = {size(_footprint(result))}\n"
        f"share of the prompt tokens found in the cache, by size of memory{below}"
    )


def _caption(result: dict[str, Any]) -> str:
    return f"{result['bytes_per_token']:,} bytes of KV per token; ceiling: a cache that never forgets"


def _footprint(result: dict[str, Any]) -> int:
    return int(result["distinct_blocks"] * result["block_tokens"] * result["bytes_per_token"])


def percent(share: float) -> str:
    return f"{share:.1%}"


def size(count: int) -> str:
    """Decimal, as disks are sold and as their wear is counted."""
    unit, power = next(((unit, power) for unit, power in _UNITS if count >= 10**power), ("kB", 3))
    return (
        f"{count / 10**power:,.3g} {unit}" if count < 1000 * 10**power else f"{count / 10**power:,.0f} {unit}"
    )
