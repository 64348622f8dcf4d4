"""make fuzz: say a million wrong things to a server, beside a client that behaves, and count what comes back.

    python tests/fuzz/run.py [--frames 1000000] [--seed N] [--seconds 900]

Prints its seed. Exit code 1 when anything was violated: a crash, an internal error, a frame that is neither
answered nor ends its connection, memory that grows, descriptors or slots that leak, or a healthy client that
had to wait or was told something wrong.
"""

import argparse
import secrets
import signal
import sys
from pathlib import Path

from rich.console import Console

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fuzz.director import Director
from tests.fuzz.score import Score


def run(frames: int, seed: int, seconds: float, console: Console) -> Score:
    with console.status(f"seed {seed}") as line:
        director = Director(seed, lambda text: line.update(f"seed {seed}: {text}"))
        try:
            director.run(frames, seconds)
        finally:
            director.close()
    if director.score.violations():
        console.print(f"logs are in {director.logs}")
    return director.score


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--frames", type=int, default=1_000_000, help="how many to say [1000000]")
    parser.add_argument("--seed", type=int, default=None, help="a number an earlier run printed [random]")
    parser.add_argument("--seconds", type=float, default=900.0, help="give up after that long [900]")
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    console = Console()
    console.print(f"seed {seed}, {options.frames:,} frames")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    try:
        score = run(options.frames, seed, options.seconds, console)
    except KeyboardInterrupt:
        return 130
    for table in score.tables():
        console.print(table)
    violations = score.violations()
    for violation in violations[:50]:
        console.print(violation, markup=False, highlight=False, style="red")
    console.print("FAILED" if violations else "ok", style="bold red" if violations else "bold green")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
