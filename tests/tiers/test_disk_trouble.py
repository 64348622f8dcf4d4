"""The disk engine on a disk that fails, in one place or altogether, and where files cannot be opened."""

import asyncio
import errno
import os
import resource
from pathlib import Path

import pytest

from kvcellar.errors import StartupError
from kvcellar.slab import PAGE
from kvcellar.tiers.crate import Crate, CrateShape
from kvcellar.tiers.disk import DiskEngine
from kvcellar.tiers.engine import EngineError
from kvcellar.tiers.tier import Tier
from tests.server.engine import PATIENCE
from tests.tiers.conformance import MIB, buffer, name_of
from tests.tiers.test_disk_engine import readable, scanned


def test_an_index_that_cannot_be_read_somewhere_costs_the_slots_there(tmp_path, monkeypatch):
    """Of a crate that is scanned in several pieces."""
    engine = DiskEngine(tmp_path, 256 * MIB)
    engine.write(name_of(0), buffer(4096, seed=0))
    slots = os.stat(tmp_path / "crate-0000.data").st_size // 4096
    for number in range(1, slots):
        engine.write(name_of(number), buffer(4096, seed=number))
    engine.close()
    pread = os.pread

    def pread_but_for_a_bad_sector(fd: int, count: int, at: int) -> bytes:
        if count > 4096 and at > PAGE and (at - PAGE) // count == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, count, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread_but_for_a_bad_sector)
        again = scanned(DiskEngine(tmp_path, 256 * MIB))
    found = readable(again, slots, 4096)
    assert found == [number for number in range(slots) if not 256 <= number < 512]
    again.delete([name_of(number) for number in found])
    for number in range(slots, slots + len(found)):
        again.write(name_of(number), buffer(4096, seed=number))
    assert {path.name for path in tmp_path.glob("crate-*")} == {"crate-0000.data", "crate-0000.index"}
    again.check()
    again.close()


def bad_sector(monkeypatch, call, at):
    """One slot of a crate in which this cannot be done."""
    really = getattr(Crate, call)

    def but_for_one(crate, slot, view):
        if (crate.number, slot) == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really(crate, slot, view)

    monkeypatch.setattr(Crate, call, but_for_one)


def test_a_crate_whose_first_page_cannot_be_read_costs_the_object_there(tmp_path, monkeypatch):
    """Also if it is found out when the crate is opened, to see what the file system can do."""
    engine = DiskEngine(tmp_path, 2 * MIB)
    for number in range(10):
        engine.write(name_of(number), buffer(5000, seed=number))
    engine.close()
    preadv = os.preadv

    def preadv_but_for_a_bad_sector(fd: int, views: list[memoryview], at: int) -> int:
        if at == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", preadv_but_for_a_bad_sector)
    again = scanned(DiskEngine(tmp_path, 2 * MIB))
    for _ in range(2):
        with pytest.raises(EngineError, match="Input/output error"):
            again.read(name_of(0), buffer(5000))
    assert readable(again, 10) == list(range(1, 10))
    again.check()
    again.close()


def test_a_slot_that_cannot_be_written_costs_one_write(tmp_path, monkeypatch):
    engine = DiskEngine(tmp_path, 2 * MIB)
    engine.write(name_of(0), buffer(5000, seed=0))
    bad_sector(monkeypatch, "write", (0, 1))
    with pytest.raises(EngineError, match="Input/output error"):
        engine.write(name_of(1), buffer(5000, seed=1))
    for number in range(1, 600):  # more than twice what fits: its turn does not come again
        engine.write(name_of(number), buffer(5000, seed=number))
    assert 599 in readable(engine, 600)
    engine.check()
    engine.close()


def test_an_object_that_cannot_be_read_is_forgotten_and_can_be_written_again(tmp_path, monkeypatch):
    engine = DiskEngine(tmp_path, 2 * MIB)
    engine.write(name_of(0), buffer(5000, seed=0))
    with monkeypatch.context() as patch:
        bad_sector(patch, "read", (0, 0))
        for _ in range(2):
            with pytest.raises(EngineError, match="Input/output error"):
                engine.read(name_of(0), buffer(5000))
    assert engine.exist([name_of(0)]) == [False]
    assert not engine.read(name_of(0), buffer(5000))
    engine.write(name_of(0), buffer(5000, seed=0))
    assert readable(engine, 1) == [0]
    engine.check()
    engine.close()


