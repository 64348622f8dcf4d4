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
    open_to_others = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in (0, os.geteuid()) or open_to_others:
        raise StartupError(f"others can write to {folder}; {advice}")
