"""The folder of shared memory that one server owns: whose it is, and what there is room for.

Two servers never share a folder (flock). One that holds anything but no lock is refused: it is never guessed
whose files they are. Whatever in it is not named like ours is left alone. Knows nothing of racks.

    FOLDER/lock                          held while a server lives; says that the folder is ours
    FOLDER/roster, roster.draft          the engines that a server knew, see server/members.py
    FOLDER/<namespace id>/               racks, see arena.py
"""

import contextlib
import fcntl
import os
import re
import shutil
from pathlib import Path

from kvcellar.errors import StartupError
from kvcellar.folders import check_parent

_LOCK = "lock"
_FILES = (_LOCK, "roster", "roster.draft")

_SMALLEST = 1 << 20  # as --memory has it


def lock_folder(folder: Path) -> int:
    """Make the folder ours, and alone ours: as long as the descriptor is open that this returns."""
    fd = _open_lock(folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_gone = os.fstat(fd).st_nlink == 0
    except OSError:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise StartupError(
            f"another server (pid {owner}) is using {folder}; stop it, or choose another --name or --folder"
        ) from None
    if is_gone:  # removed with all that was here, between our opening and locking it
        os.close(fd)
        return lock_folder(folder)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(fd)
        raise StartupError(
            f"cannot use {folder}: {error.strerror}; free some of it, or choose another --folder"
        ) from None
    return fd


def _open_lock(folder: Path) -> int:
    """The lock's file, made with the folder if there is none. StartupError for a folder that is not ours."""
    try:
        folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        check_parent(folder.parent, "choose another --folder")
        folder.mkdir(mode=0o700, exist_ok=True)
        if any(folder.iterdir()) and not (folder / _LOCK).exists():
            raise StartupError(
                f"{folder} holds files and none of KVCellar's; nothing was touched: "
                "choose another with --folder"
            )
        status = folder.lstat()
        if folder.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise StartupError(
                f"{folder} must be a folder of uid {os.geteuid()}, mode 0700; remove it, or choose --folder"
            )
        return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartupError(f"cannot use {folder}: {error.strerror}; choose another with --folder") from None


def remove_folder(folder: Path) -> int:
    """Delete what a stopped server left in shared memory; returns the bytes freed."""
    lock = lock_folder(folder)
    try:
        freed = _left_bytes(folder)
        for path in namespace_folders(folder):
            shutil.rmtree(path)
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody keeps files of his own there
            folder.rmdir()
    finally:
        os.close(lock)
    return freed


def namespace_folders(folder: Path) -> list[Path]:
    found = (path for path in folder.iterdir() if re.fullmatch("[0-9a-f]{32}", path.name))
    return sorted(path for path in found if path.is_dir() and not path.is_symlink())


def available_bytes(folder: Path) -> int:
    """What a server in this folder could use: free on its file system, plus what an earlier server left
    there.
    """
    existing = folder
    try:
        while not existing.exists():
            existing = existing.parent
        status = os.statvfs(existing)
    except OSError as error:
        raise StartupError(f"cannot use {folder}: {error.strerror}; choose another with --folder") from None
    return status.f_bavail * status.f_frsize + _left_bytes(folder)


def default_limit(folder: Path) -> int:
    """Half of what is available. What an earlier server left stays within it, however much others took
    meanwhile.
    """
    limit = max(available_bytes(folder) // 2, _left_bytes(folder))
    if limit < _SMALLEST:
        raise StartupError(
            f"{folder} has no room: {available_bytes(folder) >> 10} KiB are left. Free some, or choose "
            "another --folder"
        )
    return limit


def _left_bytes(folder: Path) -> int:
    """What an earlier server left."""
    left = 0
    with contextlib.suppress(OSError):
        paths = [folder / name for name in _FILES]
        paths += [path for found in namespace_folders(folder) for path in found.rglob("*")]
        left = sum(path.stat().st_blocks * 512 for path in paths if path.is_file())
    return left


def check_space(folder: Path, limit: int) -> None:
    available = available_bytes(folder)
    if limit > available:
        raise StartupError(
            f"--memory {limit / 2**30:.2f}GiB does not fit: {folder} has {available / 2**30:.2f}GiB left. "
            "Lower --memory, enlarge it (mount -o remount,size=... /dev/shm), or choose another --folder"
        )
