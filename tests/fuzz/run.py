"""make fuzz: say a million wrong things to a server, beside a client that behaves, and count what comes back.

    python tests/fuzz/run.py [--frames 1000000] [--seed N] [--seconds 900]

Prints its seed. Exit code 1 when anything was violated: a crash, an internal error, a frame that is neither
answered nor ends its connection, memory that grows, descriptors or slots that leak, or a healthy client that
had to wait or was told something wrong.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.campaign import main
from tests.fuzz.director import Director

if __name__ == "__main__":
    sys.exit(main(str(__doc__), Director, "frames", "how many to say", count=1_000_000, seconds=900))
