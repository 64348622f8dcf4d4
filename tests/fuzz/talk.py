"""One connection of a fuzzer: says an act, hears all that comes back, and names the outcome of each frame.

Never blocks, so that a fuzzer can hold many: register `sock` for `events`, and `go_on` when one comes.
"""

import contextlib
import os
import select
import socket
import time
from collections import Counter
from pathlib import Path

import msgspec

from kvcellar.errors import BY_CODE, CellarError, Disconnected
from kvcellar.wire import DESCRIPTOR, PREFIX, client_reader, receive_with_fd
from kvcellar.wire import messages as m
from tests.fuzz.words import Act, Words

ANSWER_S = 10.0
_TYPED = set(BY_CODE) - {CellarError.code}
_ANSWERED, _CLOSED, _UNANSWERED = "answered", "closed", "neither answered nor closed"

_slab_answer = msgspec.msgpack.Decoder(m.DescriptorAnswer)

Outcomes = Counter[tuple[str, str]]


class Talk:
    def __init__(self, path: Path, act: Act, words: Words) -> None:
        self._act = act
        self._words = words
        self._reader = client_reader()
        self._heard: list[m.FromServer] = []
        self._slab = ""  # what became of a question for a slab
        self._closed = False
        self._deadline = time.monotonic() + ANSWER_S
        frames = act.answered + ([act.last] if act.last else [])
        self._unsent = memoryview(act.opening + b"".join(frame.data for frame in frames))
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(str(path))
        self.sock.setblocking(False)
        self._say()

    @property
    def events(self) -> int:
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    @property
    def is_over(self) -> bool:
        if self._closed or time.monotonic() > self._deadline:
            return True
        return self._act.last is None and self._answers() >= len(self._act.answered)

    def go_on(self) -> None:
        self._say()
        if self._act.opening == DESCRIPTOR:
            self._hear_slab()
        else:
            self._hear()

    def _say(self) -> None:
        if not self._unsent:
            return
        try:
            self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._unsent = memoryview(b"")  # refused before the end; what it said can still be read
        if not self._unsent and self._act.is_open_ended:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)

    def _hear(self) -> None:
        try:
            data = self.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        self._closed = not data
        self._reader.feed(data)
        self._heard += self._reader.messages()

    def _hear_slab(self) -> None:
        try:
            data, fd = receive_with_fd(self.sock, 4096)
        except BlockingIOError:
            return
        except (Disconnected, ConnectionResetError):
            self._closed, self._slab = True, _CLOSED
            return
        answer = _slab_answer.decode(data[PREFIX:])
        self._closed = True
        self._slab = f"refused: {answer.code}" if isinstance(answer, m.Refused) else _ANSWERED
        if fd is not None:
            os.close(fd)

    def _answers(self) -> int:
        return sum(isinstance(message, m.Welcome | m.Reply | m.Refused) for message in self._heard)

    # -- judging -----------------------------------------------------------------------------------------

    def judge(self, outcomes: Outcomes) -> list[str]:
        """When it is over: count what became of every frame, and return complaints."""
        self.sock.close()
        act, complaints = self._act, list[str]()
        replies = {one.id: one for one in self._heard if isinstance(one, m.Reply)}
        refused = [one for one in self._heard if isinstance(one, m.Refused)]
        welcome = [one for one in self._heard if isinstance(one, m.Welcome)]
        for one in welcome:
            self._words.epoch = one.epoch
        for frame in act.answered:
            if frame.kind == "hello":
                outcome = _ANSWERED if welcome else _UNANSWERED
            else:
                outcome = self._outcome(replies.get(_request_id(frame.data)))
            if outcome == _UNANSWERED and self._closed and b"Reserve" in frame.data:
                outcome = _CLOSED  # it was waiting for memory when a later frame ended the connection
            outcomes[frame.kind, outcome] += 1
            if outcome in (_UNANSWERED, "internal"):
                complaints.append(f"{frame.kind}: {outcome} {refused} {frame.data[:200]!r}")
        if act.last is not None:
            complaints += self._judge_last(outcomes, refused, len(replies) + len(welcome))
        return complaints

    def _judge_last(self, outcomes: Outcomes, refused: list[m.Refused], others: int) -> list[str]:
        last, act = self._act.last, self._act
        assert last is not None
        if act.opening == DESCRIPTOR:
            outcome = self._slab or _UNANSWERED
        elif refused:
            outcome = f"refused: {refused[0].code}"
        elif others > len(act.answered):
            outcome = _ANSWERED  # in fact valid
        else:
            outcome = _CLOSED if self._closed else _UNANSWERED
        outcomes[last.kind, outcome] += 1
        is_typed = outcome.removeprefix("refused: ") in _TYPED
        if self._closed and (is_typed or (act.is_open_ended and outcome in (_ANSWERED, _CLOSED))):
            return []
        return [f"{last.kind}: {outcome} {refused} {last.data[:200]!r}"]

    def _outcome(self, reply: m.Reply | None) -> str:
        if reply is None:
            return _UNANSWERED
        for result in reply.results:
            if isinstance(result, m.Granted) and result.lease:
                self._words.newest = result.lease
        codes = {result.code for result in reply.results if isinstance(result, m.Failure)}
        if not codes <= _TYPED:
            return "internal"
        return f"failure: {sorted(codes)[0]}" if codes else _ANSWERED


def _request_id(data: bytes) -> int:
    """Of an encoded Request: the second element of its array."""
    at = PREFIX + 1 + 8  # length, array of four, "Request"
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(data[at], 0)
    return int.from_bytes(data[at + 1 : at + 1 + width], "big") if width else data[at]
