"""One control connection: bytes to messages, messages to operations, results to bytes.

Every request is answered, with a result or a Failure per operation, also when a handler breaks. A stream that
does not follow the protocol is told why and closed. A client that does not read its answers is not read from,
so it cannot make the server grow.
"""

import asyncio
import inspect
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import cast

from kvcellar.errors import BadRequest, CellarError, NotAttached, Overloaded, VersionMismatch
from kvcellar.server.members import Member
from kvcellar.server.operations import Caller, Operations
from kvcellar.wire import FrameReader, Peer, encode, server_reader
from kvcellar.wire import messages as m

log = logging.getLogger(__name__)

# Requests of one connection that wait for something, at most.
_MAX_WAITING = 256
# Messages that one connection may have answered before the others get their turn, and seconds after which it
# begins no other: a message may have hundreds of operations.
_TURN, _TURN_S = 64, 0.005
# What a client may leave unread: past the first it is not read from, past the second it is cut off.
_SLOW_BYTES, _DEAD_BYTES = 1 << 20, 64 << 20
# A connection must say who it is within this time.
_HELLO_S = 5.0


class Connection(asyncio.Protocol):
    """`attach` and `lost` tell the server who came and went; they belong to it."""

    def __init__(
        self,
        peer: Peer,
        operations: Operations,
        attach: Callable[[m.Hello, "Connection"], tuple[Caller, m.Welcome]],
        lost: Callable[["Connection"], None],
    ) -> None:
        self.peer = peer
        self.member: Member | None = None
        self._operations = operations
        self._attach = attach
        self._lost = lost
        self._reader: FrameReader[m.FromClient] = server_reader()
        self._caller: Caller | None = None
        self._transport: asyncio.Transport | None = None
        self._patience: asyncio.TimerHandle | None = None  # until it has said who it is
        self._waiting: set[asyncio.Task[None]] = set()
        self._paused = False  # the client does not read its answers
        self._in_line = False  # more has arrived than one turn may answer

    # -- the stream -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_SLOW_BYTES)
        self._patience = asyncio.get_running_loop().call_later(_HELLO_S, self._end_patience)

    def _end_patience(self) -> None:
        self.refuse(NotAttached(f"no Hello within {_HELLO_S:.0f} seconds"))

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        self._drain_reader()

    def _drain_reader(self) -> None:
        """Answer what has arrived; after a while let the others have their turn first."""
        if self._is_over:
            return  # whoever said it is gone or was replaced: what it is granted nobody would give back
        if self._paused:
            return  # resume_writing goes on
        loop = asyncio.get_running_loop()
        end = loop.time() + _TURN_S
        try:
            for message in itertools.islice(self._reader.messages(), _TURN):
                self._on_message(message)
                if self._paused or self._transport is None:
                    return
                if loop.time() >= end:
                    break
        except CellarError as error:
            self.refuse(error)
        if self._transport is None:
            return
        if self._reader.has_frame:
            self._transport.pause_reading()
            self._in_line = True
            loop.call_soon(self._drain_reader)
        elif self._in_line:
            self._in_line = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self._transport is not None:
            self._transport.resume_reading()
            self._drain_reader()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the reason does not matter
        self._transport = None
        self._cancel_patience()
        self._lost(self)

    def _cancel_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    @property
    def _is_over(self) -> bool:
        """A property, since any message may change it: mypy takes what it knows of attributes to last."""
        return self._transport is None

    def send(self, message: m.Message) -> None:
        if self._transport is None:
            return
        self._transport.write(encode(message))
        if self._transport.get_write_buffer_size() > _DEAD_BYTES:
            log.warning("cut off a client that does not read its answers")
            self._transport.abort()

    def refuse(self, error: CellarError) -> None:
        self.send(m.Refused(error.code, str(error)[:1000]))
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # -- messages ---------------------------------------------------------------------------------------

    def _on_message(self, message: m.FromClient) -> None:
        if isinstance(message, m.Request):
            if self._caller is None:
                raise NotAttached("the first message must be Hello")
            self._on_request(self._caller, message)
        elif self._caller is not None:
            raise BadRequest("a second Hello")
        elif message.version != m.PROTOCOL_VERSION:
            raise VersionMismatch(
                f"this server speaks protocol {m.PROTOCOL_VERSION}, not {message.version}; "
                "install the same kvcellar on both sides"
            )
        else:
            self._caller, welcome = self._attach(message, self)
            self._cancel_patience()
            self.send(welcome)

    def _on_request(self, caller: Caller, request: m.Request) -> None:
        caller.count_message()
        results = [self._perform(caller, op, request.deadline_ms / 1000) for op in request.ops]
        if not any(map(inspect.isawaitable, results)):
            self.send(m.Reply(request.id, cast(tuple[m.Result, ...], tuple(results))))
            return
        # All of them wait at the same time: one request takes no longer than one operation.
        waiting: list[m.Message | asyncio.Future[m.Message]] = [
            asyncio.ensure_future(_settle(r)) if inspect.isawaitable(r) else r for r in results
        ]
        task = asyncio.get_running_loop().create_task(self._answer_later(request, waiting))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _answer_later(
        self, request: m.Request, results: list[m.Message | asyncio.Future[m.Message]]
    ) -> None:
        settled = [await r if isinstance(r, asyncio.Future) else r for r in results]
        self.send(m.Reply(request.id, cast(tuple[m.Result, ...], tuple(settled))))

    def _perform(self, caller: Caller, op: m.Operation, patience: float) -> m.Message | Awaitable[m.Message]:
        try:
            if len(self._waiting) >= _MAX_WAITING and isinstance(op, m.Reserve):
                raise Overloaded(f"{_MAX_WAITING} requests are waiting on this connection")
            return self._operations.perform(caller, op, patience)
        except Exception as error:  # noqa: BLE001 - whatever breaks, the client gets an answer
            return _failure(error)


async def _settle(waiting: Awaitable[m.Message]) -> m.Message:
    try:
        return await waiting
    except Exception as error:  # noqa: BLE001 - whatever breaks, the client gets an answer
        return _failure(error)


def _failure(error: Exception) -> m.Failure:
    if not isinstance(error, CellarError):
        log.error("an operation broke", exc_info=error)
        return m.Failure(CellarError.code, f"internal error: {type(error).__name__}")
    return m.Failure(error.code, str(error)[:1000])