def test_an_object_that_cannot_be_read_is_not_found_again_after_a_restart(tmp_path, monkeypatch):
    engine = DiskEngine(tmp_path, 2 * MIB)
    for number in range(2):
        engine.write(name_of(number), buffer(5000, seed=number))
    bad_sector(monkeypatch, "read", (0, 0))
    for _ in range(2):
        with pytest.raises(EngineError, match="Input/output error"):
            engine.read(name_of(0), buffer(5000))
    engine.close()
    again = scanned(DiskEngine(tmp_path, 2 * MIB))
    assert again.exist([name_of(0), name_of(1)]) == [False, True]
    again.close()


def test_what_cannot_be_opened_now_is_kept_for_later(tmp_path):
    """Too many open files: no reason to delete any of them."""
    engine = DiskEngine(tmp_path, 8 * MIB)
    for number in range(900):
        engine.write(name_of(number), buffer(5000, seed=number))
    found = readable(engine, 900)
    engine.close()
    before = {path.name for path in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    for spare in range(-1, 9):  # wherever it happens
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, limits[1]))
        try:
            with pytest.raises((EngineError, StartupError), match="Too many open files"):
                DiskEngine(tmp_path, 8 * MIB)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert {path.name for path in tmp_path.iterdir()} == before
    assert len(list(Path("/proc/self/fd").iterdir())) == used
    again = scanned(DiskEngine(tmp_path, 8 * MIB))
    assert readable(again, 900) == found
    again.close()


def test_a_folder_that_is_refused_is_let_go(tmp_path):
    """What cannot be removed is said; and not that another server uses the folder, when it is tried again."""
    DiskEngine(tmp_path, 2 * MIB).close()
    (tmp_path / "crate-0003.data").mkdir()
    for _ in range(2):
        with pytest.raises(StartupError, match=r"cannot remove crate 3 .*delete it by hand"):
            DiskEngine(tmp_path, 2 * MIB)
    (tmp_path / "crate-0003.data").rmdir()
    DiskEngine(tmp_path, 2 * MIB).close()


def test_a_dead_disk_is_left_alone_before_much_of_it_is_forgotten(tmp_path, monkeypatch):
    """Nothing can be read any more; perhaps it will be, after a while."""
    engine = DiskEngine(tmp_path, 2 * MIB)
    for number in range(50):
        engine.write(name_of(number), buffer(5000, seed=number))

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def ask() -> None:
        tier = Tier("disk", lambda: engine)
        await tier.start(PATIENCE)
        with monkeypatch.context() as patch:
            patch.setattr(Crate, "read", fail)
            for number in range(50):
                assert not await tier.read(name_of(number), buffer(5000), lambda _: True)
        assert tier.state == ("down", f"{tmp_path}: Input/output error")

    asyncio.run(ask())
    assert len(readable(engine, 50)) >= 45
    engine.close()


def test_what_is_known_of_a_dead_disk_is_no_sign_that_it_is_back(tmp_path, monkeypatch):
    """Every lookup asks what is there, and then reads it: for a minute, in vain."""
    engine = DiskEngine(tmp_path, 2 * MIB)
    names = [name_of(number) for number in range(100)]
    for number, name in enumerate(names):
        engine.write(name, buffer(5000, seed=number))
    now = 0.0

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def ask() -> None:
        nonlocal now
        tier = Tier("disk", lambda: engine, clock=lambda: now)
        await tier.start(PATIENCE)
        with monkeypatch.context() as patch:
            patch.setattr(Crate, "read", fail)
            for _ in range(60):
                found = [name for name, there in zip(names, await tier.exist(names), strict=True) if there]
                for name in found[:8]:
                    assert not await tier.read(name, buffer(5000), lambda _: True)
                now += 1.0
        assert tier.state == ("down", f"{tmp_path}: Input/output error")
        assert tier.stats.counts["misses"] == 0, "nobody knows"
        now += 30.0
        assert await tier.exist(names[99:]) == [True]
        assert await tier.read(names[99], buffer(5000), lambda _: True)
        assert tier.state == ("up", "")

    asyncio.run(ask())
    assert len(readable(engine, 100)) >= 85
    engine.close()


def test_a_crate_that_was_removed_is_gone_whatever_its_last_close_says(tmp_path, monkeypatch):
    """A file system on the network tells of late trouble then, and the descriptor may be another file's."""
    crate = Crate.create(tmp_path, 0, CrateShape(PAGE, 4))
    used = len(list(Path("/proc/self/fd").iterdir()))
    close = os.close

    def close_with_late_trouble(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close_with_late_trouble)
        crate.remove()
    assert not list(tmp_path.iterdir())
    assert len(list(Path("/proc/self/fd").iterdir())) == used - 2
