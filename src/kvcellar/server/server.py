"""The server's life: open, adopt, listen, serve, drain, close.

One asyncio loop decides everything; threads only make files. Files stay behind on purpose: the next server
adopts them.
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import stat
import time
from pathlib import Path

from kvcellar import __version__
from kvcellar.arena import Arena, default_limit
from kvcellar.config import Settings
from kvcellar.epoch import new_epoch
from kvcellar.errors import CellarError, Draining, Forbidden, StartupError
from kvcellar.folders import check_parent
from kvcellar.ledger import Ledger
from kvcellar.server.connection import Connection
from kvcellar.server.descriptors import Descriptors
from kvcellar.server.members import Members
from kvcellar.server.operations import Caller, Operations
from kvcellar.server.status import make_report
from kvcellar.server.steward import Steward
from kvcellar.server.sweep import sweep
from kvcellar.server.tiers import Tiers
from kvcellar.sketch import make_sketch
from kvcellar.tiers.registry import parse_spec
from kvcellar.wire import CONTROL, DESCRIPTOR, Peer, encode
from kvcellar.wire import messages as m
from kvcellar.wire.report import StatusReport

log = logging.getLogger(__name__)

# A connection must say what it is for, and a descriptor connection be over, within this time.
_OPENING_S = 5.0
_MAX_OPENING = 256


class Server:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._started = time.monotonic()
        self._stop = asyncio.Event()
        self._hurry = False
        self._opening: set[asyncio.Task[None]] = set()
        self._connections: set[Connection] = set()
        memory = settings.memory or default_limit(settings.folder_path)
        self._arena = Arena(settings.folder_path, memory)
        sketch = make_sketch()
        self._ledger = Ledger(
            epoch=new_epoch(),
            hold_limit=memory * settings.hold_percent // 100,
            sketch=sketch,
        )
        self._members = Members(self._ledger, self._arena.folder / "roster")
        self._steward = Steward(self._ledger, self._arena, self._members, time.monotonic)
        self._descriptors = Descriptors(self._arena, self._members, self._steward, sketch)
        self._operations = Operations(self._ledger, self._members, self._steward, self.report)
        self._tiers: Tiers | None = None

    async def serve(self) -> None:
        """Run until told to stop. On return nothing is left running; the memory stays for the next server."""
        _raise_limit()
        try:
            await self._open_tiers()
            found = self._steward.adopt()
            self._members.begin_grace(self._settings.grace_seconds)
            listener = _listen(self._settings.socket_path, shared=bool(self._settings.allow_uids))
        except BaseException:
            if self._tiers is not None:
                self._tiers.close()
            self._arena.close()
            self._descriptors.close()
            raise
        self._catch_signals()
        accepting = asyncio.create_task(self._accept(listener))
        log.info(
            "kvcellar %s ready on %s: up to %d MiB%s in %s, %d chunks found again",
            __version__,
            self._settings.socket_path,
            self._arena.limit >> 20,
            "" if self._settings.memory else " (half of what is free)",
            self._arena.folder,
            found,
        )
        await self._stop.wait()
        # 1. Nobody new: the socket goes first, so that a successor can take its place.
        accepting.cancel()
        listener.close()
        with contextlib.suppress(OSError):  # the next one replaces it, or says what is in its way
            self._settings.socket_path.unlink()
        # 2. Nothing new: what is being written may be finished, within the deadline.
        await self._drain()
        # 3. Everybody out.
        for connection in list(self._connections):
            connection.send(m.Goodbye())
            connection.close()
        for task in self._opening:
            task.cancel()
        if self._tiers is not None:
            self._tiers.close()
        await self._steward.close()
        self._descriptors.close()
        if self._tiers is None or self._tiers.is_idle:
            self._arena.close()
        # Else a call that hangs may still write to a slab: the lock goes when the process is really gone.
        log.info("stopped; %d MiB stay in %s for the next server", self._arena.used >> 20, self._arena.folder)

    def stop(self) -> None:
        self._stop.set()

    def report(self) -> StatusReport:
        return make_report(
            self._ledger,
            self._arena,
            self._members,
            socket=str(self._settings.socket_path),
            uptime_s=time.monotonic() - self._started,
            draining=self._operations.draining,
            tiers=self._tiers.reports() if self._tiers is not None else [],
        )

    async def _open_tiers(self) -> None:
        specs = [parse_spec(url) for url in self._settings.tier_urls]
        if specs:
            self._tiers = Tiers(specs, self._ledger, self._arena, self._members, self._steward)
            await self._tiers.start()
            self._operations.prefetch = self._tiers.prefetch

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self._hurry = self._stop.is_set()  # the second signal: do not wait for anybody
        self._stop.set()

    async def _drain(self) -> None:
        self._operations.draining = self._steward.draining = True
        give_up = time.monotonic() + self._settings.drain_seconds
        while self._is_written_to() and time.monotonic() < give_up and not self._hurry:
            await asyncio.sleep(0.02)
        if self._tiers is not None:
            await self._tiers.drain(lambda: self._hurry or time.monotonic() >= give_up)
        await sweep(self._ledger)  # or the next server would find what was being cleared

    def _is_written_to(self) -> bool:
        return any(lease.writing for s in self._ledger.sessions.values() for lease in s.leases.values())

    # -- connections ------------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors: wait for some to come back
                log.warning("cannot accept: %s", error.strerror)
                await asyncio.sleep(0.1)
                continue
            if len(self._opening) >= _MAX_OPENING:
                sock.close()
                continue
            task = asyncio.create_task(self._open(sock))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, sock: socket.socket) -> None:
        """Find out who it is and what it wants; whatever goes wrong ends with a closed socket."""
        handed_over = False
        peer = None
        try:
            async with asyncio.timeout(_OPENING_S):
                sock.setblocking(False)
                peer = Peer(sock)
                self._check_uid(peer)  # at once: whoever may not attach takes no place from those who may
                loop = asyncio.get_running_loop()
                kind = await loop.sock_recv(sock, 1)
                if kind == DESCRIPTOR:
                    await self._descriptors.serve(sock, peer)
            # Not on the clock, and its own from now on: it may attach, and its pidfd be watched, before this
            # task hears that it was handed over.
            if kind == CONTROL:
                handed_over = True
                connection = Connection(peer, self._operations, self._attach, self._on_lost)
                self._connections.add(connection)
                await loop.connect_accepted_socket(lambda: connection, sock)
        except CellarError as error:
            with contextlib.suppress(OSError):
                sock.send(encode(m.Refused(error.code, str(error))))
        except (OSError, TimeoutError):
            pass  # it went away, or never said a word
        finally:
            if not handed_over:
                sock.close()
                if peer is not None:
                    peer.close()

    def _check_uid(self, peer: Peer) -> None:
        if peer.uid not in (0, os.geteuid(), *self._settings.allow_uids):
            raise Forbidden(f"uid {peer.uid} may not attach; start the server with --allow-uids {peer.uid}")

    def _attach(self, hello: m.Hello, connection: Connection) -> tuple[Caller, m.Welcome]:
        newest = self._ledger.newest_lease
        has_tiers = self._tiers is not None
        welcome = m.Welcome(m.PROTOCOL_VERSION, self._ledger.epoch, __version__, newest, has_tiers)
        if hello.role == "admin":
            return Caller(hello.role, None, owns=connection.peer.uid in (0, os.geteuid())), welcome
        if self._operations.draining:
            raise Draining("the server is shutting down")
        connection.member = self._members.attach(hello, connection.peer, connection)
        return Caller(hello.role, connection.member), welcome

    def _on_lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if connection.member is None:
            connection.peer.close()
        else:
            self._members.lost(connection.member, connection)


def _raise_limit() -> None:
    """Each slab is a descriptor, and the usual limit is that of a shell."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _listen(path: Path, *, shared: bool) -> socket.socket:
    """A private socket, or one that others can reach, of whom the uid is checked then. A dead server's
    leftover is replaced; a live one, or any other file, is not.
    """
    try:
        path.parent.mkdir(mode=0o711 if shared else 0o700, parents=True, exist_ok=True)
        check_parent(path.parent, "choose another --socket")
        if shared and not path.parent.stat().st_mode & stat.S_IXOTH:
            log.warning("--allow-uids: others cannot reach the socket; chmod o+x %s", path.parent)
        if path.exists() or path.is_symlink():
            _remove_leftover(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        old = os.umask(0o111 if shared else 0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(old)
        listener.listen(128)
        listener.setblocking(False)
        return listener
    except OSError as error:
        raise StartupError(
            f"cannot listen on {path}: {error.strerror or error}; choose another --socket"
        ) from None


def _remove_leftover(path: Path) -> None:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise StartupError(f"{path} exists and is not a socket; remove it, or choose another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.settimeout(1.0)
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise StartupError(
        f"a server is listening on {path} already; stop it, or choose another --name or --socket"
    )
