"""Puts together what `kvcellar status` shows, from the ledger, the arena and the members."""

import hashlib
import os

import msgspec

from kvcellar import __version__
from kvcellar.arena import Arena
from kvcellar.identity import NamespaceId
from kvcellar.ledger import Ledger, Room, Shelf
from kvcellar.server.members import Members
from kvcellar.wire.report import GroupReport, NamespaceReport, SessionReport, StatusReport, TierReport

_TEXT = 200  # characters of a namespace's field


def make_report(
    ledger: Ledger,
    arena: Arena,
    members: Members,
    *,
    socket: str,
    uptime_s: float,
    draining: bool,
    tiers: list[TierReport],
) -> StatusReport:
    return StatusReport(
        version=__version__,
        pid=os.getpid(),
        epoch=ledger.epoch,
        uptime_s=uptime_s,
        socket=socket,
        folder=str(arena.folder),
        memory_limit=arena.limit,
        memory_used=arena.used,
        in_grace=ledger.in_grace,
        draining=draining,
        namespaces=[_namespace(name, room, ledger, arena) for name, room in ledger.rooms.items()],
        sessions=_sessions(ledger, members),
        counts=dict(ledger.counts) | {"racks_refused": arena.refused},
        tiers=tiers,
    )


def _namespace(name: NamespaceId, room: Room, ledger: Ledger, arena: Arena) -> NamespaceReport:
    namespace = room.namespace  # whose own id would be hashed again at every use
    racks = [rack for key, rack in arena.racks.items() if key.namespace == name]
    return NamespaceReport(
        id=name.hex(),
        identity={field: _text(getattr(namespace, field)) for field in namespace.__struct_fields__},
        shards=namespace.parallel.kv_world_size,
        pinned=room.pinned,
        engines=sum(name in session.namespaces for session in ledger.sessions.values()),
        memory_bytes=sum(rack.spec.file_bytes for rack in racks),
        groups=[
            _group(
                namespace.groups[number].kind,
                shelf,
                [r.spec.slot_bytes for r in racks if r.spec.table_id.group == number],
            )
            for number, shelf in enumerate(room.shelves)
        ],
    )


def _text(value: object) -> str:
    """Short, since an engine may register four megabytes, and not the same for two that differ."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if len(text) <= _TEXT:
        return text
    return f"{text[:_TEXT]}... {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def _group(kind: str, shelf: Shelf, slot_bytes: list[tuple[int, ...]]) -> GroupReport:
    return GroupReport(
        kind=kind,
        stripes=len(shelf),
        slots=shelf.slots,
        free=shelf.free_slots,
        racks=len(shelf.tables),
        slot_bytes=list(slot_bytes[0]) if slot_bytes else [],
        left_by=dict(shelf.left_by),
    )


def _sessions(ledger: Ledger, members: Members) -> list[SessionReport]:
    reports = []
    for session in ledger.sessions.values():
        mine = [member for member in members.all.values() if member.session is session]
        reports.append(
            SessionReport(
                name=session.name,
                label=next((member.label for member in mine if member.label), ""),
                ranks=sorted(session.members),
                connected=sorted(member.rank for member in mine if member.link is not None),
                namespaces=[namespace.hex() for namespace in session.namespaces],
                leases=len(session.leases),
                held_bytes=session.held_bytes,
                counts=dict(session.counts),
            )
        )
    return reports
