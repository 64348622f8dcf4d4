"""The arena on real files: a hard limit, and only what can be believed is adopted."""

import contextlib
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcellar.arena import Adopted, Arena, RackKey, available_bytes
from kvcellar.arena.table import FREE, READY, WRITING, StripeTable
from kvcellar.errors import Corrupt
from kvcellar.identity import ParallelStrategy
from kvcellar.slab import Slab
from tests.support import full_group, keys, namespace
from tests.unit.conftest import MIB, grow, kill

ONE = namespace()
TP2 = namespace(parallel=ParallelStrategy(tp=2), model="pair")
PAIR = namespace(groups=(full_group(), full_group()), model="two groups")
A, B, C = keys(3)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def file_bytes(folder: Path) -> int:
    """Bytes of all slabs and tables."""
    return sum(path.stat().st_size for path in folder.glob("*/g*"))


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


# -- growing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [3 * 4096, 100_000, MIB, 4 * MIB + 1, 16 * MIB - 1])
def test_limit_is_hard_to_the_byte_whatever_the_namespaces(serve, folder, limit):
    arena = serve(limit)
    wanted = [(ONE, 0), (TP2, 0), (PAIR, 0), (PAIR, 1)]
    while wanted:
        for ns, group in list(wanted):
            spec = arena.plan(ns, group)
            if spec is None:
                wanted.remove((ns, group))
                continue
            arena.finish(arena.create(ns, spec))
            assert file_bytes(folder) <= arena.used <= limit
    assert limit - arena.used < 3 * 4096  # not one more slot, header page and table entry
    assert arena.plan(ONE, 0) is None


def test_planned_racks_count_against_the_limit_before_they_are_made(serve):
    arena = serve(MIB)
    specs = []
    while spec := arena.plan(ONE, 0):
        specs.append(spec)
    assert sum(spec.file_bytes for spec in specs) == arena.used <= MIB
    assert [spec.table_id.rack for spec in specs] == list(range(len(specs)))
    arena.cancel(specs[3])
    again = arena.plan(ONE, 0)
    assert again is not None
    assert again.table_id.rack == 3


def test_memory_taken_from_the_file_system_never_exceeds_the_limit(serve, folder):
    arena = serve(MIB)
    while spec := arena.plan(ONE, 0):
        arena.finish(arena.create(ONE, spec))
    assert sum(path.stat().st_blocks * 512 for path in folder.glob("*/g*")) <= MIB


def test_every_page_is_allocated_when_a_rack_is_made(serve, folder):
    grow(serve(), TP2)
    for path in folder.glob("*/g*"):
        assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_racks_double_up_to_a_sixteenth_of_the_limit(serve):
    arena = serve(16 * MIB)
    assert [grow(arena).spec.slots for _ in range(5)] == [64, 128, 256, 256, 256]


def test_each_group_starts_small(serve):
    arena = serve(16 * MIB)
    assert [grow(arena, PAIR, group).spec.slots for group in (0, 1, 0)] == [64, 64, 128]


def test_rack_has_a_slab_per_shard_with_the_same_slots_and_only_we_can_open_them(serve, folder):
    rack = grow(serve(), TP2)
    assert files(folder) == {"namespace", "g0-r0.table", "g0-r0-s0.slab", "g0-r0-s1.slab"}
    assert [os.fstat(fd).st_size for fd in rack.descriptors] == [s.file_bytes for s in rack.spec.shapes]
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*/g*")} == {0o600}
    assert {folder.stat().st_mode & 0o777, rack.spec.folder.stat().st_mode & 0o777} == {0o700}


def test_removed_rack_gives_its_bytes_and_its_number_back(serve, folder):
    arena = serve()
    first, second = grow(arena), grow(arena)
    arena.remove(RackKey(ONE.id, 0, 0))
    arena.removed(RackKey(ONE.id, 0, 0))
    assert arena.used == second.spec.file_bytes >= file_bytes(folder)
    assert grow(arena).spec.table_id == first.spec.table_id


