"""The scheduler side of an engine: finds chunks, reserves places, gives back.

A lookup is one round trip in the caller's thread, bounded by its timeout. Everything else is queued and
leaves together at `flush`; what was reserved arrives at a later `collect`. Nothing here ever waits for
a server that is away: without one, or with one that fell silent, a lookup is a miss and a flush drops what it
asks for; what it gives back is kept for when the same server is there again. A thread watches the connection
and reconnects in the background, also while nobody asks.

Used by one thread. Leases given to ranks are theirs: this side may release or abort only what it has told no
rank.
"""

import contextlib
import itertools
import logging
import math
import select
import socket
import threading
import time
from collections.abc import Hashable, Sequence
from pathlib import Path

import msgspec

from kvcellar.client.backoff import keep_trying
from kvcellar.client.grants import Asked, Expected, Grant, fitting, granted, miss, packed
from kvcellar.client.link import Link
from kvcellar.client.slabs import fetch_sketch
from kvcellar.epoch import epoch_of
from kvcellar.errors import CellarError, Disconnected, Unavailable
from kvcellar.identity import ChunkKey, Namespace, window_chunks
from kvcellar.wire import messages as m

log = logging.getLogger(__name__)

# Leases named when coming back to the same server. More than an engine can have open; the oldest are surely
# over.
_MAX_KNOWN = 1 << 16
_CONNECT_S = 2.0
_FLUSH_S = 0.2
_MAX_EXPECTED = 16  # at one flush: whoever steps an engine waits until they are sent
_OWED_S = 2.0  # no answer takes so long; half of it, if memory must be made first
# What was granted, and not heard of for so long, is given up with the connection: an engine that has no
# requests makes no steps. Longer than a step takes, and than a lookup may.
_UNHEARD_S = 15.0
_WATCH_MS = 500  # how often that is looked at

_GRANTING = m.Lookup | m.Reserve | m.Abandon  # the last one may cross a Brought


