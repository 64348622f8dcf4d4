"""A process of an engine in a fault run: its scheduler, one of its ranks, or both.

    python -m tests.chaos.engine ROLE SERVER SESSION SPACE DOOR [RANK]

DOOR is the socket on which ranks reach their scheduler. Orders come on stdin: idle, go on, cut, close. When
stdin ends, whoever directed the run is gone, and so is this process.
"""

import logging
import os
import sys
import threading
from pathlib import Path

from tests.chaos.links import remember_links
from tests.chaos.planner import Planner
from tests.chaos.rank import Rank
from tests.chaos.report import Reporter


def _obey(planner: Planner | None, worker: Rank | None, closed: threading.Event) -> None:
    for line in sys.stdin:
        match line.strip():
            case "idle" if planner is not None:
                planner.stop_asking.set()
            case "go on" if planner is not None:
                planner.stop_asking.clear()
            case "cut" if worker is not None:
                worker.cut_soon.set()  # in the middle of a copy
            case "cut" if planner is not None:
                planner.cut_soon.set()
            case "close":
                closed.set()
    os._exit(0)


def main() -> None:
    role, server, session, space, door, *rank = sys.argv[1:]
    logging.basicConfig(level="WARNING", format=f"%(asctime)s {role} {session} %(levelname)s %(message)s")
    remember_links()
    reporter, closed = Reporter(), threading.Event()
    planner = Planner(Path(server), session, space, Path(door), reporter) if role != "rank" else None
    worker = Rank(Path(server), session, int(rank[0]), space, reporter) if rank else None
    threading.Thread(target=_obey, args=(planner, worker, closed), daemon=True).start()
    if planner is None:
        assert worker is not None
        worker.serve(Path(door))
        return
    if worker is not None:
        threading.Thread(target=worker.serve, args=(Path(door),)).start()
    planner.run(closed)


if __name__ == "__main__":
    main()
