"""The descriptor connection: hands a slab to a worker of its namespace, and the sketch to anybody.

asyncio transports cannot carry descriptors, so this is a raw socket with one question and one answer. The
asker of a slab must be the process that attached as that rank, and its session must have registered the
namespace: nobody can map what it does not share. The sketch tells no more than a lookup does.
"""

import asyncio
import socket

import msgspec

from kvcellar.arena import Arena, RackKey
from kvcellar.errors import (
    BadRequest,
    CellarError,
    Unavailable,
    UnknownNamespace,
    VersionMismatch,
    WrongOwner,
)
from kvcellar.identity import NamespaceId
from kvcellar.server.members import Member, Members
from kvcellar.server.steward import Steward
from kvcellar.sketch import OwnSketch
from kvcellar.wire import PREFIX, Peer, encode
from kvcellar.wire import messages as m

_MAX_QUESTION = 4096

_decoder = msgspec.msgpack.Decoder(m.FetchSlab | m.FetchSketch)


class Descriptors:
    def __init__(self, arena: Arena, members: Members, steward: Steward, sketch: OwnSketch | None) -> None:
        self._arena = arena
        self._members = members
        self._steward = steward
        self._sketch = sketch

    async def serve(self, sock: socket.socket, peer: Peer) -> None:
        """Answer one question. The caller bounds the time and closes the socket."""
        try:
            question = _decoder.decode(await _read_frame(sock))
            if question.version != m.PROTOCOL_VERSION:
                raise VersionMismatch(f"this server speaks protocol {m.PROTOCOL_VERSION}")
            if isinstance(question, m.FetchSlab):
                self._send_slab(sock, question, peer)
            elif self._sketch is None:
                raise Unavailable("this server has no sketch")
            else:
                _send(sock, m.SketchSent(), self._sketch.descriptor)
        except (CellarError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            code = error.code if isinstance(error, CellarError) else BadRequest.code
            await asyncio.get_running_loop().sock_sendall(sock, encode(m.Refused(code, str(error)[:1000])))

    def close(self) -> None:
        if self._sketch is not None:
            self._sketch.close()

    def _send_slab(self, sock: socket.socket, question: m.FetchSlab, peer: Peer) -> None:
        member = self._authorise(question, peer)
        key = RackKey(NamespaceId(question.namespace), question.group, question.rack)
        rack = self._arena.racks.get(key)
        if rack is None or key in self._steward.leaving:
            raise UnknownNamespace(f"there is no rack {key.number} of group {key.group}")
        shard = self._steward.shard_of(key.namespace, member.rank)
        _send(sock, m.SlabSent(*rack.spec.shapes[shard]), rack.descriptors[shard])
        member.maps.add(key)

    def _authorise(self, question: m.FetchSlab, peer: Peer) -> Member:
        member = self._members.all.get((question.session, question.rank))
        if member is None or not member.peer.process.same_as(peer.process):
            raise WrongOwner("attach as this rank first, from the same process")
        if question.namespace not in member.session.namespaces:
            raise UnknownNamespace("the engine has not registered that namespace")
        return member


def _send(sock: socket.socket, answer: m.Message, fd: int) -> None:
    """A fresh socket with an empty buffer takes 50 bytes and a descriptor at once."""
    socket.send_fds(sock, [encode(answer)], [fd])


async def _read_frame(sock: socket.socket) -> bytes:
    length = int.from_bytes(await _read(sock, PREFIX), "little")
    if length > _MAX_QUESTION:
        raise BadRequest(f"a question of {length} bytes")
    return await _read(sock, length)


async def _read(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise BadRequest("the connection ended in the middle of a question")
        data += piece
    return data
