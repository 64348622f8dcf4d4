"""Frames: a little-endian u32 length and one msgpack message.

Encodes, decodes, and cuts a stream of bytes into frames without ever holding more than the limit. Knows no
sockets.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from kvcellar.errors import BadRequest
from kvcellar.wire.messages import FromClient, FromServer, Message

MAX_FRAME = 4 << 20
PREFIX = 4

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
_from_client: "msgspec.msgpack.Decoder[FromClient]" = msgspec.msgpack.Decoder(FromClient)
_from_server: "msgspec.msgpack.Decoder[FromServer]" = msgspec.msgpack.Decoder(FromServer)


def encode(message: Message) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(PREFIX, "little") + body


class FrameReader(Generic[M]):
    """Feed it bytes, take out messages. After an error the stream is beyond repair: close the connection."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[M]", limit: int = MAX_FRAME) -> None:
        self._decoder = decoder
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    @property
    def has_frame(self) -> bool:
        """Whether `messages` would give, or raise, something."""
        if len(self._buffer) < PREFIX:
            return False
        length = int.from_bytes(self._buffer[:PREFIX], "little")
        return length > self._limit or len(self._buffer) >= PREFIX + length

    def messages(self) -> Iterator[M]:
        """Whole messages so far. May be left and taken up again at any point."""
        while len(self._buffer) >= PREFIX:
            length = int.from_bytes(self._buffer[:PREFIX], "little")
            if length > self._limit:
                raise BadRequest(f"a frame of {length} bytes; at most {self._limit} are allowed")
            end = PREFIX + length
            if len(self._buffer) < end:
                return
            frame = bytes(memoryview(self._buffer)[PREFIX:end])
            del self._buffer[:end]
            yield self._decode(frame)

    def _decode(self, frame: bytes) -> M:
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, BadRequest, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"not a message: {error}") from None


def client_reader() -> "FrameReader[FromServer]":
    # What a server answers can be larger than what it accepts: places of a long hit in many groups.
    return FrameReader(_from_server, limit=16 * MAX_FRAME)


def server_reader() -> "FrameReader[FromClient]":
    return FrameReader(_from_client)
