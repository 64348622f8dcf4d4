"""A long run of a director's, from the command line: its progress, its tables, and what it has found wrong.

Knows neither faults nor frames: tests/chaos and tests/fuzz have a director each.
"""

import argparse
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console, RenderableType

_SHOWN = 50  # violations: the first ones tell


class Score(Protocol):
    def tables(self) -> Sequence[RenderableType]: ...

    def violations(self) -> Sequence[str]: ...


_Score = TypeVar("_Score", bound=Score, covariant=True)


class Director(Protocol[_Score]):
    @property
    def score(self) -> _Score: ...

    @property
    def logs(self) -> Path: ...

    def run(self, count: int, seconds: float) -> None: ...

    def close(self) -> None: ...


Make = Callable[[int, Callable[[str], None]], Director[_Score]]  # from a seed, and whom to tell how far it is


def run(make: Make[_Score], count: int, seed: int, seconds: float, console: Console) -> _Score:
    with console.status(f"seed {seed}") as line:
        director = make(seed, lambda text: line.update(f"seed {seed}: {text}"))
        try:
            director.run(count, seconds)
        finally:
            director.close()
    if director.score.violations():
        console.print(f"logs are in {director.logs}")
    return director.score


def main(doc: str, make: Make[_Score], what: str, meaning: str, count: int, seconds: float) -> int:
    """`what` is counted, and an option's name; `count` of them by default. Returns the exit code."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument(f"--{what}", dest="count", type=int, default=count, help=f"{meaning} [{count}]")
    parser.add_argument("--seed", type=int, default=None, help="a number an earlier run printed [random]")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help=f"stop after that long [{seconds:.0f}]"
    )
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    console = Console()
    console.print(f"seed {seed}, {options.count:,} {what}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    try:
        score = run(make, options.count, seed, options.seconds, console)
    except KeyboardInterrupt:
        return 130
    for table in score.tables():
        console.print(table)
    violations = score.violations()
    for violation in violations[:_SHOWN]:
        console.print(violation, markup=False, highlight=False, style="red")
    console.print("FAILED" if violations else "ok", style="bold red" if violations else "bold green")
    return 1 if violations else 0
