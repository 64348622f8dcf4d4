"""Folders that nobody else can put something else in the place of."""

import os
import stat
from pathlib import Path

from kvcellar.errors import StartupError

_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def check_parent(folder: Path, advice: str) -> None:
    """Whoever can write to it can replace what lies in it: pose as the server, or lead what we write to
    another file. So can whoever made the link to it.
    """
    status = folder.stat()
    owners = {0, os.geteuid()}
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    # /dev/shm and /tmp are root's, who has no name in a user namespace. What lies in them may be of the user
    # that is called nobody.
    if is_sticky and not folder.resolve().parent.stat().st_mode & _OF_OTHERS:
        owners.add(_overflow_uid())
    for uid in (folder.lstat().st_uid, status.st_uid):
        if uid not in owners:
            raise StartupError(f"{folder} belongs to uid {uid}, who could replace what is in it; {advice}")
    if status.st_mode & _OF_OTHERS and not is_sticky:
        raise StartupError(f"others can write to {folder}; chmod go-w it, or {advice}")


def _overflow_uid() -> int:
    return int(Path("/proc/sys/kernel/overflowuid").read_text())