class SchedulerClient:
    def __init__(
        self, path: Path, session: str, namespace: Namespace, label: str = "", told: str = ""
    ) -> None:
        """`told`: the trouble that people know of already."""
        self.path = path
        self.namespace = namespace
        self._hello = m.Hello(m.PROTOCOL_VERSION, "scheduler", session, label=label)
        self._link: Link | None = None  # as the thread that reconnects has it
        self._used: Link | None = None  # the one that the caller's thread asked last
        self._epoch = 0
        self._known: dict[int, None] = {}  # leases, oldest first
        self._queue: list[tuple[m.Operation, Hashable]] = []
        self._sent: dict[int, Sequence[tuple[m.Operation, Hashable]]] = {}  # by request id
        self._granted: list[tuple[Hashable, Grant]] = []
        self._brought: dict[int, Grant | None] = {}  # by ticket: what tiers had, None until it is there
        self._expected: dict[Expected, None] = {}  # to be told at a flush
        self._silent = False  # the last lookup got no answer: do not wait for another before something comes
        # Guards namespace, _link and _known against the thread that reconnects.
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_connected, args=(told,), name="kvcellar-scheduler", daemon=True
        )
        self._thread.start()

    # -- asking -----------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey], timeout: float = 0.05, wait: float = 0.0) -> Grant:
        """What is here of these chunks, pinned for every rank. A miss, with a reason, whenever it is not
        sure.

        `wait`: seconds for which the rest would be worth waiting for, if tiers have it. Then the grant may
        have a ticket, to be given to `brought` until that has an answer, or to `give_up`.
        """
        if not keys:
            return miss("")  # a prompt shorter than a chunk; the protocol has no empty lookup
        deadline = time.monotonic() + timeout
        wait_ms = min(int(wait * 1000), m.MAX_WAIT_MS)
        asked, tag = m.Lookup(self.namespace.id, packed(keys), wait_ms), Asked()
        try:
            link = self._current_link()
            if self._is_nowhere(link, keys):
                self._queue.append((asked, Asked(abandoned=True)))  # for the server's books
                return miss("")
            if self._is_silent(link):
                return miss("silent")
            self._send(link, ((asked, tag),), timeout)
            while tag.grant is None:
                if not self._receive(link, deadline):
                    tag.abandoned = self._silent = True
                    return miss("deadline_exceeded")
        except Unavailable as error:
            return miss(error.code)
        return tag.grant

    def _is_nowhere(self, link: Link, keys: Sequence[ChunkKey]) -> bool:
        """Surely not in memory, and there are no tiers: no need to wait for the server to say so."""
        if link.sketch is None:
            return False
        # Without a window, there is no hit without the first chunk.
        first = any(window_chunks(one, self.namespace.chunk_tokens) is None for one in self.namespace.groups)
        return not any(map(link.sketch.may_have, keys[:1] if first else keys))

    def brought(self, ticket: int) -> Grant | None:
        """The whole hit, under a lease of its own beside that of the lookup, or a miss if there is no more
        than that. None: not yet. Never waits.
        """
        with contextlib.suppress(Unavailable):
            link = self._current_link()
            while self._receive(link, 0.0):
                pass
        grant = self._brought.get(ticket, miss("unknown_ticket"))
        if grant is not None:
            self._brought.pop(ticket, None)
        return grant

    def give_up(self, ticket: int) -> None:
        """Nobody waits any more: what is brought after all is given back."""
        waits = self._brought.get(ticket, miss("")) is None
        grant = self._brought.pop(ticket, None)
        if waits:
            self._queue.append((m.Abandon(ticket), None))
        elif grant is not None and grant.lease:
            self._return(grant)

    @property
    def has_tiers(self) -> bool:
        """Is it of any use to say what to expect?"""
        link = self._link
        return link is not None and link.has_tiers

    @property
    def is_connected(self) -> bool:
        """As far as is known: what is asked may still get no answer."""
        return self._link is not None

    def expect(self, keys: Sequence[ChunkKey], wait: float) -> Expected:
        """A request with these chunks waits to be scheduled. From the next flush on, the server reads for up
        to `wait` seconds what tiers have of it, and keeps that until `no_longer`, after the lookup.
        """
        wait_ms = max(1, min(int(wait * 1000), m.MAX_WAIT_MS))
        expected = Expected(m.Expect(self.namespace.id, packed(keys), wait_ms))
        self._expected[expected] = None
        return expected

    def no_longer(self, expected: Expected) -> None:
        """It was looked up, or it is gone. If that is so before the flush, the server never hears of it."""
        expected.over = True
        self._expected.pop(expected, None)
        if expected.ticket:
            self._queue.append((m.Abandon(expected.ticket), None))
        expected.ticket = 0

    def reserve(
        self,
        tag: Hashable,
        keys: Sequence[ChunkKey],
        parent: ChunkKey | None,
        groups: Sequence[int] | None = None,
    ) -> None:
        """Ask, at the next flush, for places to write these chunks; `collect` will say (tag, grant)."""
        if not keys:
            self._granted.append((tag, miss("")))
            return
        chosen = tuple(groups) if groups is not None else None
        self._queue.append((m.Reserve(self.namespace.id, packed(keys), parent, chosen), tag))

    def release(self, lease: int, first: int, stop: int) -> None:
        """No rank was told of these chunks, and none will be."""
        if first < stop:  # a hit that is used whole gives nothing back, and needs no message
            self._queue.append((m.Release(lease, first, stop), None))

    def abort(self, lease: int, first: int, stop: int) -> None:
        """No rank was told to write these chunks, and none will be."""
        self._queue.append((m.Abort(lease, first, stop), None))

    def register(self, namespace: Namespace, timeout: float = 0.05) -> None:
        """Work with this namespace from now on, in place of the other. Leases of the other stay good."""
        with self._lock:
            self.namespace = namespace
        with contextlib.suppress(Unavailable):  # it is registered when there is a server again
            link = self._current_link()
            try:
                link.call(m.Register(namespace), timeout, m.Registered)
            except CellarError as error:
                log.debug("connection lost: %s", error)
                self._drop(link)

    def forget(self, lease: int) -> None:
        """Every rank has answered for this lease."""
        with self._lock:
            self._known.pop(lease, None)

    def flush(self) -> None:
        """Send all that is queued, in one message if it fits. Never waits for a server that is away."""
        if not self._queue and not self._expected:
            return
        try:
            link = self._current_link()
            if self._is_silent(link):
                # What frees something must not be lost while the connection stands; what asks can be.
                asking = [tag for op, tag in self._queue if isinstance(op, m.Reserve)]
                self._queue = [pair for pair in self._queue if not isinstance(pair[0], m.Reserve | m.Lookup)]
                self._granted += [(tag, miss("silent")) for tag in asking]
                return
            told = list(itertools.islice(self._expected, _MAX_EXPECTED))
            self._queue += [(expected.op, expected) for expected in told]
            for expected in told:
                del self._expected[expected]
                expected.is_told = True
            while self._queue:
                count = fitting(self._queue)
                batch, self._queue = self._queue[:count], self._queue[count:]
                self._send(link, batch, _FLUSH_S)
        except Unavailable:
            pass  # _give_up has answered for everything that was queued or sent

    def collect(self, timeout: float = 0.0) -> list[tuple[Hashable, Grant]]:
        """Reservations answered since the last call; with a timeout, wait for the first."""
        if not self._sent and not self._granted:
            return []  # nothing can have come
        deadline = time.monotonic() + timeout
        try:
            link = self._current_link()
            while self._receive(link, 0.0 if self._granted else deadline):
                pass
        except Unavailable:
            pass
        answered, self._granted = self._granted, []
        return answered

    def wait_connected(self, timeout: float) -> bool:
        """For start-up and tests; an engine need not wait."""
        deadline = time.monotonic() + timeout
        while not self.is_connected and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.is_connected

    def close(self) -> None:
        """Leave for good: all is given back but the shares of ranks that live on; those are theirs."""
        self._stopped.set()
        self._leave()
        self._thread.join(2 * _CONNECT_S)  # it may just connect once more; then it leaves, however late
        if self._used is not None:
            self._used.close()  # the server hung up, and nobody has asked since

    def _leave(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(CellarError):
                link.call(m.Leave(), _FLUSH_S, m.Settled)
            _hang_up(link)

    # -- the connection ---------------------------------------------------------------------------------

    def _current_link(self) -> Link:
        link = self._link
        if link is not self._used:  # lost, and perhaps found again, behind our back
            if self._used is not None:
                self._used.close()
            self._used = link
            self._give_up(queued=False)
        if link is None:
            self._give_up(queued=True)
            raise Disconnected("no server")
        return link

    def _send(self, link: Link, ops: Sequence[tuple[m.Operation, Hashable]], timeout: float) -> None:
        try:
            request_id = link.send(tuple(op for op, _ in ops), timeout)
        except Unavailable:
            self._sent[0] = ops  # no request has this id
            self._drop(link)
            raise
        self._sent[request_id] = ops
        if any(isinstance(op, _GRANTING) for op, _ in ops):
            link.silent_since = link.silent_since or time.monotonic()

    def _is_silent(self, link: Link) -> bool:
        """Is there no use in asking? Not if something has come by now."""
        since = link.silent_since
        late = self._silent or (since and time.monotonic() - since > _OWED_S)
        return bool(late) and not self._receive(link, 0.0)

    def _receive(self, link: Link, deadline: float) -> bool:
        """Take in what has arrived; False if nothing did by the deadline."""
        try:
            messages = link.receive(deadline)
        except CellarError as error:
            log.debug("connection lost: %s", error)
            self._drop(link)
            raise Disconnected(str(error)) from None
        with self._lock:
            if self._link is link:
                for message in messages:
                    self._on_message(message)
                if messages:
                    owes = any(isinstance(op, _GRANTING) for ops in self._sent.values() for op, _ in ops)
                    link.silent_since = time.monotonic() if owes else 0.0
                return bool(messages)
        # Given up meanwhile: what it granted, the server takes back, since the next Hello does not name it.
        self._drop(link)
        raise Disconnected("another connection has taken its place")

    def _on_message(self, message: m.FromServer) -> None:
        self._silent = False
        if isinstance(message, m.Reply):
            asked = self._sent.pop(message.id, ())
            for (_, tag), result in zip(asked, message.results, strict=False):
                self._on_result(tag, result)
        elif isinstance(message, m.Brought):
            self._on_brought(message)

    def _on_result(self, tag: Hashable, result: m.Result) -> None:
        if isinstance(result, m.Failure):
            log.debug("the server refused: %s", result.message)
        grant = granted(result)
        self._know(grant.lease)
        if isinstance(tag, Asked):
            tag.grant = grant
            if grant.ticket:
                self._brought[grant.ticket] = None
            if tag.abandoned:
                # Said, and not only ignored: what tiers bring after all is heard before this is answered, and
                # given back. An engine that asks nothing else would not read of it.
                self.give_up(grant.ticket)
                if grant.lease:
                    self._return(grant)
        elif isinstance(tag, Expected):
            tag.ticket = grant.ticket
            if tag.over:
                self.no_longer(tag)
        elif tag is not None:
            self._granted.append((tag, grant))

    def _on_brought(self, message: m.Brought) -> None:
        grant = granted(message)
        self._know(grant.lease)
        if message.ticket in self._brought:
            self._brought[message.ticket] = grant
        elif grant.lease:
            self._return(grant)  # given up meanwhile

    def _return(self, grant: Grant) -> None:
        self.release(grant.lease, 0, grant.chunks)
        self.forget(grant.lease)

    def _know(self, lease: int) -> None:
        if lease:
            with self._lock:
                self._known[lease] = None
                if len(self._known) > _MAX_KNOWN:
                    del self._known[next(iter(self._known))]

    def _drop(self, link: Link) -> None:
        """This connection is over. Whatever was asked on it is a miss; whatever it granted in vain, the
        server takes back.
        """
        with self._lock:
            if self._link is link:
                self._link = None
        self._used = None
        _hang_up(link)
        self._give_up(queued=True)

    def _give_up(self, *, queued: bool) -> None:
        """What was sent, and what is queued too if so told, is a miss where it asked for something.

        What gives back is said again, unless the server is another. Twice does no harm; not at all, and the
        server would wait for it as long as this engine lives.
        """
        lost = [pair for ops in self._sent.values() for pair in ops]
        kept = self._queue
        if queued:
            lost, kept = lost + kept, []
            self._expected.clear()
        self._sent.clear()
        self._brought = {
            ticket: miss("disconnected") if grant is None else grant
            for ticket, grant in self._brought.items()
        }
        self._silent = False
        self._granted += [(tag, miss("disconnected")) for op, tag in lost if isinstance(op, m.Reserve)]
        self._queue = [
            (op, tag)
            for op, tag in lost
            if isinstance(op, m.Release | m.Abort) and epoch_of(op.lease) == self._epoch
        ] + kept

    def _keep_connected(self, told: str) -> None:
        made = -math.inf
        while keep_trying(self.path, self._connect, self._stopped, told=told, made=made):
            told, made = "", time.monotonic()
            self._watch()
        self._leave()

    def _watch(self) -> None:
        """Until the connection is over, whoever notices first, the server's end, the caller or `close`; or
        until nobody has listened to it for long.
        """
        link = self._link
        if link is None or self._stopped.is_set():
            return
        with contextlib.suppress(ValueError, OSError):  # closed already
            hang_up = select.poll()
            hang_up.register(link.sock, select.POLLRDHUP)
            while self._link is link and not hang_up.poll(_WATCH_MS):
                since = link.silent_since
                if since and time.monotonic() - since > _UNHEARD_S:
                    link.sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            if self._link is link:
                self._link = None
        if self._used is not link:
            link.close()  # else it is the caller's thread that closes it

    def _connect(self) -> None:
        with self._lock:
            known = tuple(self._known)
        link = Link.open(self.path, msgspec.structs.replace(self._hello, leases=known), _CONNECT_S)
        if not link.has_tiers:
            with contextlib.suppress(CellarError):  # it can do without
                link.sketch = fetch_sketch(self.path)
        while True:
            namespace = self.namespace
            try:
                link.call(m.Register(namespace), _CONNECT_S, m.Registered)
            except CellarError:
                link.close()
                raise
            with self._lock:
                if self.namespace is not namespace:
                    continue  # changed in this very moment
                if link.epoch != self._epoch:
                    self._epoch = link.epoch
                    self._known.clear()  # another server: it knows none of them
                self._link = link
                return


def _hang_up(link: Link) -> None:
    with contextlib.suppress(OSError):
        link.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that watches it
    link.close()