def test_engine_can_go_on_reading_a_slab_that_was_removed(serve):
    arena = serve()
    rack = grow(arena)
    slab = Slab(rack.descriptors[0], rack.spec.shapes[0])
    slab.slot(0)[:] = 7
    arena.remove(RackKey(ONE.id, 0, 0))
    arena.removed(RackKey(ONE.id, 0, 0))
    assert set(slab.slot(0).tolist()) == {7}


def test_full_tmpfs_is_an_error_that_leaves_no_rack_behind_and_a_later_try_succeeds(serve, tiny_tmpfs):
    arena = serve(48 << 10, tiny_tmpfs)
    spec = arena.plan(TP2, 0)
    hog = tiny_tmpfs / "hog"
    hog.write_bytes(bytes(available_bytes(tiny_tmpfs) - spec.file_bytes - 4096))
    with pytest.raises(OSError, match="No space left"):
        arena.create(TP2, spec)
    arena.cancel(spec)
    assert (files(tiny_tmpfs) - {"hog", "namespace"}, arena.used) == (set(), 0)
    hog.unlink()
    grow(arena, TP2)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_error_at_any_file_of_a_rack_leaves_no_file_and_no_descriptor(serve, folder, monkeypatch, failing):
    arena = serve()
    allocate, calls = os.posix_fallocate, iter(range(3))

    def full(fd: int, offset: int, length: int) -> None:
        if next(calls) == failing:
            raise OSError(28, "No space left on device")
        allocate(fd, offset, length)

    spec = arena.plan(TP2, 0)
    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        arena.create(TP2, spec)
    assert files(folder) <= {"namespace"}
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("left", "is_mapped"), [(128, False), (129, True)])
def test_a_slab_is_mapped_by_the_server_only_where_that_leaves_descriptors_for_others(serve, left, is_mapped):
    rack = grow(serve(), TP2)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.dup(0))
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, limits[1]))
    try:
        with contextlib.nullcontext() if is_mapped else pytest.raises(OSError, match="Too many open files"):
            slab = rack.map(1)
            slab.slot(0)[:] = 42
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("/proc/self/fd")) == before + is_mapped
    assert set(Slab(rack.descriptors[1], rack.spec.shapes[1]).slot(0).tolist()) == {42 if is_mapped else 0}


# -- stripe tables -------------------------------------------------------------------------------------------


def test_scan_tells_ready_from_writing_from_free(serve):
    table = grow(serve(16 * MIB)).table
    for slot, key, parent in ((0, A, None), (2, B, A), (5, C, B)):
        table.write(slot, key, parent)
    table.publish(0)
    table.publish(5)
    assert [table.state(slot) for slot in (0, 1, 2)] == [READY, FREE, WRITING]
    assert table.scan() == ([(0, A, None), (5, C, B)], [2])
    table.free(0)
    assert table.scan() == ([(5, C, B)], [2])
    table.withdraw(5)
    assert table.scan() == ([], [2, 5])


def test_slot_that_is_written_again_has_nothing_of_its_earlier_entry(serve):
    table = grow(serve()).table
    for key, parent in ((A, B), (C, None)):
        table.write(0, key, parent)
        table.publish(0)
    assert table.scan().ready == [(0, C, None)]


# -- adoption ------------------------------------------------------------------------------------------------


@pytest.fixture
def left_behind(serve):
    """What a killed server left: one rack of two shards, A ready and B in writing."""
    arena = serve()
    rack = grow(arena, TP2)
    rack.table.write(0, A, None)
    rack.table.publish(0)
    rack.table.write(1, B, A)
    Slab(rack.descriptors[1], rack.spec.shapes[1]).slot(0)[:] = 42
    kill(arena)
    return rack.spec


def adopt(arena: Arena) -> list[Adopted]:
    return list(arena.adopt())


