"""The disk engine: conformance, and what a disk adds: capacity, leftovers, torn files, trouble."""

import contextlib
import os
import threading
from pathlib import Path

import pytest

from kvcellar.errors import ConfigError, StartupError
from kvcellar.slab import PAGE
from kvcellar.tiers.disk import DiskEngine, open_disk
from kvcellar.tiers.engine import EngineError
from tests.mounts import tmpfs
from tests.server.engine import eventually
from tests.tiers.conformance import MIB, EngineConformance, buffer, name_of, run_threads, same


class TestDiskEngine(EngineConformance):
    @pytest.fixture
    def make(self, tmp_path):
        return lambda: DiskEngine(tmp_path / "disk", 64 * MIB)


class TestDiskEngineOnTmpfs(EngineConformance):
    """Where O_DIRECT may not work."""

    @pytest.fixture
    def make(self, small_tmpfs):
        return lambda: DiskEngine(small_tmpfs / "disk", 64 * MIB)


@pytest.fixture
def small_tmpfs(tmp_path):
    with tmpfs(tmp_path / "mounted", "96m") as mounted:
        yield mounted


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def scanned(engine: DiskEngine) -> DiskEngine:
    eventually(lambda: not engine.usage().scanning)
    return engine


def readable(engine: DiskEngine, count: int, size: int = 5000) -> list[int]:
    """Which objects can be read; whatever can must be right."""
    found = []
    for number in range(count):
        read = buffer(size)
        if engine.read(name_of(number), read):
            assert same(read, buffer(size, seed=number))
            found.append(number)
    return found


# -- capacity ------------------------------------------------------------------------------------------------


def test_capacity_is_never_exceeded_and_the_newest_stay(tmp_path):
    engine = DiskEngine(tmp_path, 2 * MIB)
    for number in range(1000):
        engine.write(name_of(number), buffer(5000, seed=number))
        assert bytes_in(tmp_path) <= 2 * MIB
    found = readable(engine, 1000)
    assert 200 < len(found) < 256, "8 KiB each, and little is lost to the books"
    assert 999 in found
    engine.close()


def test_what_is_read_again_outlives_what_is_not(tmp_path):
    engine = DiskEngine(tmp_path, 2 * MIB)
    for number in range(600):
        engine.write(name_of(number), buffer(5000, seed=number))
        assert engine.read(name_of(0), buffer(5000))
    assert readable(engine, 2) == [0]
    engine.close()


def test_a_slot_that_is_being_read_is_not_overwritten(tmp_path):
    engine = DiskEngine(tmp_path, 2 * MIB)
    engine.write(name_of(0), buffer(5000, seed=0))
    crate = engine._crates[0]
    begun, go_on = threading.Event(), threading.Event()
    really_read = crate.read

    def slow_read(slot, target):
        begun.set()
        assert go_on.wait(30)
        return really_read(slot, target)

    crate.read = slow_read  # type: ignore[method-assign]
    read, results = buffer(5000), []
    reader = threading.Thread(target=lambda: results.append(engine.read(name_of(0), read)))
    reader.start()
    assert begun.wait(30)
    for number in range(1, 600):  # more than twice what fits
        engine.write(name_of(number), buffer(5000, seed=number))
    go_on.set()
    reader.join(30)
    assert results == [True]
    assert same(read, buffer(5000, seed=0))
    engine.close()


def test_many_threads_stay_within_capacity(tmp_path):
    engine = DiskEngine(tmp_path, 4 * MIB)

    def work(thread: int) -> None:
        for turn in range(60):
            size = (thread % 3 + 1) * 4096 * 5
            engine.write(name_of(thread * 1000 + turn), buffer(size, seed=turn))
            assert bytes_in_use(tmp_path) <= 4 * MIB

    run_threads(work, 6)
    engine.close()


def bytes_in_use(folder: Path) -> int:
    """Files may vanish while we look."""
    total = 0
    for path in folder.iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def test_another_size_gets_room_when_the_disk_is_full_of_one(tmp_path):
    engine = DiskEngine(tmp_path, 4 * MIB)
    for number in range(1000):
        engine.write(name_of(number), buffer(5000, seed=number))
    for number in range(1000, 1200):
        engine.write(name_of(number), buffer(50_000, seed=number))
        assert bytes_in(tmp_path) <= 4 * MIB
    large = [n for n in range(1000, 1200) if engine.exist([name_of(n)]) == [True]]
    assert len(large) > 20, "at least its share of the disk"
    engine.close()


