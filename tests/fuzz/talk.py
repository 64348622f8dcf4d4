"""One connection of a fuzzer: says an act, hears everything that comes back, and names the outcome of each frame."""

import contextlib
import os
import select
import socket
import time
from collections import Counter
from pathlib import Path

from kvcellar.errors import BY_CODE, BadRequest, CellarError, Disconnected
from kvcellar.wire import DESCRIPTOR, client_reader, receive_with_fd
from kvcellar.wire import messages as m
from tests.fuzz.words import Act, Words

ANSWER_S = 10.0
_RESULTS = "answered"


class Talk:
    """`send`, then `finish`. Other connections may be served in between."""

    def __init__(self, path: Path, act: Act, words: Words) -> None:
        self._act = act
        self._words = words
        self._last_id = words.last_id
        self._reader = client_reader()
        self._heard: list[m.FromServer] = []
        self._closed = False
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(ANSWER_S)
        self._sock.connect(str(path))
        self._sock.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN | select.POLLOUT)

    def send(self) -> None:
        frames = self._act.answered + ([self._act.last] if self._act.last else [])
        data = memoryview(self._act.opening + b"".join(frame.data for frame in frames))
        deadline = time.monotonic() + ANSWER_S
        while data and not self._closed and time.monotonic() < deadline:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                self._poll.poll(1000)
                self._hear()
            except (BrokenPipeError, ConnectionResetError):
                break  # refused before the end; what it said can still be read
        if self._act.is_open_ended:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def finish(self, outcomes: Counter[tuple[str, str]]) -> list[str]:
        """Count what became of every frame. Returns complaints."""
        if self._act.opening == DESCRIPTOR:
            return self._finish_descriptor(outcomes)
        self._poll.modify(self._sock, select.POLLIN)
        deadline = time.monotonic() + ANSWER_S
        while not self._is_over() and time.monotonic() < deadline:
            self._poll.poll(1000)
            self._hear()
        self._sock.close()
        return self._judge(outcomes)

    def _is_over(self) -> bool:
        return self._closed or (self._act.last is None and self._answers() >= len(self._act.answered))

    def _answers(self) -> int:
        return sum(isinstance(message, m.Welcome | m.Reply | m.Refused) for message in self._heard)

    def _hear(self) -> None:
        try:
            data = self._sock.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        self._closed = not data
        self._reader.feed(data)
        self._heard += self._reader.messages()

    # -- judging -----------------------------------------------------------------------------------------

    def _judge(self, outcomes: Counter[tuple[str, str]]) -> list[str]:
        act, complaints = self._act, list[str]()
        replies = {one.id: one for one in self._heard if isinstance(one, m.Reply)}
        refused = [one for one in self._heard if isinstance(one, m.Refused)]
        welcome = [one for one in self._heard if isinstance(one, m.Welcome)]
        for one in welcome:
            self._words.epoch = one.epoch
        first_id = self._last_id - len(act.answered) + 2  # Hello has none, and `last` may have used one
        for number, frame in enumerate(act.answered):
            if frame.kind == "hello":
                outcome = _RESULTS if welcome else "unanswered"
            else:
                outcome = self._outcome(replies.get(frame_id(frame.data)))
            outcomes[frame.kind, outcome] += 1
            if outcome in ("unanswered", "internal"):
                complaints.append(f"{frame.kind}: {outcome} {refused} {first_id} {number} {frame.data[:200]!r}")
        if act.last is not None:
            complaints += self._judge_last(outcomes, refused, len(replies) + len(welcome))
        return complaints

    def _judge_last(
        self, outcomes: Counter[tuple[str, str]], refused: list[m.Refused], others: int
    ) -> list[str]:
        last, act = self._act.last, self._act
        assert last is not None
        if refused:
            outcome = f"refused: {refused[0].code}"
        elif others > len(act.answered):
            outcome = _RESULTS  # in fact valid
        else:
            outcome = "closed" if self._closed else "neither answered nor closed"
        outcomes[last.kind, outcome] += 1
        is_typed = not refused or (refused[0].code in BY_CODE and refused[0].code != CellarError.code)
        if is_typed and self._closed and (refused or act.is_open_ended):
            return []
        return [f"{last.kind}: {outcome} {refused} {last.data[:200]!r}"]

    def _outcome(self, reply: m.Reply | None) -> str:
        if reply is None:
            return "unanswered"
        codes = {result.code for result in reply.results if isinstance(result, m.Failure)}
        for result in reply.results:
            if isinstance(result, m.Granted) and result.lease:
                self._words.newest = result.lease
        if CellarError.code in codes or not codes <= set(BY_CODE):
            return "internal"
        return f"failure: {sorted(codes)[0]}" if codes else _RESULTS

    def _finish_descriptor(self, outcomes: Counter[tuple[str, str]]) -> list[str]:
        last = self._act.last
        assert last is not None
        self._sock.settimeout(ANSWER_S)
        try:
            data, fd = receive_with_fd(self._sock, 4096)
        except (Disconnected, ConnectionResetError):
            outcome = "closed"
        except TimeoutError:
            outcome = "neither answered nor closed"
        else:
            outcome = _RESULTS if fd is not None else "refused"
            if fd is not None:
                os.close(fd)
            self._reader.feed(data)
            with contextlib.suppress(BadRequest):  # SlabSent is not for control connections
                outcome = next((f"refused: {one.code}" for one in self._reader.messages()), outcome)  # type: ignore[union-attr]
        self._sock.close()
        outcomes[last.kind, outcome] += 1
        return [f"{last.kind}: {outcome} {last.data!r}"] if outcome.startswith("neither") else []


def frame_id(data: bytes) -> int:
    """Of an encoded Request: the second element of its array."""
    at = 4 + 1 + 8  # length, array of four, "Request"
    kind = data[at]
    if kind < 0x80:
        return kind
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}[kind]
    return int.from_bytes(data[at + 1 : at + 1 + width], "big")
