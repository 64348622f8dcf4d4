"""make chaos: kill and stop servers, schedulers and ranks at random, under load, and count what goes wrong.

    python tests/chaos/run.py [--faults 200] [--seed N] [--seconds 600]

Prints its seed, which gives the same schedule of faults again. Exit code 1 when anything was violated.
"""

import logging
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.campaign import main
from tests.chaos.director import Director

if __name__ == "__main__":
    logging.getLogger("kvcellar").setLevel(logging.ERROR)  # that the server goes away is no news here
    sys.exit(main(str(__doc__), Director, "faults", "kill -9 and SIGSTOP together", count=200, seconds=600))
