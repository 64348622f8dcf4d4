"""The descriptor connection: hands a slab to a worker of its namespace.

asyncio transports cannot carry descriptors, so this is a raw socket with one question and one answer. The
asker must be the process that attached as that rank, and its session must have registered the namespace:
nobody can map what it does not share.
"""

import asyncio
import socket

import msgspec

from kvcellar.arena import Arena, RackKey
from kvcellar.errors import BadRequest, CellarError, UnknownNamespace, VersionMismatch, WrongOwner
from kvcellar.identity import NamespaceId
from kvcellar.server.members import Member, Members
from kvcellar.server.steward import Steward
from kvcellar.wire import PREFIX, Peer, encode
from kvcellar.wire import messages as m

_MAX_QUESTION = 4096

_decoder = msgspec.msgpack.Decoder(m.FetchSlab)


async def serve_descriptor(
    sock: socket.socket, peer: Peer, arena: Arena, members: Members, steward: Steward
) -> None:
    """Answer one FetchSlab. The caller bounds the time and closes the socket."""
    try:
        question = _decoder.decode(await _read_frame(sock))
        member, key = _authorise(question, peer, members)
        rack = arena.racks.get(key)
        if rack is None or key in steward.leaving:
            raise UnknownNamespace(f"there is no rack {key.number} of group {key.group}")
        shard = steward.shard_of(key.namespace, member.rank)
        shape = rack.spec.shapes[shard]
        frame = encode(m.SlabSent(*shape))
    except (CellarError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        code = error.code if isinstance(error, CellarError) else BadRequest.code
        await asyncio.get_running_loop().sock_sendall(sock, encode(m.Refused(code, str(error)[:1000])))
        return
    # A fresh socket with an empty buffer takes 50 bytes and a descriptor at once.
    socket.send_fds(sock, [frame], [rack.descriptors[shard]])
    member.maps.add(key)


def _authorise(question: m.FetchSlab, peer: Peer, members: Members) -> tuple[Member, RackKey]:
    if question.version != m.PROTOCOL_VERSION:
        raise VersionMismatch(f"this server speaks protocol {m.PROTOCOL_VERSION}")
    member = members.all.get((question.session, question.rank))
    if member is None or not member.peer.process.same_as(peer.process):
        raise WrongOwner("attach as this rank first, from the same process")
    if question.namespace not in member.session.namespaces:
        raise UnknownNamespace("the engine has not registered that namespace")
    return member, RackKey(NamespaceId(question.namespace), question.group, question.rack)


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
