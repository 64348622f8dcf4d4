"""The operator's side: one question, one answer."""

from pathlib import Path
from types import TracebackType

import msgspec

from kvcellar.client.link import Link
from kvcellar.errors import VersionMismatch
from kvcellar.wire import messages as m
from kvcellar.wire.report import StatusReport


class AdminClient:
    """Raises Unavailable without a server, and whatever the server refuses with."""

    def __init__(self, path: Path, timeout: float = 5.0) -> None:
        self._timeout = timeout
        self._link = Link.open(path, m.Hello(m.PROTOCOL_VERSION, "admin"), timeout)

    def __enter__(self) -> "AdminClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.close()

    def ping(self) -> None:
        self._link.call(m.Ping(), self._timeout, m.Pong)

    def status(self) -> StatusReport:
        answer = self._link.call(m.Status(), self._timeout, m.Report)
        try:
            return msgspec.msgpack.decode(answer.status, type=StatusReport)
        except msgspec.MsgspecError as error:
            raise VersionMismatch(
                f"the report is of another version ({error}); install the same kvcellar on both sides"
            ) from None

    def clear(self, namespace: bytes | None = None) -> int:
        """Forget one namespace, or everything; returns how many stripes that were."""
        return self._link.call(m.Clear(namespace), self._timeout, m.Settled).stripes

    def pin(self, namespace: bytes, pinned: bool) -> None:
        self._link.call(m.Pin(namespace, pinned), self._timeout, m.Settled)
