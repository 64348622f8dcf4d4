"""The arena's folder: ours alone, one server at a time, and every refusal is a sentence that helps."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvcellar.arena import available_bytes, default_limit, remove_folder
from kvcellar.errors import StartupError
from tests.support import namespace
from tests.unit.conftest import MIB, grow, kill

ONE = namespace()

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def test_second_server_on_the_folder_is_refused_with_the_pid_of_the_first(serve, folder):
    arena = serve()
    for attempt in (serve, lambda: remove_folder(folder)):
        with pytest.raises(StartupError, match=rf"another server \(pid {os.getpid()}\) is using .* --name"):
            attempt()
    kill(arena)
    serve()


def test_a_lock_that_is_removed_before_we_have_it_is_made_again(serve, folder, monkeypatch):
    """`kvcellar clear` was faster, by a moment."""
    lock = fcntl.flock

    def removed_first(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        shutil.rmtree(folder)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    serve()
    with pytest.raises(StartupError, match="another server"):
        serve()


def test_refused_start_leaves_no_descriptor_open(serve):
    serve()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StartupError):
        serve()
    assert len(os.listdir("/proc/self/fd")) == before


def test_folder_that_others_may_enter_is_refused(serve, folder):
    folder.mkdir(mode=0o750)
    with pytest.raises(StartupError, match="mode 0700"):
        serve()


@as_root
def test_folder_of_somebody_else_is_refused(serve, folder):
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)
    with pytest.raises(StartupError, match="uid 0"):
        serve()


@pytest.mark.parametrize("target", ["target", "missing"])
def test_folder_that_is_a_symbolic_link_is_refused(serve, shm, folder, target):
    (shm / "target").mkdir(mode=0o700)
    folder.symlink_to(shm / target)
    with pytest.raises(StartupError, match="--folder"):
        serve()
    assert not list((shm / "target").iterdir())


def test_folder_that_is_a_file_is_refused(serve, folder):
    folder.touch()
    with pytest.raises(StartupError, match=r"cannot use .*: File exists; .*--folder"):
        serve()


def test_lock_that_is_a_symbolic_link_is_refused(serve, shm, folder):
    folder.mkdir(mode=0o700)
    (shm / "victim").write_text("precious")
    (folder / "lock").symlink_to(shm / "victim")
    with pytest.raises(StartupError, match="cannot use"):
        serve()
    assert (shm / "victim").read_text() == "precious"


def tree(folder: Path) -> set[Path]:
    return {folder, *folder.rglob("*")}


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_folder_of_files_that_are_not_ours_is_refused_and_not_touched(serve, folder, mode):
    (folder / "photos").mkdir(parents=True)
    (folder / ONE.id.hex()).mkdir()  # not even what is named like ours
    (folder / "photos" / "cat").write_text("precious")
    folder.chmod(mode)
    before = tree(folder)
    for attempt in (serve, lambda: remove_folder(folder)):
        with pytest.raises(StartupError, match=r"none of KVCellar's; nothing was touched: .* --folder"):
            attempt()
    assert tree(folder) == before


def test_what_others_put_into_our_folder_stays(serve, shm, folder):
    arena = serve()
    spec = grow(arena).spec
    kill(arena)
    (folder / "photos").mkdir()
    (folder / "photos" / "cat").write_text("precious")
    (folder / "roster").touch()
    (folder / ("ab" * 16)).symlink_to(shm)
    again = serve()
    assert [found.key.namespace for found in again.adopt()] == [ONE.id]
    assert again.refused == 0
    kill(again)
    assert spec.file_bytes <= remove_folder(folder) < spec.file_bytes + MIB
    assert tree(folder) == {folder, folder / "photos", folder / "photos" / "cat", folder / ("ab" * 16)}


def test_place_where_no_folder_can_be_made_is_refused(serve):
    with pytest.raises(StartupError, match="cannot use /proc/kvcellar/a"):
        serve(MIB, Path("/proc/kvcellar/a"))


def test_read_only_folder_is_refused(serve, tiny_tmpfs):
    subprocess.run(["mount", "-o", "remount,ro", tiny_tmpfs], check=True)
    with pytest.raises(StartupError, match="Read-only file system"):
        serve(4096, tiny_tmpfs)


def test_file_system_without_a_byte_left_is_refused_with_a_sentence(serve, tiny_tmpfs):
    (tiny_tmpfs / "lock").touch()
    (tiny_tmpfs / "hog").write_bytes(bytes(64 << 10))
    with pytest.raises(StartupError, match=r"No space left on device; .*--folder"):
        serve(4096, tiny_tmpfs)


def test_memory_larger_than_the_file_system_is_refused_with_a_sentence(serve, tiny_tmpfs):
    with pytest.raises(
        StartupError, match=r"--memory 0.00GiB does not fit: .* has 0.00GiB left\. Lower --memory"
    ):
        serve(65 << 10, tiny_tmpfs)
    serve(32 << 10, tiny_tmpfs)  # the lock was let go


def test_half_of_next_to_nothing_is_refused_with_a_sentence(tiny_tmpfs):
    with pytest.raises(StartupError, match=r"has no room: 64 KiB are left\. Free some, or .*--folder"):
        default_limit(tiny_tmpfs)


def test_what_an_earlier_server_left_counts_as_available(serve, tiny_tmpfs):
    arena = serve(32 << 10, tiny_tmpfs)
    while spec := arena.plan(ONE, 0):
        arena.finish(arena.create(ONE, spec))
    kill(arena)
    assert available_bytes(tiny_tmpfs) == 64 << 10
    assert list(serve(32 << 10, tiny_tmpfs).adopt())


def test_available_bytes_of_a_folder_that_is_not_there_are_those_of_the_file_system(tiny_tmpfs):
    assert available_bytes(tiny_tmpfs / "not" / "yet") == 64 << 10


def test_remove_folder_returns_the_bytes_it_freed(serve, folder):
    arena = serve()
    used = grow(arena).spec.file_bytes
    kill(arena)
    assert remove_folder(folder) >= used
    assert not folder.exists()
