"""The arena: the racks of one server, in a folder of its own and within a hard limit of bytes.

Plans racks, keeps account of their bytes, and finds those of an earlier server again. What is found is
believed only if boot, format, owner and sizes fit; the rest of what is named like ours is removed. Whose the
folder is, and what there is room for, is next door, in folder.py. Knows nothing of leases.

    FOLDER/<namespace id>/namespace      the canonical encoding
    FOLDER/<namespace id>/g0-r3.table    stripe table of rack 3 of group 0
    FOLDER/<namespace id>/g0-r3-s1.slab  its slab for shard 1
"""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvcellar.arena.folder import check_space, lock_folder, namespace_folders
from kvcellar.arena.rack import Rack, RackSpec
from kvcellar.arena.table import Scan, StripeTable, TableId
from kvcellar.errors import BadRequest, Corrupt, StartupError
from kvcellar.identity import Namespace, NamespaceId, decode_namespace, slot_bytes
from kvcellar.slab import MAX_RACKS, MAX_SLOTS_PER_RACK

log = logging.getLogger(__name__)

# Racks start small, so that a young namespace is served at once, and double: a long-lived one has few.
_FIRST_SHARE, _LARGEST_SHARE = 64, 16  # of the limit
_FIRST_SLAB, _LARGEST_SLAB = 256 << 20, 1 << 30


class RackKey(NamedTuple):
    namespace: NamespaceId
    group: int
    number: int


class Adopted(NamedTuple):
    key: RackKey
    namespace: Namespace
    rack: Rack
    scan: Scan


