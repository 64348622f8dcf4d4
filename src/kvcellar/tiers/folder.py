"""The folder of the disk engine: ours alone, locked, and large enough.

A folder that holds anything but no mark of ours is refused: it is never guessed whose files they are. In a
marked folder only files named like crates are ours; whatever else lies there is left alone.
"""

import contextlib
import fcntl
import logging
import os
from pathlib import Path

from kvcellar.errors import StartupError
from kvcellar.slab import PAGE
from kvcellar.tiers.crate import NAME_PATTERN, remove_files

log = logging.getLogger(__name__)

MARK = "kvcellar-disk"
_MARK_TEXT = (
    "A disk tier of KVCellar, format 1. To give the space back, stop the server and delete this folder.\n"
)
_SMALLEST = 1 << 20


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_ours()
            self._lock = os.open(path / MARK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(
                f"disk tier: cannot use {path}: {error.strerror}; choose another folder"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(self._lock, _MARK_TEXT.encode(), 0)
        except BlockingIOError:
            os.close(self._lock)
            raise StartupError(
                f"disk tier: another server is using {path}; stop it, or give each server a folder of its own"
            ) from None
        except OSError as error:
            os.close(self._lock)
            raise StartupError(
                f"disk tier: cannot write to {path}: {error.strerror}; free some space"
            ) from None

    def _check_ours(self) -> None:
        status = self.path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise StartupError(
                f"disk tier: {self.path} must belong to uid {os.geteuid()} and be writable by nobody else; "
                f"chown and chmod it, or choose another folder"
            )
        mark = self.path / MARK
        if not mark.exists() and any(self.path.iterdir()):
            raise StartupError(
                f"disk tier: {self.path} holds files that are not KVCellar's; choose an empty folder"
            )

    def check_size(self, wanted: int | None) -> int:
        """The capacity: what was asked for, if it fits. By default half of what is free, or what an earlier
        server left if that is more: it must not go because others took space meanwhile. Nor must a restart
        fail by that: what did fit once is used as far as there is room.
        """
        status, ours = os.statvfs(self.path), self._ours()
        available = status.f_bavail * status.f_frsize + sum(one.st_blocks * 512 for one in ours)
        if wanted is None:
            wanted = max(available // 2, PAGE + sum(one.st_size for one in ours))  # a page for the mark
        elif wanted > available:
            has = f"{self.path} has {available / 2**30:.2f}GiB"
            if not ours or wanted > status.f_blocks * status.f_frsize:
                raise StartupError(
                    f"disk tier: a size of {wanted / 2**30:.2f}GiB does not fit: {has}; lower the size, or "
                    "choose another folder"
                )
            log.warning("disk tier: a size of %.2fGiB does not fit any more: %s", wanted / 2**30, has)
        if wanted < _SMALLEST:
            raise StartupError(f"disk tier: a size of {wanted} bytes is too small; at least {_SMALLEST}")
        return wanted // PAGE * PAGE

    def _ours(self) -> list[os.stat_result]:
        return [path.lstat() for path in self.path.iterdir() if NAME_PATTERN.fullmatch(path.name)]

    def crate_numbers(self) -> list[int]:
        """Of crates that were finished; the rest of what an earlier server began is removed."""
        matches = [match for path in self.path.iterdir() if (match := NAME_PATTERN.fullmatch(path.name))]
        kinds: dict[int, set[str]] = {}
        for match in matches:
            kinds.setdefault(int(match[1]), set()).add(match[2])
        for number in [number for number, found in kinds.items() if found != {"data", "index"}]:
            del kinds[number]
            self.remove_crate(number)
        return sorted(kinds)

    def remove_crate(self, number: int) -> None:
        try:
            remove_files(self.path, number)
        except OSError as error:
            raise StartupError(
                f"disk tier: cannot remove crate {number} of {self.path}: {error.strerror}; delete it by hand"
            ) from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._lock)
