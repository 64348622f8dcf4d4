"""Looks at the server from outside: what lookups find, and whether anything leaked.

Asks as engines without ranks would.
"""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvcellar.arena import Arena
from kvcellar.client import AdminClient, Grant, SchedulerClient
from kvcellar.errors import Unavailable
from kvcellar.ledger import Ledger, audit
from kvcellar.slab import Slab
from kvcellar.transfer import Stamp, digest_maker
from kvcellar.wire.report import StatusReport
from tests.chaos.world import MEMORY, PROMPTS, SPACES, object_bytes, prompt, truth

_LOOKUP_S = 10.0  # after one that is not answered in time, the others are misses too
_SESSIONS = 3  # per namespace: what all prompts pin together is more than one engine may hold


class Observer:
    def __init__(self, server: Path) -> None:
        self._server = server
        self._clients = [
            (space, number, SchedulerClient(server, f"observer-{space}-{number}", namespace, "observer"))
            for space, namespace in SPACES.items()
            for number in range(_SESSIONS)
        ]
        self._pinned: list[tuple[SchedulerClient, Grant]] = []

    def wait_connected(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        return all(
            client.wait_connected(max(0.0, deadline - time.monotonic())) for _, _, client in self._clients
        )

    def pin(self) -> set[str]:
        """All chunks that lookups find now. They stay, until `unpin` or as long as this server lives."""
        found: set[str] = set()
        for space, first, client in self._clients:
            for number in range(first, PROMPTS, _SESSIONS):
                hit = client.lookup(prompt(number), _LOOKUP_S)
                found.update(f"{space} {key.hex()}" for key in prompt(number)[: hit.chunks])
                self._pinned.append((client, hit))
        return found

    def unpin(self) -> None:
        for client, hit in self._pinned:
            if hit.lease:
                client.release(hit.lease, 0, hit.chunks)
                client.forget(hit.lease)
        self._pinned.clear()
        for _, _, client in self._clients:
            client.flush()

    def status(self) -> StatusReport:
        with AdminClient(self._server) as admin:
            return admin.status()

    def close(self) -> None:
        for _, _, client in self._clients:
            client.close()


def eventually(what: Callable[[], list[str]], timeout: float) -> list[str]:
    """Ask until there is nothing to complain about, or the time is over; returns the complaints."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            complaints = what()
        except Unavailable as error:
            complaints = [f"no status: {error}"]
        if not complaints or time.monotonic() > deadline:
            return complaints
        time.sleep(0.05)


def held(status: StatusReport) -> list[str]:
    """Nothing is asked any more and everybody is still attached: whose shares are left?"""
    return [
        f"{one.name} holds {one.leases} leases, {one.held_bytes} bytes"
        for one in status.sessions
        if one.leases
    ]


def ways_out(status: StatusReport) -> Counter[str]:
    """How stripes left since the server started."""
    groups = [group for space in status.namespaces for group in space.groups]
    return sum((Counter(group.left_by) for group in groups), Counter())


def leaks(status: StatusReport) -> list[str]:
    """Everybody has left: what is still accounted to somebody?"""
    found = held(status) + [f"session {one.name} is still there: {one.ranks}" for one in status.sessions]
    if status.in_grace:
        found.append("still in grace")
    if status.memory_used > status.memory_limit:
        found.append(f"{status.memory_used} bytes used, allowed are {status.memory_limit}")
    for space in status.namespaces:
        for number, group in enumerate(space.groups):
            if group.stripes + group.free != group.slots:
                model, counted = space.identity["model"], f"{group.stripes} + {group.free}"
                found.append(f"{model} group {number}: {counted} of {group.slots} slots")
    return found


class AtRest:
    """What a stopped server left behind, read without it."""

    def __init__(self, folder: Path) -> None:
        self.objects = 0
        self.wrong: list[str] = []  # bytes that are not the truth and have a checksum that says they are
        self.torn: list[str] = []  # ready, and no reader would take them
        arena, ledger = Arena(folder, MEMORY), Ledger(epoch=1, hold_limit=MEMORY)
        try:
            for adopted in arena.adopt():
                space = adopted.namespace.model
                shelf = ledger.open_room(adopted.namespace).shelves[adopted.key.group]
                shelf.adopt(adopted.key.number, adopted.rack.table, adopted.scan.ready, adopted.scan.limbo)
                self.torn += [
                    f"{space} rack {adopted.key.number} slot {slot}: limbo" for slot in adopted.scan.limbo
                ]
                for shard, fd in enumerate(adopted.rack.descriptors):
                    self._read(space, adopted, shard, Slab(fd, adopted.rack.spec.shapes[shard]))
            audit(ledger)
        finally:
            arena.close()

    def _read(self, space, adopted, shard: int, slab: Slab) -> None:
        group = adopted.key.group
        stamp = Stamp(SPACES[space], shard, group)
        for slot, key, _ in adopted.scan.ready:
            name = f"{space} shard {shard} group {group} slot {slot} chunk {key.hex()}"
            payload = slab.slot(slot)[: object_bytes(space, shard, group)]
            digest = digest_maker(SPACES[space].checksum)()
            digest.update(payload)
            self.objects += 1
            if stamp.promised(slab.headers[slot], key) != digest.intdigest():
                self.torn.append(name)
            elif not np.array_equal(payload, truth(space, shard, group, key)):
                self.wrong.append(name)
