"""Who is at the other end of a unix socket, whether that process still lives, and descriptors between the
two.

A process is watched by its pidfd, which becomes readable when the process is gone and its files are closed.
SO_PEERPIDFD gives one even across pid namespaces, where the pid itself reads 0; kernels before 6.5 have only
pidfd_open. Knows nothing of sessions.
"""

import array
import contextlib
import os
import select
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from kvcellar.errors import Disconnected

_SO_PEERPIDFD = 77  # no constant in Python 3.11

CONTROL = b"C"
DESCRIPTOR = b"F"


class Process(NamedTuple):
    """A process, told apart from a later one with the same pid."""

    pid: int  # 0 where it lives in a pid namespace we cannot see into
    started: int  # clock ticks since boot; 0 if unknown
    inode: int  # of its pidfd, unique per process on kernels with pidfs; 0 elsewhere

    def same_as(self, other: "Process") -> bool:
        """Surely the same process. When in doubt, no."""
        if self.inode and other.inode:
            return self.inode == other.inode
        return self.pid != 0 and self.started != 0 and self[:2] == other[:2]


class Peer:
    """The process that connected; owns a pidfd if the kernel gives one."""

    def __init__(self, sock: socket.socket) -> None:
        pid, self.uid = _credentials(sock)
        self.pidfd = _peer_pidfd(sock, pid)
        inode = os.fstat(self.pidfd).st_ino if self.pidfd is not None and _is_of_pidfs(self.pidfd) else 0
        self.process = Process(pid, start_of(pid), inode)

    def is_gone(self) -> bool:
        """Known to be dead. Without a pidfd nothing is known."""
        return self.pidfd is not None and is_readable(self.pidfd)

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def peer_uid(sock: socket.socket) -> int:
    return _credentials(sock)[1]


def _credentials(sock: socket.socket) -> tuple[int, int]:
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def is_readable(fd: int) -> bool:
    poll = select.poll()  # not select(): a server has more than 1024 files open
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def open_process(pid: int, started: int) -> int | None:
    """A pidfd for the process that had this pid and start time, or None if it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    if start_of(pid) != started:  # read after opening: now the pid cannot change hands under us
        os.close(pidfd)
        return None
    return pidfd


def start_of(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()  # a name may end inside a letter
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[19])


def _peer_pidfd(sock: socket.socket, pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    if pid:
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None


def _is_of_pidfs(pidfd: int) -> bool:
    """So its inode is the process's own. Before Linux 6.9 it was the one that all files without a file system
    share.
    """
    try:
        other = os.eventfd(0)
    except OSError:
        return False
    try:
        return os.fstat(pidfd).st_dev != os.fstat(other).st_dev
    finally:
        os.close(other)


def receive_with_fd(sock: socket.socket, limit: int) -> tuple[bytes, int | None]:
    """One read of data and at most one descriptor, which is not inherited by children.

    socket.recv_fds drops its flags in Python 3.11, MSG_CMSG_CLOEXEC among them, so this calls recvmsg itself.
    """
    space = socket.CMSG_SPACE(4 * array.array("i").itemsize)
    data, control, flags, _ = sock.recvmsg(limit, space, socket.MSG_CMSG_CLOEXEC)
    received = array.array("i")
    for level, kind, payload in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
    if not data or flags & socket.MSG_CTRUNC or len(received) > 1:
        for fd in received:
            os.close(fd)
        raise Disconnected("the descriptor connection broke off")
    return data, received[0] if received else None
