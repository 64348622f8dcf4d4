"""Folders that nobody else can put something else in the place of."""

import os
import stat
from pathlib import Path

from kvcellar.errors import StartupError


def check_parent(folder: Path, advice: str) -> None:
    """Whoever can write to it can replace what lies in it: pose as the server, or lead what we write to
    another file.
    """
    status = folder.stat()
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    # /dev/shm and /tmp are root's, who has no name in a user namespace.
    owners = {0, os.geteuid()} | ({_overflow_uid()} if is_sticky else set())
    if status.st_uid not in owners:
        raise StartupError(
            f"{folder} belongs to uid {status.st_uid}, who could replace what is in it; {advice}"
        )
    if status.st_mode & 0o022 and not is_sticky:
        raise StartupError(f"others can write to {folder}; chmod go-w it, or {advice}")


def _overflow_uid() -> int:
    return int(Path("/proc/sys/kernel/overflowuid").read_text())
