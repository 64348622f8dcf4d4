"""A storage engine in this process's own memory: the smallest that passes the conformance suite.

For tests, and to read before writing another. Nothing is shared and nothing survives.
"""

import threading
import time
from collections.abc import Mapping, Sequence

from kvcellar.tiers.engine import Buffer, EngineError, Usage
from kvcellar.tiers.remote import Options


class MemoryEngine:
    def __init__(self, delay: float = 0.0) -> None:
        """`delay`: seconds that every call takes, to see what a slow tier does to others."""
        self._delay = delay
        self._values: dict[str, tuple[bytes, bytes]] = {}  # header, payload
        self._lock = threading.Lock()
        self._closed = False

    def write(self, name: str, source: Buffer) -> None:
        value = bytes(source.header), bytes(source.payload)
        self._check_open()
        with self._lock:
            self._values[name] = value

    def read(self, name: str, target: Buffer) -> bool:
        self._check_open()
        with self._lock:
            found = self._values.get(name)
        if found is None or len(found[1]) != target.size:
            return False
        target.header[:], target.payload[:] = found
        return True

    def exist(self, names: Sequence[str]) -> list[bool]:
        self._check_open()
        with self._lock:
            return [name in self._values for name in names]

    def delete(self, names: Sequence[str]) -> None:
        self._check_open()
        with self._lock:
            for name in names:
                self._values.pop(name, None)

    def usage(self) -> Usage:
        with self._lock:
            taken = sum(len(header) + len(payload) for header, payload in self._values.values())
            return Usage(len(self._values), taken, 0)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._values.clear()

    def _check_open(self) -> None:
        if self._delay:
            time.sleep(self._delay)
        if self._closed:
            raise EngineError("closed")


def open_memory(url: str, options: Mapping[str, str]) -> MemoryEngine:
    """memory://?delay=SECONDS"""
    given = Options(url, options)
    delay = float(given.text("delay", "0", r"\d{1,4}(\.\d+)?"))
    given.finish()
    return MemoryEngine(delay)
