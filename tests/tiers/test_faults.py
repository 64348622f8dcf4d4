"""Real faults under a real server: 0 wrong bytes, everybody answered in time, all of it visible in status,
and recovery without a restart.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from kvcellar.client import AdminClient
from kvcellar.tiers.crate import Crate
from tests.server.engine import eventually
from tests.support import keys
from tests.tiers.test_disk_engine import bytes_in_use, fill_up, small_tmpfs
from tests.tiers.test_serving import check

__all__ = ["small_tmpfs"]


def tier(server, number=0):
    return server.status().tiers[number]


def forget(server):
    with AdminClient(server.socket) as admin:
        admin.clear()


# -- a tier that fails ---------------------------------------------------------------------------------------


def test_a_failing_tier_is_shown_with_its_reason_and_comes_back(gate, stopped_server, engine):
    server = stopped_server.start()
    one = engine()
    one.store(10)
    eventually(lambda: not tier(server).queued)
    (gate / "fail").write_text("Connection refused")
    for seed in range(1, 5):
        one.store(5, seed)
        assert one.hit(5, seed) == 5
    eventually(lambda: tier(server).state == "no writes")
    assert tier(server).reason == "Connection refused"
    eventually(lambda: sum(tier(server).dropped.values()) > 0)
    forget(server)
    eventually(lambda: one.bring(10, wait=0.5).chunks == 0 and tier(server).state == "down")
    (gate / "fail").unlink()
    eventually(lambda: one.bring(10).chunks == 10)
    check(one, one.bring(10))
    seeds = iter(range(50, 10_000))
    eventually(lambda: one.store(1, next(seeds)) and tier(server).state == "up")


# -- a disk --------------------------------------------------------------------------------------------------


def crate_data(folder: Path) -> Path:
    [path] = folder.glob("crate-*.data")
    return path


def offset_of(folder: Path, chunk: int) -> int:
    """Where the chunk of the first prompt lies in the crate: several are written at once, in any order."""
    crate = Crate.open(folder, 0)
    slots = {name: slot for slot, name in crate.scan() if name is not None}
    crate.close()
    [slot] = [slot for name, slot in slots.items() if keys(chunk + 1)[chunk].hex() in name]
    return slot * 4096


@pytest.mark.parametrize("restart", [False, True])
def test_flipped_bits_are_a_miss_and_never_wrong_bytes(cold, engine, tmp_path, restart):
    first = engine(session="first")
    first.store(10)
    cold.settled()
    data = crate_data(tmp_path / "disk")
    at = offset_of(tmp_path / "disk", 4)
    if restart:
        assert cold.server.stop() == 0
    fd = os.open(data, os.O_RDWR)
    [byte] = os.pread(fd, 1, at + 100)
    os.pwrite(fd, bytes([byte ^ 1]), at + 100)
    os.close(fd)
    if restart:
        cold.start(memory="8MiB")
    cold.forget()
    second = engine(session="second")
    grant = second.bring(10)
    assert grant.chunks == 4
    check(second, grant)
    assert cold.tier().counts["corrupt"] == 1
    cold.has_grown(100)
    second.store(10)
    cold.settled()
    cold.forget()
    grant = second.bring(10)
    assert grant.chunks == 10, "what was bad has been written again"
    check(second, grant)


def test_what_a_near_tier_has_lost_comes_from_a_far_one_and_is_written_again(
    gate, stopped_server, engine, tmp_path
):
    server = stopped_server.start(disk=str(tmp_path / "disk"), disk_size="8MiB")
    one = engine()
    one.store(10)
    eventually(lambda: not tier(server, 0).queued and not tier(server, 1).queued)
    fd = os.open(crate_data(tmp_path / "disk"), os.O_WRONLY)
    os.pwrite(fd, bytes(4096), 4 * 4096)
    os.close(fd)
    forget(server)
    grant = one.bring(10)
    assert grant.chunks == 10
    check(one, grant)
    assert tier(server, 0).counts["corrupt"] == 1
    assert tier(server, 1).counts["hits"] == 1
    eventually(lambda: tier(server, 0).objects == 10 and not tier(server, 0).queued)
    forget(server)
    check(one, one.bring(10))
    assert tier(server, 1).counts["hits"] == 1, "this time the disk had all of it"


def test_an_object_under_the_name_of_another_is_a_miss(cold, engine, tmp_path):
    """The bytes are intact, but they are of another chunk."""
    first = engine(session="first")
    first.store(10)
    cold.settled()
    data = crate_data(tmp_path / "disk")
    fd = os.open(data, os.O_RDWR)
    os.pwrite(fd, os.pread(fd, 4096, offset_of(data.parent, 0)), offset_of(data.parent, 2))
    os.close(fd)
    cold.forget()
    grant = engine(session="second").bring(10)
    assert grant.chunks == 2


def test_without_a_size_all_memory_is_found_again_whatever_others_took(small_tmpfs, stopped_server, engine):
    stopped_server.folder = small_tmpfs / "memory"
    del stopped_server.flags["--memory"]
    server = stopped_server.start()
    one = engine()
    one.store(16)
    eventually(lambda: server.slab_bytes() > 40 << 20)
    racks: set[Path] = set()

    def all_are_finished() -> bool:
        """What is being made when the server is killed is nothing yet."""
        racks.update(server.folder.rglob("*.table"))
        [group] = server.status().namespaces[0].groups
        return bool(group.racks >= len(racks))

    eventually(all_are_finished)
    server.kill()
    (small_tmpfs / "other").write_bytes(bytes(40 << 20))
    server.start()
    assert racks <= {*server.folder.rglob("*.table")}
    eventually(lambda: one.hit(16) == 16)


def test_a_full_disk_is_shown_and_recovers(small_tmpfs, stopped_server, engine):
    server = stopped_server.start(disk=str(small_tmpfs / "disk"), disk_size="8MiB")
    filler = fill_up(small_tmpfs)
    one = engine()
    one.store(10)
    eventually(lambda: tier(server).state == "no writes")
    assert "No space left" in tier(server).reason
    assert one.hit(10) == 10
    filler.unlink()
    seeds = iter(range(1, 10_000))
    eventually(lambda: one.store(1, next(seeds)) and tier(server).state == "up")
    eventually(lambda: tier(server).objects > 0)


@pytest.fixture
def unprivileged(stopped_server, tmp_path):
    """A server that permissions hold for, as they do not for root, and the folder of its disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("no setpriv (util-linux), without which root may do anything")
        stopped_server.wrapper = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    yield stopped_server.start(disk=str(disk), disk_size="64MiB"), disk
    disk.chmod(0o700)


