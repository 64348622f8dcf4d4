"""The worker side of an engine: maps slabs, says what was copied.

All calls return at once; one thread owns the connection, sends what is queued, maps racks as they are
announced and reconnects. The fence around copies is `copying`: while anybody is inside, this process does not
attach again, since attaching says "I hold nothing", and nobody gets in with a lease of a server that is gone.

    with worker.copying(lease) as slots:
        bad = transfer.load(plan, keys, slots)
    worker.release(lease, 0, chunks)
"""

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvcellar.client.backoff import keep_trying
from kvcellar.client.link import Link
from kvcellar.client.slabs import SlabMap, SlabWatcher, fetch_slab
from kvcellar.epoch import epoch_of
from kvcellar.errors import CellarError, Disconnected, Rejected
from kvcellar.identity import Namespace
from kvcellar.slab import Place, Slot
from kvcellar.wire import messages as m

log = logging.getLogger(__name__)

_CONNECT_S = 2.0
_SEND_S = 1.0
_MAP_S = 2.0
_MAX_EARLY = 4096  # messages kept while there is no server: the newest may be for the one to come
_MISSING_MS = 500  # until a rack that could not be mapped is tried again

Slots = Callable[[int, Place], Slot]

_OfLease = m.Release | m.Commit | m.Abort | m.Condemn