def test_killed_servers_rack_is_adopted_with_its_bytes(serve, left_behind):
    arena = serve()
    (found,) = adopt(arena)
    assert (found.key, found.namespace, found.scan) == (RackKey(TP2.id, 0, 0), TP2, ([(0, A, None)], [1]))
    assert set(Slab(found.rack.descriptors[1], found.rack.spec.shapes[1]).slot(0).tolist()) == {42}
    assert (arena.used, arena.refused, arena.racks) == (left_behind.file_bytes, 0, {found.key: found.rack})


def test_cleanly_closed_racks_of_several_namespaces_are_adopted(serve, folder):
    arena = serve()
    kept = {
        RackKey(*grow(arena, ns, group).spec.table_id[1:]) for ns, group in ((ONE, 0), (ONE, 0), (PAIR, 1))
    }
    used = arena.used
    arena.close()
    again = serve()
    assert {found.key for found in adopt(again)} == kept
    assert (again.used, set(again.racks)) == (used, kept)
    assert grow(again).spec.table_id.rack == 2


def test_adopted_rack_can_be_adopted_again_and_again(serve, left_behind):
    for _ in range(3):
        arena = serve()
        (found,) = adopt(arena)
        kill(arena)
    assert found.scan.ready == [(0, A, None)]


def test_torn_entry_is_neither_ready_nor_free(serve, left_behind):
    patch(left_behind.table_path, 128 + 8, b"?")
    arena = serve()
    (found,) = adopt(arena)
    assert found.scan == ([], [1, 0])


def test_torn_parent_or_unknown_state_is_neither_ready_nor_free(serve, left_behind):
    patch(left_behind.table_path, 128 + 24, b"?")
    patch(left_behind.table_path, 128 + 64, b"\x09")
    (found,) = adopt(serve())
    assert (found.scan.ready, sorted(found.scan.limbo)) == ([], [0, 1])