def test_lost_permission_before_the_first_write_is_shown_and_recovers(unprivileged, engine):
    server, disk = unprivileged
    disk.chmod(0o000)
    one = engine()
    one.store(10)
    eventually(lambda: tier(server).state == "no writes")
    assert tier(server).reason == f"{disk}: Permission denied"
    assert one.hit(10) == 10, "memory answers as if there were no disk"
    grant = one.scheduler.lookup(keys(10, seed=1), 60.0, 5.0)
    if grant.ticket:
        assert one.wait_for(grant).lease == 0, "a miss, within its deadline"
    disk.chmod(0o700)
    seeds = iter(range(1, 10_000))
    eventually(lambda: one.store(1, next(seeds)) and tier(server).state == "up")
    eventually(lambda: tier(server).objects > 0 and not tier(server).queued)
    assert tier(server).reason == ""


def test_lost_permission_costs_growth_and_never_wrong_bytes(unprivileged, engine):
    """What is open stays open: it is read, and written again by eviction, within the files there are."""
    server, disk = unprivileged
    one = engine()
    one.store(50)
    eventually(lambda: not tier(server).queued)
    disk.chmod(0o000)
    files = tier(server).used_bytes
    for seed in range(1, 9):  # three times what the first crate holds
        one.store(100, seed)
    eventually(lambda: not tier(server).queued)
    assert tier(server).used_bytes == files
    assert tier(server).reason == f"{disk}: no new files: Permission denied"
    forget(server)
    found = 0
    for seed in range(9):
        grant = one.bring(100, seed, wait=2.0)
        found += grant.chunks
        if grant.lease:
            check(one, grant, seed)
    assert found > 0
    assert tier(server).counts.get("corrupt", 0) == 0
    disk.chmod(0o700)
    seeds = iter(range(10, 10_000))
    eventually(lambda: one.store(1, next(seeds)) and tier(server).reason == "")
    assert tier(server).used_bytes > files
    one.store(100, seed=9)
    eventually(lambda: not tier(server).queued)
    forget(server)
    grant = one.bring(100, seed=9)
    assert grant.chunks == 100
    check(one, grant, seed=9)


def test_a_small_disk_is_never_over_its_size_under_load(stopped_server, engine, tmp_path):
    folder = tmp_path / "disk"
    server = stopped_server.start(disk=str(folder), disk_size="2MiB")
    one, other = engine(session="one"), engine("tp2", session="other")
    for seed in range(12):
        one.store(100, seed)
        other.store(50, seed)
        eventually(lambda: tier(server).queued < 100)
        assert bytes_in_use(folder) <= 2 << 20
    report = tier(server)
    assert report.used_bytes <= report.capacity_bytes == 2 << 20