class WorkerClient:
    def __init__(
        self,
        path: Path,
        session: str,
        rank: int,
        namespace: Namespace | None = None,
        watcher: SlabWatcher | None = None,
    ) -> None:
        self.path = path
        self.namespace = namespace  # may come later, see `register`
        self.rank = rank
        self._hello = m.Hello(m.PROTOCOL_VERSION, "worker", session, rank)
        self._epoch = 0  # of the server we are attached to; 0 while there is none
        self._void = 0  # leases up to this one were granted before we attached: we have no share in them
        self._slabs = SlabMap(watcher)
        self._queue: list[m.Operation] = []
        self._outstanding = 0  # operations queued or sent and not yet answered
        self._copies = 0
        self._attaching = False  # the server has let us in, and we are mapping what there is
        self._state = threading.Condition()  # guards what stands above, from the epoch on
        self._stopped = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"kvcellar-worker-{rank}", daemon=True)
        self._thread.start()

    # -- copying ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def copying(self, lease: int, patience: float = _MAP_S) -> Iterator[Slots]:
        """The right to touch slots, for as long as the block lasts. Raises Unavailable if the lease's server
        is gone. `patience`: seconds to wait for a rack that is just being mapped.
        """
        with self._state:
            if not self._is_valid(lease):
                raise Disconnected("this lease was granted by another server, or on an earlier connection")
            self._copies += 1
            slabs = self._slabs
        give_up = time.monotonic() + patience
        try:
            yield lambda group, place: slabs.slot(group, place, give_up - time.monotonic())
        finally:
            with self._state:
                self._copies -= 1
                self._state.notify_all()

    def register(self, namespace: Namespace) -> None:
        """Work with this namespace from now on. An engine that learns its identity late attaches early, so
        that it has its share in the first lease, and registers when it knows. No copy may be under way.
        """
        with self._state:
            if self.namespace is not None:
                self._slabs = self._slabs.successor()  # racks are numbered by namespace
                self._slabs.forget_earlier()
            self.namespace = namespace
            if self._epoch:
                self._queue.append(m.Register(namespace))
                self._outstanding += 1
        self._wake()

    def release(self, lease: int, first: int, stop: int) -> None:
        """These chunks have been read."""
        self._post(lease, m.Release(lease, first, stop))

    def commit(self, lease: int, first: int, stop: int) -> None:
        """All bytes and headers of these chunks are in place."""
        self._post(lease, m.Commit(lease, first, stop))

    def abort(self, lease: int, first: int, stop: int) -> None:
        """These chunks will not be written by this rank."""
        self._post(lease, m.Abort(lease, first, stop))

    def condemn(self, lease: int, group: int, chunk: int) -> None:
        """Wrong bytes were read here. Say so before releasing."""
        self._post(lease, m.Condemn(lease, group, chunk))

    def flush(self, timeout: float) -> bool:
        """Wait until the server has answered everything said so far, or is gone. False when neither by the
        deadline.
        """
        with self._state:
            return self._state.wait_for(lambda: not self._outstanding, timeout)

    @property
    def is_connected(self) -> bool:
        return self._epoch != 0

    def wait_connected(self, timeout: float) -> bool:
        """For start-up and tests; an engine need not wait."""
        with self._state:
            return self._state.wait_for(lambda: self._epoch != 0, timeout)

    def wait_attached(self, timeout: float) -> bool:
        """Wait while this process is on its way in: a lease can get here before the memory it is about. False
        at once if there is no server; a lease of now would be void by the time there is one.
        """
        with self._state:
            self._state.wait_for(lambda: self._epoch != 0 or not self._attaching, timeout)
            return self._epoch != 0

    def close(self) -> None:
        """Leave for good, when all that was said has been heard. No copy may be under way."""
        if self._stopped.is_set():
            return
        self.flush(_SEND_S)
        self._stopped.set()
        self._wake()
        self._thread.join(_CONNECT_S + _SEND_S)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _post(self, lease: int, op: m.Operation) -> None:
        with self._state:
            if self._epoch and not self._is_valid(lease):
                return  # nobody is left to be told
            # While attaching, it may be of the server to come, who then has to be told; `_connect` sorts it
            # out.
            self._queue.append(op)
            self._outstanding += self._epoch != 0
            if not self._epoch:
                del self._queue[:-_MAX_EARLY]
        self._wake()

    def _is_valid(self, lease: int) -> bool:
        return epoch_of(lease) == self._epoch and lease > self._void

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake_write, b"\0")

    # -- the connection's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        links: list[Link] = []
        made = -math.inf
        # The scheduler side tells people of trouble, once for all ranks.
        while keep_trying(
            self.path, lambda: links.append(self._connect()), self._stopped, level=logging.DEBUG, made=made
        ):
            made = time.monotonic()
            link = links.pop()
            try:
                while not self._stopped.is_set():
                    self._serve(link)
                # Until it is answered: a server that tells us of a rack meanwhile, and meets a closed
                # connection, reads no further, and what we said last is lost.
                link.call(m.Leave(), _SEND_S, m.Settled)
            except CellarError as error:
                log.debug("connection lost: %s", error)
            finally:
                self._detach(link)
        self._slabs.forget_earlier()  # here: whoever closes may not have waited for us

    def _connect(self) -> Link:
        with self._state:
            # Attaching says that nothing is held: every copy on the word of an earlier server must be over.
            self._state.wait_for(lambda: not self._copies or self._stopped.is_set())
        self._slabs.forget_earlier()
        link = Link.open(self.path, self._hello, _CONNECT_S)
        namespace = self.namespace
        self._set_attaching(True)
        try:
            if namespace is not None:
                self._map_all(link.call(m.Register(namespace), _CONNECT_S, m.Registered))
        except CellarError:
            link.close()
            self._slabs.clear()
            self._set_attaching(False)
            raise
        with self._state:
            self._attaching = False
            self._epoch, self._void = link.epoch, link.newest_lease
            self._queue = [op for op in self._queue if isinstance(op, _OfLease) and self._is_valid(op.lease)]
            self._outstanding = len(self._queue)
            self._wake()
            if self.namespace is not namespace and self.namespace is not None:  # named in this very moment
                self._queue.append(m.Register(self.namespace))
                self._outstanding += 1
                self._wake()
            self._state.notify_all()
        return link

    def _set_attaching(self, attaching: bool) -> None:
        with self._state:
            self._attaching = attaching
            self._state.notify_all()

    def _serve(self, link: Link) -> None:
        """Wait for something to do, and do it."""
        if not link.has_backlog:
            # Not select(): engines have more than 1024 files open.
            waiting = select.poll()
            waiting.register(link.sock, select.POLLIN)
            waiting.register(self._wake_read, select.POLLIN)
            waiting.poll(_MISSING_MS if self._slabs.missing else None)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        with self._state:
            ops, self._queue = self._queue, []
        for at in range(0, len(ops), m.MAX_OPS):
            link.send(tuple(ops[at : at + m.MAX_OPS]), _SEND_S)
        for message in link.receive(time.monotonic()):
            self._on_message(link, message)
        if self.namespace is not None:
            for group, rack in list(self._slabs.missing):
                if not self._map(self.namespace.id, group, rack):
                    break

    def _on_message(self, link: Link, message: m.FromServer) -> None:
        if isinstance(message, m.RackAdded):
            self._map(message.namespace, message.group, message.rack)
        elif isinstance(message, m.RackLeaving):
            with self._state:
                if self.namespace is not None and message.namespace == self.namespace.id:
                    self._slabs.drop(message.group, message.rack)
                self._outstanding += 1  # it is answered like everything else
            link.send((m.Unmapped(message.namespace, message.group, message.rack),), _SEND_S)
        elif isinstance(message, m.Reply):
            for result in message.results:
                if isinstance(result, m.Failure):
                    log.warning("KVCellar: the server refused: %s", result.message)
                elif isinstance(result, m.Registered):
                    self._map_all(result)
            with self._state:
                self._outstanding = max(0, self._outstanding - len(message.results))
                self._state.notify_all()

    def _map_all(self, registered: m.Registered) -> None:
        for at, (group, rack) in enumerate(registered.racks):
            if not self._map(registered.namespace, group, rack):
                self._slabs.missing.update(registered.racks[at:])  # the others would wait as long
                return

    def _map(self, namespace: bytes, group: int, rack: int) -> bool:
        """False: not now; it will be tried again."""
        with self._state:
            ours, slabs = self.namespace, self._slabs
        if ours is None or namespace != ours.id or (group, rack) in slabs:
            return True  # not, or not yet, ours: registering will name all that there are
        try:
            slab = fetch_slab(self.path, self._hello.session, self.rank, ours.id, group, rack)
        except Rejected:
            slabs.drop(group, rack)  # gone again already
        except CellarError as error:
            # No reason to leave: a server that is going away lets us finish what we have. If it stays, we ask
            # again.
            log.debug("rack %d of group %d cannot be mapped yet: %s", rack, group, error)
            slabs.missing.add((group, rack))
            return False
        else:
            with self._state:
                if self._slabs is slabs:  # or it is of a namespace that we left meanwhile
                    slabs.add(group, rack, slab)
        return True

    def _detach(self, link: Link) -> None:
        link.close()
        with self._state:
            self._epoch = 0
            self._queue.clear()
            self._outstanding = 0
            # Copies under way keep the map they were given; the next server's racks go into a new one.
            self._slabs = self._slabs.successor()
            self._state.notify_all()