def test_an_object_larger_than_the_disk_is_an_error_and_changes_nothing(tmp_path):
    engine = DiskEngine(tmp_path, 2 * MIB)
    engine.write(name_of(0), buffer(5000, seed=0))
    with pytest.raises(EngineError, match="no room"):
        engine.write(name_of(1), buffer(3 * MIB, seed=1))
    assert readable(engine, 2) == [0]
    engine.close()


# -- what an earlier server left -----------------------------------------------------------------------------


def test_everything_is_found_again(tmp_path):
    engine = DiskEngine(tmp_path, 8 * MIB)
    for number in range(100):
        engine.write(name_of(number), buffer(5000, seed=number))
    engine.delete([name_of(50)])
    engine.close()
    again = scanned(DiskEngine(tmp_path, 8 * MIB))
    assert readable(again, 100) == [n for n in range(100) if n != 50]
    assert again.usage().objects == 99
    again.close()


def test_a_smaller_size_after_a_restart_is_kept_at_once(tmp_path):
    engine = DiskEngine(tmp_path, 8 * MIB)
    for number in range(900):
        engine.write(name_of(number), buffer(5000, seed=number))
    engine.close()
    assert bytes_in(tmp_path) > 4 * MIB
    again = DiskEngine(tmp_path, 2 * MIB)
    assert bytes_in(tmp_path) <= 2 * MIB
    scanned(again)
    assert readable(again, 900)
    for number in range(2000, 2400):
        again.write(name_of(number), buffer(5000, seed=number))
        assert bytes_in(tmp_path) <= 2 * MIB
    again.close()


def test_leftovers_of_two_servers_count(tmp_path):
    """Crates of another folder were copied in: they are found, and capacity holds."""
    for folder, first in (("one", 0), ("two", 100)):
        engine = DiskEngine(tmp_path / folder, 2 * MIB)
        for number in range(first, first + 100):
            engine.write(name_of(number), buffer(5000, seed=number))
        engine.close()
    for path in (tmp_path / "two").glob("crate-*"):
        path.rename(tmp_path / "one" / path.name.replace("crate-0", "crate-7"))
    engine = scanned(DiskEngine(tmp_path / "one", 2 * MIB))
    assert readable(engine, 200) == list(range(200))
    for number in range(1000, 1300):
        engine.write(name_of(number), buffer(5000, seed=number))
        assert bytes_in(tmp_path / "one") <= 2 * MIB
    engine.close()


@pytest.mark.parametrize("taken", ["some", "all"])
def test_without_a_size_everything_is_found_again_whatever_others_took(small_tmpfs, taken):
    engine = DiskEngine(small_tmpfs / "disk", None)
    numbers = range(engine.usage().capacity_bytes // MIB)
    for number in numbers:
        engine.write(name_of(number), buffer(MIB, seed=number))
    found = readable(engine, len(numbers), MIB)
    engine.close()
    assert len(found) > 40
    if taken == "some":
        (small_tmpfs / "other").write_bytes(bytes(20 * MIB))
    else:
        fill_up(small_tmpfs)
    again = scanned(DiskEngine(small_tmpfs / "disk", None))
    assert readable(again, len(numbers), MIB) == found
    again.close()


@pytest.mark.parametrize("kind", ["data", "index"])
def test_a_truncated_file_is_a_miss_and_is_cleaned_up(tmp_path, kind):
    engine = DiskEngine(tmp_path, 2 * MIB)
    for number in range(10):
        engine.write(name_of(number), buffer(5000, seed=number))
    engine.close()
    for path in tmp_path.glob(f"crate-*.{kind}"):
        os.truncate(path, path.stat().st_size // 2)
    again = scanned(DiskEngine(tmp_path, 2 * MIB))
    assert readable(again, 10) == []
    assert not list(tmp_path.glob("crate-*"))
    again.write(name_of(1), buffer(5000, seed=1))
    assert readable(again, 10) == [1]
    again.close()


@pytest.mark.parametrize("kind", ["data", "index"])
def test_a_file_truncated_under_a_running_engine_is_a_miss(tmp_path, kind):
    engine = DiskEngine(tmp_path, 2 * MIB)
    engine.write(name_of(0), buffer(5000, seed=0))
    for path in tmp_path.glob(f"crate-*.{kind}"):
        os.truncate(path, 0)
    assert not engine.read(name_of(0), buffer(5000))
    assert engine.exist([name_of(0)]) == [False]
    engine.write(name_of(0), buffer(5000, seed=0))
    assert readable(engine, 1) == [0]
    engine.close()


def test_a_torn_entry_is_a_miss(tmp_path):
    engine = DiskEngine(tmp_path, 2 * MIB)
    for number in range(4):
        engine.write(name_of(number), buffer(5000, seed=number))
    engine.close()
    [index] = tmp_path.glob("crate-*.index")
    torn = bytearray(index.read_bytes())
    torn[PAGE + 192 + 40] ^= 1  # in the second entry's header
    index.write_bytes(torn)
    again = scanned(DiskEngine(tmp_path, 2 * MIB))
    assert readable(again, 4) == [0, 2, 3]
    again.close()


def test_an_unfinished_crate_is_removed_and_other_files_are_not(tmp_path):
    DiskEngine(tmp_path, 2 * MIB).close()
    (tmp_path / "crate-0003.data").write_bytes(b"half")
    (tmp_path / "crate-0004.draft").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "crate-of-wine.data").write_text("mine too")
    DiskEngine(tmp_path, 2 * MIB).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "crate-of-wine.data",
        "kvcellar-disk",
        "notes.txt",
    ]