class Arena:
    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.used = 0  # bytes of all racks, the planned ones included
        self.racks: dict[RackKey, Rack] = {}
        self.refused = 0  # racks of an earlier server that could not be believed
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._planned: set[RackKey] = set()
        self._lock = lock_folder(folder)
        try:
            check_space(folder, limit)
        except StartupError:
            os.close(self._lock)
            raise

    def __repr__(self) -> str:
        return f"<Arena {self.folder}: {len(self.racks)} racks, {self.used} of {self.limit} bytes>"

    # -- growing ----------------------------------------------------------------------------------------

    def plan(self, namespace: Namespace, group: int) -> RackSpec | None:
        """Set bytes aside for one more rack; None at the limit. Follow with `create` and `finish` or
        `cancel`.
        """
        sizes = slot_bytes(namespace, group)
        if self.used + sum(sizes) > self.limit:
            return None  # as always, once memory is full: every reserve asks
        mine = [
            key
            for key in (*self.racks, *self._planned)
            if (key.namespace, key.group) == (namespace.id, group)
        ]
        numbers = {key.number for key in mine}
        number = next(n for n in range(MAX_RACKS + 1) if n not in numbers)
        slots = self._slots(sum(sizes), max(sizes), len(mine))
        if slots == 0 or number == MAX_RACKS:
            return None
        table_id = TableId(self._boot, namespace.id, group, number)
        spec = RackSpec(self.folder / namespace.id.hex(), table_id, sizes, slots)
        # Headers and table take their share.
        while spec.slots > 0 and self.used + spec.file_bytes > self.limit:
            spec = spec._replace(slots=spec.slots - max(1, spec.slots // 64))
        if spec.slots == 0:
            return None
        self.used += spec.file_bytes
        self._planned.add(RackKey(namespace.id, group, number))
        return spec

    def create(self, namespace: Namespace, spec: RackSpec) -> Rack:
        """The file work; runs in a thread. May take a second per few GiB."""
        spec.folder.mkdir(mode=0o700, exist_ok=True)
        identity = spec.folder / "namespace"
        if not identity.exists():
            # One name per rack: groups of one namespace may be made at the same time.
            draft = spec.folder / f"namespace.g{spec.table_id.group}-r{spec.table_id.rack}"
            draft.write_bytes(namespace.encoded)
            draft.rename(identity)
        return Rack.create(spec)

    def finish(self, rack: Rack) -> RackKey:
        key = _key(rack.spec)
        self._planned.discard(key)
        self.racks[key] = rack
        return key

    def cancel(self, spec: RackSpec) -> None:
        self._planned.discard(_key(spec))
        self.used -= spec.file_bytes

    def remove(self, key: RackKey) -> None:
        """Return a rack's memory: file work; runs in a thread, about 0.1 s per GiB. Follow with `removed`.

        Nobody may map it any more, or its pages stay until he unmaps them.
        """
        self.racks[key].remove()

    def removed(self, key: RackKey) -> None:
        """Its bytes, and its number, may be planned again."""
        self.used -= self.racks.pop(key).spec.file_bytes

    def _slots(self, stripe: int, largest: int, racks: int) -> int:
        share = min(self.limit // _FIRST_SHARE << min(racks, 16), self.limit // _LARGEST_SHARE)
        per_slab = min(_FIRST_SLAB << min(racks, 16), _LARGEST_SLAB)
        wanted = max(1, min(share // stripe, per_slab // largest, MAX_SLOTS_PER_RACK))
        return min(wanted, (self.limit - self.used) // stripe)

    # -- starting and stopping --------------------------------------------------------------------------

    def adopt(self) -> Iterator[Adopted]:
        """Every believable rack of an earlier server. What cannot be believed is removed and counted."""
        too_large: list[int] = []
        for folder in namespace_folders(self.folder):
            try:
                namespace = decode_namespace((folder / "namespace").read_bytes())
                if namespace.id.hex() != folder.name:
                    raise Corrupt(f"{folder} holds another namespace")
            except (OSError, BadRequest, Corrupt) as error:
                self._refuse(error)
                shutil.rmtree(folder)
                continue
            yield from self._adopt_racks(folder, namespace, too_large)
            _remove_strays(folder)
        if too_large:
            log.warning(
                "not adopted: %d MiB that do not fit into --memory any more; what was there is forgotten",
                sum(too_large) >> 20,
            )

    def _adopt_racks(self, folder: Path, namespace: Namespace, too_large: list[int]) -> Iterator[Adopted]:
        for path in sorted(folder.glob("*.table")):
            match = re.fullmatch(r"g(\d+)-r(\d+)\.table", path.name)
            group, number = map(int, match.groups()) if match else (-1, -1)
            try:
                table_id = TableId(self._boot, namespace.id, group, number)
                table = StripeTable.open(path, table_id)
                spec = RackSpec(folder, table_id, slot_bytes(namespace, group), table.slots)
                if self.used + spec.file_bytes > self.limit:
                    self.refused += 1
                    too_large.append(spec.file_bytes)
                    _remove(path)
                    continue
                rack = Rack.adopt(spec, table)
            except (OSError, BadRequest, Corrupt) as error:
                self._refuse(error)
                _remove(path)
                continue
            self.used += spec.file_bytes
            self.racks[_key(spec)] = rack
            yield Adopted(_key(spec), namespace, rack, table.scan())

    def _refuse(self, error: Exception) -> None:
        self.refused += 1
        log.warning("not adopted: %s", error)

    def close(self) -> None:
        """Let go of everything; the files stay, for the next server to adopt."""
        for rack in self.racks.values():
            rack.close()
        os.close(self._lock)


def _key(spec: RackSpec) -> RackKey:
    return RackKey(spec.table_id.namespace, spec.table_id.group, spec.table_id.rack)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _remove_strays(folder: Path) -> None:
    """Slabs without a table: their rack was never finished, or refused."""
    tables = {path.stem for path in folder.glob("*.table")}
    for path in folder.iterdir():
        belongs = path.suffix == ".table" or path.stem.rpartition("-")[0] in tables
        if path.name != "namespace" and not belongs:
            _remove(path)
    if not tables:
        shutil.rmtree(folder)
