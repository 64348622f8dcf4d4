"""The wire: messages, frames, and what a unix socket tells about its other end. No policy, no I/O loop."""

from kvcellar.wire.frames import MAX_FRAME, PREFIX, FrameReader, client_reader, encode, server_reader
from kvcellar.wire.peer import CONTROL, DESCRIPTOR, Peer, Process, open_process, peer_uid, receive_with_fd

__all__ = [
    "CONTROL",
    "DESCRIPTOR",
    "MAX_FRAME",
    "PREFIX",
    "FrameReader",
    "Peer",
    "Process",
    "client_reader",
    "encode",
    "open_process",
    "peer_uid",
    "receive_with_fd",
    "server_reader",
]
