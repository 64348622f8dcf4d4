"""A process of an engine in a fault run: its scheduler, one of its ranks, or both.

    python -m tests.chaos.engine ROLE SERVER SESSION SPACE DOOR [RANK]

DOOR is the socket on which ranks reach their scheduler. Orders come on stdin: idle, cut, close. When stdin
ends, whoever directed the run is gone, and so is this process.
"""

import contextlib
import logging
import os
import socket
import sys
import threading
import weakref
from pathlib import Path

from kvcellar.client.link import Link
from tests.chaos.planner import Planner
from tests.chaos.rank import Rank
from tests.chaos.report import Reporter

_links: "weakref.WeakSet[Link]" = weakref.WeakSet()


def _remember_links() -> None:
    """So that `cut` can break the connections of a process that lives on."""
    plain = Link.__init__

    def remembering(self: Link, sock: socket.socket) -> None:
        plain(self, sock)
        _links.add(self)

    Link.__init__ = remembering  # type: ignore[method-assign]


def _cut() -> None:
    for link in list(_links):
        with contextlib.suppress(OSError):
            link.sock.shutdown(socket.SHUT_RDWR)


def _obey(planner: Planner | None, closed: threading.Event) -> None:
    for line in sys.stdin:
        match line.strip():
            case "idle" if planner is not None:
                planner.stop_asking.set()
            case "cut":
                _cut()
            case "close":
                closed.set()
    os._exit(0)


def main() -> None:
    role, server, session, space, door, *rank = sys.argv[1:]
    logging.basicConfig(level="WARNING", format=f"%(asctime)s {role} {session} %(levelname)s %(message)s")
    _remember_links()
    reporter, closed = Reporter(), threading.Event()
    planner = Planner(Path(server), session, space, Path(door), reporter) if role != "rank" else None
    threading.Thread(target=_obey, args=(planner, closed), daemon=True).start()
    worker = Rank(Path(server), session, int(rank[0]), space, reporter) if rank else None
    if planner is None:
        assert worker is not None
        worker.serve(Path(door))
        return
    if worker is not None:
        threading.Thread(target=worker.serve, args=(Path(door),)).start()
    planner.run(closed)


if __name__ == "__main__":
    main()
