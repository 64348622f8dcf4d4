"""Write-back alone: real slabs, a real tier, and an engine of storage that can be held."""

import asyncio
import itertools
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from kvcellar.arena import Arena
from kvcellar.identity import layout_of
from kvcellar.ledger import Ledger, audit
from kvcellar.server import writeback as module
from kvcellar.server.objects import Objects
from kvcellar.server.writeback import WriteBack
from kvcellar.slab import Place
from kvcellar.tiers.admission import WriteEverything, WriteFilter, WriteReused
from kvcellar.tiers.memory import MemoryEngine
from kvcellar.tiers.tier import Tier
from kvcellar.transfer.slots import Stamp
from tests.support import Engine, clear, keys, namespace

SPACE = namespace(checksum="xxh3-64")
SIZE = layout_of(SPACE, 0, 0).object_bytes


class Held(MemoryEngine):
    """Remembers what it was asked to write, by several threads at once, and writes when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.order: list[str] = []
        self.asked = 0

    def write(self, name, source):
        self.order.append(name)
        assert self.gate.wait(30)
        super().write(name, source)

    def exist(self, names):
        self.asked += 1
        return super().exist(names)


class Noting(Tier):
    """Remembers in which order writing was begun."""

    def __init__(self, label, open_engine) -> None:
        super().__init__(label, open_engine)
        self.begun: list[str] = []

    def write(self, name, source):
        self.begun.append(name)
        return super().write(name, source)


class Rig:
    def __init__(self, folder: Path, write_filter: WriteFilter) -> None:
        self.arena = Arena(folder, 16 << 20)
        self.ledger = Ledger(epoch=1, hold_limit=1 << 30)
        self.store = Held()
        self.tier = Noting("held", lambda: self.store)
        self.objects = Objects(self.arena)
        self.back = WriteBack(self.ledger, self.objects, [self.tier], [write_filter])
        self.ledger.published, self.ledger.used = self.back.published, self.back.used
        self.engine = Engine(self.ledger, SPACE, slots=1)
        [shelf] = self.engine.room.shelves
        shelf.retire(0)  # a table without slabs
        spec = self.arena.plan(SPACE, 0)
        assert spec is not None
        rack = self.arena.create(SPACE, spec)
        shelf.add_rack(self.arena.finish(rack).number, rack.table)
        self.shelf = shelf

    @property
    def box(self):
        return self.back.outboxes[0]

    def write(self, count: int, seed: int = 0, labelled: bool = True) -> None:
        """Store a prompt: bytes, headers, commit."""
        granted = self.engine.reserve(keys(count, seed))
        goods = self.objects.goods(self.engine.room)
        assert goods is not None
        for key, place in zip(keys(count, seed), granted.places[0], strict=True):
            [one] = self.objects.of_stripe(goods, 0, key, Place(place))
            one.buffer.payload[:] = bytes(SIZE)
            one.buffer.header[:] = bytes(64)
            if labelled:
                Stamp(SPACE, 0, 0).write(one.buffer.header, key, 0)
        self.engine.commit(granted)

    def names(self, count: int, seed: int = 0) -> list[str]:
        return [f"{SPACE.id.hex()}/{key.hex()}-0-0" for key in keys(count, seed)]

    async def asked(self, calls: int) -> None:
        while len(self.store.order) < calls:
            await asyncio.sleep(0.001)

    async def drained(self) -> None:
        self.store.gate.set()
        while self.box.running or self.box.waiting:
            await asyncio.sleep(0.001)
        assert self.ledger.own.held.total() == 0
        audit(self.ledger)


@pytest.fixture
def run():
    folders = []

    def run(test, write_filter=WriteEverything):
        async def body():
            folders.append(Path(tempfile.mkdtemp(prefix="kvcellar-writeback-", dir="/dev/shm")))
            rig = Rig(folders[-1], write_filter())
            async with asyncio.timeout(20):
                await rig.tier.start(5.0)
                await test(rig)
            rig.tier.close()
            rig.arena.close()

        asyncio.run(body())

    yield run
    for folder in folders:
        shutil.rmtree(folder)


def test_everything_is_written_in_the_order_of_the_prefix(run):
    async def test(rig):
        rig.write(30)
        await rig.drained()
        assert sorted(rig.store.order) == sorted(rig.names(30))
        assert rig.tier.begun == rig.names(30)
        assert rig.store.exist(rig.names(30)) == [True] * 30
        assert not rig.box.dropped

    run(test)


def test_under_pressure_the_newest_are_dropped_and_counted(run, monkeypatch):
    monkeypatch.setattr(module, "MAX_QUEUED", 5)

    async def test(rig):
        rig.write(20)
        assert rig.box.dropped == {"full": 15}
        await rig.drained()
        assert sorted(rig.store.order) == sorted(rig.names(20)[:5])

    run(test)


def test_only_what_is_being_written_is_kept_from_eviction(run):
    async def test(rig):
        rig.write(20)
        await rig.asked(3)
        running = rig.box.running
        assert rig.ledger.own.held.total() == running
        audit(rig.ledger)
        rig.ledger.published = None
        others = itertools.count(1000)
        while rig.shelf.get(keys(20)[19]) is not None:  # its prompt's last chunk is the first to go
            rig.engine.store(keys(1, seed=next(others)))
        await rig.drained()
        assert rig.box.dropped["evicted"] > 0
        assert rig.store.exist(rig.names(running)) == [True] * running

    run(test)


def test_what_an_engine_committed_without_writing_it_is_not_believed(run):
    async def test(rig):
        rig.write(4, labelled=False)
        await rig.drained()
        assert rig.box.dropped == {"unlabelled": 4}
        assert rig.store.order == []

    run(test)


def test_a_slab_that_was_cut_short_costs_no_more_than_what_would_be_written(run):
    """An engine has its descriptor, and may do that."""

    async def test(rig):
        granted = rig.engine.reserve(keys(4))
        for path in rig.arena.folder.rglob("*.slab"):
            os.truncate(path, 0)
        assert rig.engine.commit(granted) == 4
        assert not rig.engine.session.leases
        await rig.drained()
        assert rig.box.dropped == {"failed": 4}

    run(test)


def test_what_is_cleared_while_it_is_written_is_freed_after(run):
    async def test(rig):
        rig.write(4)
        await rig.asked(3)
        assert clear(rig.ledger) == 4
        free = rig.shelf.free_slots
        await rig.drained()
        assert rig.shelf.free_slots == free + 3
        assert rig.shelf.free_slots == rig.shelf.slots

    run(test)


def test_what_is_seen_once_is_not_written_where_only_reuse_is(run):
    async def test(rig):
        rig.store.gate.set()
        rig.write(10)
        assert not rig.box.waiting
        assert rig.engine.hit(keys(4)) == 4  # the first use of its beginning
        await rig.asked(4)
        assert sorted(rig.store.order) == sorted(rig.names(4))
        await rig.drained()
        assert rig.engine.hit(keys(10)) == 10
        await rig.asked(10)
        await rig.drained()
        assert sorted(rig.store.order) == sorted(rig.names(10)), "and nothing twice"

    run(test, WriteReused)


def test_what_is_computed_again_is_written(run):
    async def test(rig):
        rig.store.gate.set()
        rig.write(5)
        assert clear(rig.ledger) == 5
        rig.write(8)
        await rig.drained()
        assert sorted(rig.store.order) == sorted(rig.names(5))

    run(test, WriteReused)


def test_what_is_used_and_there_already_is_not_counted_as_written(run):
    async def test(rig):
        rig.store.gate.set()
        rig.write(6)
        assert rig.engine.hit(keys(6)) == 6
        await rig.asked(6)
        await rig.drained()
        written = rig.tier.stats.writes.bytes
        assert clear(rig.ledger) == 6
        rig.ledger.published = None
        rig.write(6)  # in memory again, as if brought up
        assert rig.engine.hit(keys(6)) == 6
        assert await rig.tier.exist(rig.names(6)) == [True] * 6  # behind the question about the used ones
        await rig.drained()
        assert rig.tier.stats.writes.bytes == written

    run(test, WriteReused)


def test_a_use_costs_nothing_where_everything_is_written(run):
    async def test(rig):
        rig.store.gate.set()
        rig.write(6)
        await rig.drained()
        asked = rig.store.asked
        assert rig.engine.hit(keys(6)) == 6
        await rig.tier.exist(rig.names(1))
        assert rig.store.asked == asked + 1

    run(test)
