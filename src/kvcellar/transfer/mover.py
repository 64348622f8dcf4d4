"""What moves all of a rank's KV, whatever memory it is in: the same calls for host and GPU."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvcellar.errors import Unavailable
from kvcellar.identity import ChunkKey, CopyPlan, Namespace
from kvcellar.slab import Bytes
from kvcellar.transfer.host import HostTransfer
from kvcellar.transfer.slots import Slots


class Rows(NamedTuple):
    """The part of a copy in one group: a plan, and the key of each of its rows."""

    plan: CopyPlan
    keys: Sequence[ChunkKey]


class Mover(Protocol):
    """Calls of one direction come one at a time; a load may run beside a store."""

    def object_bytes(self, group: int) -> int: ...

    def fence(self) -> Any:
        """A point in the engine's work, taken on the engine's own thread: copies start after it."""

    def wait(self, after: Any) -> None:
        """Until the engine is past that point, and its answer on its way."""

    def store(self, rows: Sequence[Rows], slots: Slots, after: Any) -> None:
        """Blocks to slots. When it returns, bytes and headers are in place."""

    def load(self, rows: Sequence[Rows], slots: Slots, after: Any) -> list[list[int]]:
        """Slots to blocks; returns the rows that failed, whose blocks hold garbage."""


class HostMover:
    """For engines whose KV lies in host memory."""

    def __init__(self, namespace: Namespace, shard: int, groups: Sequence[Sequence[Bytes]]) -> None:
        self._transfers = [
            HostTransfer(namespace, shard, number, layers) for number, layers in enumerate(groups)
        ]

    def object_bytes(self, group: int) -> int:
        return self._transfers[group].layout.object_bytes

    def fence(self) -> None:
        """The engine's step is over when it returns: there is nothing to wait for."""

    def wait(self, after: Any) -> None:
        """Likewise."""

    def store(self, rows: Sequence[Rows], slots: Slots, after: Any) -> None:  # noqa: ARG002
        for plan, keys in rows:
            self._transfers[plan.group].store(plan, keys, slots)

    def load(self, rows: Sequence[Rows], slots: Slots, after: Any) -> list[list[int]]:  # noqa: ARG002
        return [self._transfers[plan.group].load(plan, keys, slots) for plan, keys in rows]


class NoMover:
    """For a rank that cannot copy: every call says why, and is answered for as one that failed."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def object_bytes(self, group: int) -> int:  # noqa: ARG002
        return 0

    def fence(self) -> None:
        """There is nothing to wait for."""

    def wait(self, after: Any) -> None:
        """Likewise."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise Unavailable(self._reason)

    store = load = _refuse
