"""Dial: a connection to the server, and to nobody who took its place.

The folder of our default socket lies in /tmp, where anybody may make it before we do, and an engine may come
before its server. So there only root and we ourselves may serve. Whoever names another socket vouches for it:
in a container, the server's user may be one that has no name there.
"""

import os
import socket
from pathlib import Path

from kvcellar.config import own_folder
from kvcellar.errors import Disconnected
from kvcellar.wire import peer_uid


def dial(path: Path, timeout: float) -> socket.socket:
    """Raises OSError if nobody is there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout)
        sock.connect(str(path))
        uid = peer_uid(sock)
        if path.parent == own_folder() and uid not in (0, os.geteuid()):
            raise Disconnected(
                f"it is served by uid {uid}, and only we and root may: remove {path.parent}, which somebody "
                "else made, or reach the server by another path"
            )
    except BaseException:
        sock.close()
        raise
    return sock
