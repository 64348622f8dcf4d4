"""What `kvcellar status` shows, as the server sends it: one record for the table, --json and tests."""

import msgspec


class GroupReport(msgspec.Struct, frozen=True):
    kind: str
    stripes: int  # found by lookups or being written
    slots: int
    free: int
    racks: int
    slot_bytes: list[int]  # by shard
    left_by: dict[str, int]  # how stripes left: evicted, aborted, cleared, corrupt, temporary, returned


class NamespaceReport(msgspec.Struct, frozen=True):
    id: str
    identity: dict[str, str]  # every field of the namespace as text, long ones cut: what two may differ in
    shards: int
    pinned: bool
    engines: int
    memory_bytes: int
    groups: list[GroupReport]


class SessionReport(msgspec.Struct, frozen=True):
    name: str
    label: str
    ranks: list[int]  # -1 is the scheduler
    connected: list[int]
    namespaces: list[str]
    leases: int
    held_bytes: int
    counts: dict[str, int]


class TierReport(msgspec.Struct, frozen=True):
    label: str
    state: str  # up, scanning, no writes, down
    reason: str  # why it is not up, or not all of it is used
    objects: int  # 0 where the engine cannot tell
    used_bytes: int
    capacity_bytes: int
    read_bytes: int
    written_bytes: int
    read_rate: float  # bytes per second, lately; 0 if not measured
    write_rate: float
    queued: int  # stripes that wait to be written
    counts: dict[str, int]  # hits, misses, corrupt, errors, skipped, stuck: objects
    dropped: dict[str, int]  # stripes not written: full, evicted, down, unlabelled, failed


class StatusReport(msgspec.Struct, frozen=True):
    version: str
    pid: int
    epoch: int
    uptime_s: float
    socket: str
    folder: str
    memory_limit: int
    memory_used: int
    in_grace: bool
    draining: bool
    namespaces: list[NamespaceReport]
    sessions: list[SessionReport]
    counts: dict[str, int]
    tiers: list[TierReport]
