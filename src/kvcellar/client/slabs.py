"""The slabs that a worker has mapped, and how it gets them."""

import os
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from kvcellar.errors import Disconnected, Unavailable, from_code
from kvcellar.identity import NamespaceId
from kvcellar.slab import Bytes, Place, Slab, SlabShape, rack_of, slot_of
from kvcellar.wire import DESCRIPTOR, PREFIX, encode, receive_with_fd
from kvcellar.wire import messages as m

_FETCH_S = 2.0
_ANSWER_BYTES = 4096

_decoder = msgspec.msgpack.Decoder(m.SlabAnswer)


class Slot(NamedTuple):
    payload: Bytes
    header: np.void


class SlabMap:
    """Filled by the worker's connection thread, read by whoever copies."""

    def __init__(self) -> None:
        self._slabs: dict[tuple[int, int], Slab] = {}
        self._arrived = threading.Condition()

    def __contains__(self, rack: tuple[int, int]) -> bool:
        return rack in self._slabs

    def add(self, group: int, rack: int, slab: Slab) -> None:
        with self._arrived:
            self._slabs[group, rack] = slab
            self._arrived.notify_all()

    def drop(self, group: int, rack: int) -> None:
        self._slabs.pop((group, rack), None)

    def clear(self) -> None:
        self._slabs.clear()

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
        return Slot(slab.slot(number), slab.headers[number])


def fetch_slab(path: Path, session: str, rank: int, namespace: NamespaceId, group: int, rack: int) -> Slab:
    """Ask the server for a slab's descriptor, on a connection of its own, and map it."""
    question = m.FetchSlab(m.PROTOCOL_VERSION, session, rank, namespace, group, rack)
    fd: int | None = None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(_FETCH_S)
            sock.connect(str(path))
            sock.sendall(DESCRIPTOR + encode(question))
            data, fd = receive_with_fd(sock, _ANSWER_BYTES)
        answer = _decoder.decode(data[PREFIX:])
        if isinstance(answer, m.Refused):
            raise from_code(answer.code, answer.message)
        if fd is None:
            raise Disconnected("a slab was announced but no descriptor came")
        return Slab(fd, SlabShape(answer.slots, answer.slot_bytes))
    except (OSError, msgspec.MsgspecError) as error:
        raise Disconnected(f"cannot fetch a slab: {error}") from None
    finally:
        if fd is not None:
            os.close(fd)
