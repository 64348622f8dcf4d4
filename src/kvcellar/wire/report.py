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
    model: str
    kv_dtype: str
    tenant: str
    seed: str
    chunk_tokens: int
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
