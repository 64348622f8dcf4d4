"""What a storage engine must do to be a tier. Small on purpose: everything else is the tier's own work.

An engine reads, writes and deletes values by name. It knows nothing of namespaces, chunks, capacity
policy, retries or deadlines. Its methods block; the tier calls them from several threads at once and bounds
how many. A value is an object header of 64 bytes followed by the object's bytes, so that it describes itself
wherever it lies.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvcellar.errors import EngineError
from kvcellar.identity import ChunkKey, NamespaceId

__all__ = ["Buffer", "Engine", "EngineError", "PartlyAway", "Usage", "object_name"]


class PartlyAway(EngineError):
    """What this name needs is away, and other names are served: no reason to leave the tier alone."""


class Buffer(NamedTuple):
    """Where a value is in memory, or shall be: views of a slab, writable."""

    header: memoryview  # 64 bytes
    slot: memoryview  # starts on a page and is whole pages, as direct I/O wants it
    size: int  # the object's bytes, at the start of the slot; what follows them has no meaning
    # All of the slab, for engines that register memory once and use it often. Such an engine has a method
    # `forget(memory)`, which is called when no buffer of it will come any more, and raises nothing.
    memory: memoryview | None = None

    @property
    def payload(self) -> memoryview:
        return self.slot[: self.size]


class Usage(NamedTuple):
    """What an engine knows of itself; it may have a method `usage` that says so, quickly and without I/O."""

    objects: int
    used_bytes: int
    capacity_bytes: int
    scanning: bool = False  # what an earlier server left is still being found: unknown is a miss
    trouble: str = ""  # what keeps it from using all of its capacity


class Engine(Protocol):
    """Every method may raise EngineError, and nothing else, within the time-out it was made with."""

    def write(self, name: str, source: Buffer) -> None:
        """Make the value readable under its name, all of it or not at all. The same name means the same
        value: what is there already may stay.
        """

    def read(self, name: str, target: Buffer) -> bool:
        """Fill the header and the payload. False: nothing there, or not of this size; the target's content
        is then undefined.
        """

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Which of them are there: in one round trip, where the engine can. One that asks nobody has
        `knows_by_heart = True`: that it answers is no sign that reading works.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Names that are not there are no error."""

    def close(self) -> None: ...


def object_name(namespace: NamespaceId, key: ChunkKey, group: int, shard: int) -> str:
    """Letters, digits, '/' and '-' alone, so that it can be a key, a path or a URL."""
    return f"{namespace.hex()}/{key.hex()}-{group}-{shard}"
