"""The Redis protocol (RESP2) over one connected socket, for values that must not be copied.

Packaged clients build a value in a `bytes` of their own, twice on the way out; here it goes from the slab to
the socket and from the socket into the slab. Works on plain and TLS sockets alike. Every wait ends at the
deadline. Knows nothing of nodes, pools or what a value means.
"""

import re
import socket
import time
from collections.abc import Sequence
from typing import Any

# Below this, pieces are gathered into one send; above, copying would cost more than the call.
_SMALL = 4096
_CRLF = b"\r\n"
# More than any node answers, of what is not read into a slab: the name of a host, arrays in arrays.
_LONGEST_BYTES, _DEEPEST = 16 << 10, 8
_REDIRECT = re.compile(r"(?:MOVED|ASK) \d+ (\S*):(\d{1,5})")


class WireError(Exception):
    """The other side does not speak RESP, or has gone."""


class ReplyError(Exception):
    """An error reply: `-CODE text`. The connection is in order."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.code = line.partition(" ")[0]


class Redirect(ReplyError):
    """MOVED or ASK: another node has this slot."""

    @property
    def address(self) -> tuple[str, int]:
        """The host may be empty: then it is the one that answered."""
        host, port = _REDIRECT.fullmatch(self.args[0]).groups()  # type: ignore[union-attr]
        return host.strip("[]"), int(port)


class Wire:
    """A connection for the length of one call."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self.deadline = deadline
        self._outgoing = bytearray()
        self._received = bytearray(16 << 10)
        self._scratch = memoryview(self._received)
        self._start = self._end = 0  # what was received and not yet looked at
        self.owed = 0  # replies still to come

    @property
    def is_clean(self) -> bool:
        """Nothing is on its way in either direction: somebody else may use the connection."""
        return not self.owed and not self._outgoing and self._start == self._end

    def send(self, *words: bytes | memoryview) -> None:
        """One command. Views that are large are sent from where they are, before this returns."""
        self._add(b"*%d\r\n" % len(words))
        for word in words:
            self._add(b"$%d\r\n" % len(word))
            self._add(word)
            self._add(_CRLF)
        self.owed += 1

    def send_value(
        self, before: Sequence[bytes], value: Sequence[bytes | memoryview], after: Sequence[bytes]
    ) -> None:
        """One command, one word of which is made of several pieces."""
        self._add(b"*%d\r\n" % (len(before) + 1 + len(after)))
        for word in before:
            self._add(b"$%d\r\n%s\r\n" % (len(word), word))
        self._add(b"$%d\r\n" % sum(map(len, value)))
        for piece in value:
            self._add(piece)
        self._add(_CRLF)
        for word in after:
            self._add(b"$%d\r\n%s\r\n" % (len(word), word))
        self.owed += 1

    def _add(self, piece: bytes | memoryview) -> None:
        if len(piece) <= _SMALL:
            self._outgoing += piece
            return
        self.flush()
        self._send_all(piece)

    def flush(self) -> None:
        if self._outgoing:
            self._send_all(self._outgoing)
            self._outgoing.clear()

    def _send_all(self, piece: bytes | bytearray | memoryview) -> None:
        self._sock.settimeout(self._left())
        self._sock.sendall(piece)  # its time-out is for all of it

    # -- replies ----------------------------------------------------------------------------------------

    def status(self) -> None:
        """+OK"""
        self._expect(b"+")
        self.owed -= 1

    def integer(self) -> int:
        line = self._expect(b":")
        self.owed -= 1
        return int(line)

    def bulk(self) -> bytes | None:
        value = self._bytes(int(self._expect(b"$")))
        self.owed -= 1
        return value

    def bulk_into(self, targets: Sequence[memoryview]) -> bool:
        """Fill them with one value, one after the other. False: no value, or one of another size."""
        size = int(self._expect(b"$"))
        fits = size == sum(map(len, targets))
        if fits:
            for target in targets:
                self._fill(target)
            self._end_bulk()
        elif size >= 0:
            self._drop(size)
            self._end_bulk()
        self.owed -= 1
        return fits

    def array(self) -> list[Any]:
        found = self._items(int(self._expect(b"*")))
        self.owed -= 1
        return found

    def _items(self, count: int, depth: int = 1) -> list[Any]:
        if depth > _DEEPEST:
            raise WireError("arrays in arrays without an end")
        return [self._item(depth) for _ in range(count)]

    def _item(self, depth: int) -> Any:
        line = self._line()
        match line[:1]:
            case b"*":
                return self._items(int(line[1:]), depth + 1)
            case b"$":
                return self._bytes(int(line[1:]))
            case b":":
                return int(line[1:])
            case _:
                raise WireError(f"got {line[:40]!r} inside an array")

    def _bytes(self, size: int) -> bytes | None:
        if size < 0:
            return None
        if size > _LONGEST_BYTES:
            raise WireError(f"a value of {size} bytes where few were due")
        value = bytearray(size)
        self._fill(memoryview(value))
        self._end_bulk()
        return bytes(value)

    def _end_bulk(self) -> None:
        end = bytearray(2)
        self._fill(memoryview(end))
        if end != _CRLF:
            raise WireError("a value is longer than it said")

    def _drop(self, size: int) -> None:
        sink = memoryview(bytearray(min(size, 1 << 20)))
        while size:
            piece = sink[: min(size, len(sink))]
            self._fill(piece)
            size -= len(piece)

    def _expect(self, kind: bytes) -> bytes:
        """The rest of the first line of a reply of this kind."""
        self.flush()
        line = self._line()
        if line.startswith(kind):
            return line[1:]
        if line.startswith(b"-"):
            self.owed -= 1
            text = line[1:].decode("utf-8", "replace")
            raise (Redirect if _REDIRECT.fullmatch(text) else ReplyError)(text)
        raise WireError(f"got {line[:40]!r} where {kind.decode()} was due")

    def _line(self) -> bytes:
        while (end := self._received.find(_CRLF, self._start, self._end)) < 0:
            if self._end == len(self._scratch):
                if not self._start:
                    raise WireError("a line without an end")
                rest = bytes(self._scratch[self._start : self._end])
                self._scratch[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
            self._end += self._receive(self._scratch[self._end :])
        line = bytes(self._scratch[self._start : end])
        self._start = end + 2
        if self._start == self._end:
            self._start = self._end = 0
        return line

    def _fill(self, target: memoryview) -> None:
        done = min(len(target), self._end - self._start)
        target[:done] = self._scratch[self._start : self._start + done]
        self._start += done
        if self._start == self._end:
            self._start = self._end = 0
        while done < len(target):
            done += self._receive(target[done:])

    def _receive(self, target: memoryview) -> int:
        self._sock.settimeout(self._left())
        count = self._sock.recv_into(target)
        if not count:
            raise WireError("the connection was closed")
        return count

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left