# -- bad input and trouble -----------------------------------------------------------------------------------


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(StartupError, match="not KVCellar's; choose an empty folder"):
        DiskEngine(tmp_path, 2 * MIB)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_second_engine_on_one_folder_is_refused_until_the_first_is_gone(tmp_path):
    first = DiskEngine(tmp_path, 2 * MIB)
    with pytest.raises(StartupError, match="another server is using"):
        DiskEngine(tmp_path, 2 * MIB)
    first.close()
    DiskEngine(tmp_path, 2 * MIB).close()


def test_a_size_larger_than_the_disk_is_refused(tmp_path):
    with pytest.raises(StartupError, match=r"does not fit.*lower the size"):
        DiskEngine(tmp_path, 1 << 50)
    DiskEngine(tmp_path, 2 * MIB).close()


def test_a_size_that_others_left_no_room_for_is_refused_at_first_and_not_at_a_restart(small_tmpfs):
    (small_tmpfs / "others").write_bytes(bytes(48 * MIB))
    with pytest.raises(StartupError, match="does not fit"):
        DiskEngine(small_tmpfs / "disk", 64 * MIB)
    (small_tmpfs / "others").unlink()
    engine = DiskEngine(small_tmpfs / "disk", 64 * MIB)
    engine.write(name_of(0), buffer(5000, seed=0))
    engine.close()
    (small_tmpfs / "others").write_bytes(bytes(48 * MIB))
    again = scanned(DiskEngine(small_tmpfs / "disk", 64 * MIB))
    assert readable(again, 1) == [0]
    again.close()
    with pytest.raises(StartupError, match="does not fit"):
        DiskEngine(small_tmpfs / "disk", 1 << 50)


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(StartupError, match="writable by nobody else"):
        DiskEngine(tmp_path, 2 * MIB)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("disk://relative/path", {}, "three slashes"),
        ("disk:///tmp/x", {"siez": "1GiB"}, "unknown option 'siez'"),
        ("disk:///tmp/x", {"size": "huge"}, "a size such as"),
    ],
)
def test_a_bad_specification_is_refused(url, options, message):
    with pytest.raises(ConfigError, match=message):
        open_disk(url, options)


def fill_up(folder: Path) -> Path:
    filler = folder / "filler"
    fd = os.open(filler, os.O_CREAT | os.O_WRONLY)
    with contextlib.suppress(OSError):
        while os.write(fd, bytes(MIB)) == MIB:
            pass
    os.close(fd)
    return filler


def test_a_full_file_system_is_survived_and_recovers(small_tmpfs):
    engine = DiskEngine(small_tmpfs / "disk", 64 * MIB, clock=lambda: now)
    now = 0.0
    engine.write(name_of(0), buffer(5000, seed=0))
    filler = fill_up(small_tmpfs)
    with pytest.raises(EngineError, match="No space left"):
        engine.write(name_of(1), buffer(MIB, seed=1))
    for number in range(2, 400):  # of a size that has a crate: by eviction
        engine.write(name_of(number), buffer(5000, seed=number))
    assert 399 in readable(engine, 400)
    filler.unlink()
    now = 60.0
    engine.write(name_of(1), buffer(MIB, seed=1))
    assert readable(engine, 2, MIB) == [1]
    engine.close()
