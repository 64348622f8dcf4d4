"""`kvcellar bench`: run a benchmark and show it as a table or as JSON."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few seconds, for a first look.")]


@app.command()
def copy(as_json: Json = False, quick: Quick = False) -> None:
    """Copies through shared memory.

    Stores and loads with the integrity check on, beside plain memcpy.
    """
    from kvcellar.bench.copy import copy_table, run_copy  # noqa: PLC0415 - heavy

    result = run_copy(quick=quick)
    _show(result, as_json, copy_table)


@app.command()
def control(
    as_json: Json = False,
    quick: Quick = False,
    peer: Annotated[str, typer.Option(help="Run a peer through the same operations: lmcache.")] = "",
) -> None:
    """Start-up, round trips, lookups, stores.

    What a real server on this machine needs for them; no KV is copied.
    """
    from kvcellar.bench.control import control_table, run_control  # noqa: PLC0415 - heavy

    result = run_control(quick=quick, peer=peer)
    _show(result, as_json, control_table)


@app.command()
def tiers(
    as_json: Json = False,
    quick: Quick = False,
    folder: Annotated[str, typer.Option(help="Where the disk is measured; nothing stays there.")] = ".",
    tier: Annotated[list[str] | None, typer.Option(help="Measure this tier too; may be repeated.")] = None,
) -> None:
    """Speed of the disk tier and others, what attaching tiers does to lookups, a million objects on disk."""
    from kvcellar.bench.tiers import run_tiers, tiers_table  # noqa: PLC0415 - heavy

    result = run_tiers(folder=Path(folder).absolute(), tiers=tuple(tier or ()), quick=quick)
    _show(result, as_json, tiers_table)


def _show(result: dict[str, Any], as_json: bool, table: Any) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    from kvcellar.cli.console import new_console  # noqa: PLC0415 - heavy

    new_console().print(table(result))
