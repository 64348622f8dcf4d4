"""The slabs that a worker has mapped, and how it gets them, and a scheduler the sketch."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from kvcellar.client.dial import dial
from kvcellar.errors import Disconnected, Unavailable, from_code
from kvcellar.identity import NamespaceId
from kvcellar.sketch import Sketch
from kvcellar.slab import Place, Slab, SlabShape, Slot, rack_of, slot_of
from kvcellar.wire import DESCRIPTOR, PREFIX, encode, receive_with_fd
from kvcellar.wire import messages as m

_FETCH_S = 2.0
_ANSWER_BYTES = 4096

_decoder = msgspec.msgpack.Decoder(m.DescriptorAnswer)

_Answer = TypeVar("_Answer")


class SlabWatcher(Protocol):
    """Who wants to know which slabs this process has mapped."""

    def mapped(self, slab: Slab) -> None: ...

    def unmapped(self, slab: Slab) -> None:
        """No copy to or from it is under way, and none will follow."""


class SlabMap:
    """Filled by the worker's connection thread, read by whoever copies."""

    def __init__(self, watcher: "SlabWatcher | None" = None) -> None:
        self._slabs: dict[tuple[int, int], Slab] = {}
        self._watcher = watcher
        self._earlier: list[SlabMap] = []
        self.missing: set[tuple[int, int]] = set()  # racks that we were told of and could not map
        self._arrived = threading.Condition()

    def __contains__(self, rack: tuple[int, int]) -> bool:
        return rack in self._slabs

    def add(self, group: int, rack: int, slab: Slab) -> None:
        if self._watcher is not None:
            self._watcher.mapped(slab)
        with self._arrived:
            self._slabs[group, rack] = slab
            self.missing.discard((group, rack))
            self._arrived.notify_all()

    def drop(self, group: int, rack: int) -> None:
        self.missing.discard((group, rack))
        slab = self._slabs.pop((group, rack), None)
        if slab is not None and self._watcher is not None:
            self._watcher.unmapped(slab)

    def successor(self) -> "SlabMap":
        """An empty map for the next server's racks. What this one has stays mapped for copies under way."""
        new = SlabMap(self._watcher)
        new._earlier = [*self._earlier, self]
        self._earlier = []
        return new

    def forget_earlier(self) -> None:
        """When no copy with an earlier map is under way any more."""
        for slabs in self._earlier:
            slabs.clear()
        self._earlier.clear()

    def clear(self) -> None:
        """When no copy is under way any more."""
        for group, rack in list(self._slabs):
            self.drop(group, rack)

    def slot(self, group: int, place: Place, timeout: float) -> Slot:
        """Where the bytes and the header of a place are. A rack that is just being mapped is waited for."""
        key = (group, rack_of(place))
        slab = self._slabs.get(key)
        if slab is None:
            deadline = time.monotonic() + timeout
            with self._arrived:
                while (slab := self._slabs.get(key)) is None:
                    if not self._arrived.wait(deadline - time.monotonic()):
                        raise Unavailable(f"rack {key[1]} of group {group} is not mapped")
        number = slot_of(place)
        if number >= slab.shape.slots:
            raise Unavailable(f"rack {key[1]} of group {group} has no slot {number}")
        return slab.at(number)


def fetch_slab(path: Path, session: str, rank: int, namespace: NamespaceId, group: int, rack: int) -> Slab:
    """Ask the server for a slab, on a connection of its own, and map it."""
    question = m.FetchSlab(m.PROTOCOL_VERSION, session, rank, namespace, group, rack)
    with _fetched(path, question, m.SlabSent) as (fd, sent):
        return Slab(fd, SlabShape(sent.slots, sent.slot_bytes))


def fetch_sketch(path: Path) -> Sketch:
    """The same for the sketch of what memory may hold."""
    with _fetched(path, m.FetchSketch(m.PROTOCOL_VERSION), m.SketchSent) as (fd, _):
        return Sketch(fd)


@contextmanager
def _fetched(path: Path, question: m.Message, wanted: type[_Answer]) -> Iterator[tuple[int, _Answer]]:
    """The descriptor is closed at the end; what was mapped of it by then stays."""
    fd: int | None = None
    try:
        with dial(path, _FETCH_S) as sock:
            sock.sendall(DESCRIPTOR + encode(question))
            data, fd = receive_with_fd(sock, _ANSWER_BYTES)
        answer = _decoder.decode(data[PREFIX:])
        if isinstance(answer, m.Refused):
            raise from_code(answer.code, answer.message)
        if fd is None or not isinstance(answer, wanted):
            raise Disconnected(f"the server answered {type(answer).__name__}, and sent no such descriptor")
        yield fd, answer
    except (OSError, msgspec.MsgspecError) as error:
        raise Disconnected(f"cannot fetch a descriptor: {error}") from None
    finally:
        if fd is not None:
            os.close(fd)