@pytest.fixture
def memory_folder():
    """In shared memory, for a server of which nothing must be left."""
    with tempfile.TemporaryDirectory(prefix="kvcellar-refused-", dir="/dev/shm") as folder:
        yield folder


def test_a_second_server_on_the_folder_is_refused_in_one_sentence(cold, tmp_path, memory_folder):
    command = [sys.executable, "-m", "kvcellar", "serve", "--memory", "1MiB"]
    where = ["--socket", str(tmp_path / "t"), "--folder", memory_folder]
    disk = ["--disk", str(tmp_path / "disk"), "--disk-size", "8MiB"]
    done = subprocess.run([*command, *where, *disk], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "another server is using" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tier", "tape:///dev/nst0"], "unknown; known are disk, memory"),
        (["--tier", "/just/a/path"], "URLs such as disk:///"),
        (["--disk", "{tmp}/home", "--disk-size", "8MiB"], "choose an empty folder"),
        (["--disk", "{tmp}/new", "--disk-size", "900TiB"], "lower the size"),
        (["--disk", "{tmp}/new", "--disk-size", "lots"], "a size such as"),
        (["--disk-size", "8MiB"], "name the folder too"),
        (["--tier", "disk:///{tmp}/new?siez=8MiB"], "unknown option 'siez'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(tmp_path, memory_folder, flags, says):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    given = [flag.replace("{tmp}", str(tmp_path)) for flag in flags]
    where = ["--socket", str(tmp_path / "t"), "--folder", memory_folder]
    command = [sys.executable, "-m", "kvcellar", "serve", "--memory", "1MiB", *where, *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def run_without_root(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with a `folder` for a disk: root may do anything."""
    start = f"""
        import os
        from pathlib import Path
        from kvcellar.errors import EngineError
        from kvcellar.tiers.disk import DiskEngine
        from tests.tiers.conformance import buffer, name_of, same
        folder = Path({str(tmp_path / "disk")!r})
        folder.mkdir(mode=0o700)
        buffer(1, seed=0)  # imports what it needs, as long as that may be read
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534)
            os.setuid(65534)
        now = 0.0
        engine = DiskEngine(folder, 8 << 20, clock=lambda: now)
    """
    for parent in [tmp_path, *tmp_path.parents][:3]:
        parent.chmod(0o755)
    code = textwrap.dedent(start) + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_lost_permission_is_survived_and_recovers(tmp_path):
    script = """
        engine.write(name_of(1), buffer(5000, seed=1))
        folder.chmod(0o500)
        try:
            engine.write(name_of(2), buffer(50_000, seed=2))
        except EngineError as error:
            print(error)
        read = buffer(5000)
        assert engine.read(name_of(1), read) and same(read, buffer(5000, seed=1))
        folder.chmod(0o700)
        now = 60.0
        engine.write(name_of(2), buffer(50_000, seed=2))
        assert engine.exist([name_of(1), name_of(2)]) == [True, True]
        print("recovered")
    """
    done = run_without_root(tmp_path, script)
    assert done.stdout.splitlines() == [f"{tmp_path / 'disk'}: Permission denied", "recovered"], done.stderr


def test_lost_permission_costs_no_crate_that_should_make_room(tmp_path):
    """A file that cannot be removed is as good as before."""
    script = """
        names = [name_of(number) for number in range(1200)]
        for number, name in enumerate(names):
            engine.write(name, buffer(5000, seed=number))
        known, files = engine.exist(names), len(os.listdir("/proc/self/fd"))
        folder.chmod(0o500)
        for number in range(2000, 2010):
            now += 30.0
            try:
                engine.write(name_of(number), buffer(50_000, seed=number))
            except EngineError as error:
                print(error)
        assert engine.exist(names) == known
        assert len(os.listdir("/proc/self/fd")) == files
        engine.check()
        for number, name in enumerate(names):
            read = buffer(5000)
            assert engine.read(name, read) == known[number]
            assert not known[number] or same(read, buffer(5000, seed=number))
        folder.chmod(0o700)
        now += 30.0
        for number in range(2000, 2010):
            engine.write(name_of(number), buffer(50_000, seed=number))
        assert not engine.usage().trouble
        engine.check()
        print("recovered")
    """
    done = run_without_root(tmp_path, script)
    refused = [f"{tmp_path / 'disk'}: Permission denied"] * 10
    assert done.stdout.splitlines() == [*refused, "recovered"], done.stderr