def truncate(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def write(offset: int, data: bytes) -> Callable[[Path], None]:
    return lambda path: patch(path, offset, data)


def mode(bits: int) -> Callable[[Path], None]:
    return lambda path: path.chmod(bits)


def stretch(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 4096)


def become_link(path: Path) -> None:
    """The same bytes, by way of a symbolic link."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        pytest.param("g0-r0.table", write(0, b"X"), id="other magic"),
        pytest.param("g0-r0.table", write(8, b"\x63"), id="other format"),
        pytest.param("g0-r0.table", write(12, b"\x63"), id="other number of slots"),
        pytest.param("g0-r0.table", write(16, b"another-boot"), id="other boot"),
        pytest.param("g0-r0.table", write(52, b"another name.."), id="other namespace"),
        pytest.param("g0-r0.table", write(68, b"\x01"), id="other group"),
        pytest.param("g0-r0.table", write(72, b"\x01"), id="other rack"),
        pytest.param("g0-r0.table", truncate(0), id="empty table"),
        pytest.param("g0-r0.table", truncate(100), id="table cut in its header"),
        pytest.param("g0-r0.table", truncate(150), id="table cut in an entry"),
        pytest.param("g0-r0.table", stretch, id="longer table"),
        pytest.param("g0-r0.table", mode(0o640), id="table others may read"),
        pytest.param("g0-r0.table", become_link, id="table is a link"),
        pytest.param("g0-r0-s1.slab", truncate(4096), id="slab cut short"),
        pytest.param("g0-r0-s1.slab", stretch, id="longer slab"),
        pytest.param("g0-r0-s1.slab", mode(0o604), id="slab others may read"),
        pytest.param("g0-r0-s1.slab", become_link, id="slab is a link"),
        pytest.param("g0-r0-s0.slab", Path.unlink, id="slab missing"),
        pytest.param("namespace", Path.unlink, id="namespace missing"),
        pytest.param("namespace", truncate(5), id="namespace cut short"),
        pytest.param("namespace", lambda path: path.write_bytes(ONE.encoded), id="another namespace"),
        pytest.param(
            "g0-r0.table", lambda path: os.chown(path, 12345, -1), id="table of another", marks=as_root
        ),
        pytest.param(
            "g0-r0-s0.slab", lambda path: os.chown(path, 12345, -1), id="slab of another", marks=as_root
        ),
    ],
)
def test_rack_that_cannot_be_believed_is_refused_counted_and_removed(serve, left_behind, folder, name, harm):
    harm(left_behind.folder / name)
    arena = serve()
    assert adopt(arena) == []
    assert (arena.refused, arena.used, files(folder)) == (1, 0, set())
    grow(arena, TP2)


def test_refused_rack_does_not_take_its_neighbours_with_it(serve, folder):
    arena = serve()
    specs = [grow(arena, *at).spec for at in ((ONE, 0), (ONE, 0), (TP2, 0))]
    kill(arena)
    patch(specs[0].table_path, 0, b"X")
    again = serve()
    assert {found.key for found in adopt(again)} == {RackKey(ONE.id, 0, 1), RackKey(TP2.id, 0, 0)}
    assert files(folder) == {
        "namespace",
        "g0-r1.table",
        "g0-r1-s0.slab",
        "g0-r0.table",
        "g0-r0-s0.slab",
        "g0-r0-s1.slab",
    }
    assert again.used == specs[1].file_bytes + specs[2].file_bytes


def test_folder_of_another_namespace_is_removed_whole(serve, left_behind, folder):
    left_behind.folder.rename(folder / ONE.id.hex())
    arena = serve()
    assert (adopt(arena), arena.refused, files(folder)) == ([], 1, set())


def test_smaller_memory_adopts_what_fits_and_removes_the_rest(serve, folder):
    arena = serve(4 * MIB)
    sizes = [grow(arena).spec.file_bytes for _ in range(4)]
    kill(arena)
    limit = sum(sizes[:2]) + sizes[3] - 1
    again = serve(limit)
    assert [found.key.number for found in adopt(again)] == [0, 1]
    assert (again.used, again.refused) == (sum(sizes[:2]), 2)
    assert file_bytes(folder) <= again.used <= limit


def test_memory_that_just_fits_adopts_all(serve):
    arena = serve()
    used = sum(grow(arena).spec.file_bytes for _ in range(3))
    kill(arena)
    assert len(adopt(serve(used))) == 3


def test_stray_slabs_of_an_unfinished_rack_are_removed(serve, left_behind, folder):
    stray = left_behind.folder / "g0-r7-s0.slab"
    stray.write_bytes(bytes(4096))
    (left_behind.folder / "namespace.g0-r7").write_bytes(b"half")
    assert len(adopt(serve())) == 1
    assert files(folder) == {"namespace", "g0-r0.table", "g0-r0-s0.slab", "g0-r0-s1.slab"}


def test_rack_whose_table_was_never_finished_leaves_nothing(serve, folder):
    arena = serve()
    spec = grow(arena).spec
    kill(arena)
    spec.table_path.unlink()
    assert adopt(serve()) == []
    assert list(folder.iterdir()) == [folder / "lock"]


@pytest.mark.parametrize("name", ["stray", "g0-r7.table"])
def test_stray_folder_among_the_racks_does_not_stop_the_server(serve, left_behind, name):
    (left_behind.folder / name).mkdir()
    assert len(adopt(serve())) == 1


def test_table_with_an_impossible_name_is_removed(serve, left_behind, folder):
    shutil.copy(left_behind.table_path, left_behind.folder / "g0-rX.table")
    arena = serve()
    assert (len(adopt(arena)), arena.refused) == (1, 1)
    assert "g0-rX.table" not in files(folder)


def test_table_under_another_number_is_refused(serve, left_behind, folder):
    shutil.copy(left_behind.table_path, left_behind.folder / "g0-r1.table")
    shutil.copy(left_behind.table_path, left_behind.folder / "g9-r0.table")
    arena = serve()
    assert (len(adopt(arena)), arena.refused) == (1, 2)


def test_opening_says_why_a_table_is_not_believed(left_behind):
    with pytest.raises(Corrupt, match="another boot, namespace or rack"):
        StripeTable.open(left_behind.table_path, left_behind.table_id._replace(boot="yesterday"))
