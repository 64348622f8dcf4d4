"""make chaos: kill and stop servers, schedulers and ranks at random, under load, and count what goes wrong.

    python tests/chaos/run.py [--faults 200] [--seed N] [--seconds 600]

Prints its seed, which gives the same schedule of faults again. Exit code 1 when anything was violated.
"""

import argparse
import logging
import secrets
import signal
import sys
from pathlib import Path

from rich.console import Console

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.chaos.director import Director
from tests.chaos.score import Score


def run(faults: int, seed: int, seconds: float, console: Console) -> Score:
    with console.status(f"seed {seed}") as line:
        director = Director(seed, lambda text: line.update(f"seed {seed}: {text}"))
        try:
            director.run(faults, seconds)
        finally:
            director.close()
    if director.score.violations():
        console.print(f"logs are in {director.logs}")
    return director.score


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=200, help="kill -9 and SIGSTOP together [200]")
    parser.add_argument("--seed", type=int, default=None, help="a number an earlier run printed [random]")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after that long [600]")
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    logging.getLogger("kvcellar").setLevel(logging.ERROR)  # that the server goes away is no news here
    console = Console()
    console.print(f"seed {seed}, {options.faults} faults")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    try:
        score = run(options.faults, seed, options.seconds, console)
    except KeyboardInterrupt:
        return 130
    console.print(score.table())
    violations = score.violations()
    for violation in violations[:50]:
        console.print(violation, markup=False, highlight=False, style="red")
    console.print("FAILED" if violations else "ok", style="bold red" if violations else "bold green")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
