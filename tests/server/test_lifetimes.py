"""What an engine holds ends with its process, and not before; a server may come and go meanwhile."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kvcellar.config import Settings
from kvcellar.errors import Unavailable
from kvcellar.server import Server
from kvcellar.wire import messages as m
from kvcellar.wire import peer
from tests.server.engine import NAMESPACES, eventually
from tests.server.raw import Raw, hello
from tests.support import keys

ONE = NAMESPACES["one"]


def books(server):
    """Stripes, free places and all places of the first group of the only namespace."""
    [namespace] = server.status().namespaces
    group = namespace.groups[0]
    return group.stripes, group.free, group.slots


def all_is_free(server):
    stripes, free, slots = books(server)
    return not server.leases() and stripes == 0 and free == slots > 0


# -- processes that die


def test_a_killed_worker_gives_back_its_shares(server, engine, child):
    here, there = engine("tp2", ranks=[0]), child(name="tp2", ranks=[1], schedules=False)
    grant = here.reserve(4)
    here.commit(grant)
    there.call("commit", grant)
    hit = here.lookup(4)
    here.release(hit, 0)
    assert server.leases() == 1
    there.kill()
    eventually(lambda: server.leases() == 0)
    assert server.session().ranks == [-1, 0]


def test_a_killed_worker_aborts_what_it_was_writing(server, engine, child):
    here, there = engine("tp2", ranks=[0]), child(name="tp2", ranks=[1], schedules=False)
    here.commit(here.reserve(4))
    assert books(server)[0] == 4
    there.kill()
    eventually(lambda: all_is_free(server))


def test_an_engine_that_vanishes_leaves_nothing_behind(server, engine, child):
    name = "go\nne"  # and says nothing in the server's name
    gone = child(session=name, name="tp2")
    gone.call("store", 4)
    gone.call("lookup", 4)
    gone.call("reserve", 8, seed=1)
    assert server.session(name).held_bytes == 12 * 8192
    gone.kill()
    eventually(lambda: server.session(name) is None)
    stripes, free, slots = books(server)
    assert (stripes, free) == (4, slots - 4)
    assert r"rank 1 of session 'go\nne' is gone" in server.log.read_text()


# -- processes that live and are silent


def test_a_stalled_worker_keeps_what_it_has(server, engine, child):
    here, there = engine(ranks=[]), child(ranks=[0], schedules=False)
    there.call("commit", here.reserve(4))
    hit = here.lookup(4)
    there.signal(signal.SIGSTOP)
    assert here.hit(4) == 4
    assert server.leases() == 1
    there.signal(signal.SIGCONT)
    there.call("release", hit)
    assert server.leases() == 0


DIES_SPEAKING = """
import sys, time
from pathlib import Path
from tests.server.raw import Raw, hello
from tests.server.test_lifetimes import MANY_RESERVES, ONE

raw = Raw(Path(sys.argv[1]), hello(session="ghost"))
raw.register(ONE)
print("registered", flush=True)
sys.stdin.readline()
raw.say(*MANY_RESERVES)
print("said", flush=True)
time.sleep(60)
"""
# Of different chunks, and far more messages than a connection may have answered in one turn.
MANY_RESERVES = [m.Request(10 + n, 1000, (m.Reserve(ONE.id, keys(1, n)[0]),)) for n in range(1000)]


def test_what_the_dead_have_said_is_not_done(server, raw):
    raw(hello()).register(ONE)
    eventually(lambda: books(server)[1] > 1000)
    command = [sys.executable, "-c", DIES_SPEAKING, str(server.socket)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ghost:
        assert ghost.stdin is not None
        assert ghost.stdout is not None
        assert ghost.stdout.readline() == b"registered\n"
        server.signal(signal.SIGSTOP)
        ghost.stdin.write(b"\n")
        ghost.stdin.flush()
        assert ghost.stdout.readline() == b"said\n"
        ghost.kill()
        ghost.wait()
        server.signal(signal.SIGCONT)
    eventually(lambda: server.session("ghost") is None)
    assert all_is_free(server)


def test_what_was_said_on_a_connection_that_was_replaced_is_not_done(server, raw):
    first, second = raw(hello()), raw()
    first.register(ONE)
    eventually(lambda: books(server)[1] > 1000)
    server.signal(signal.SIGSTOP)
    first.say(*MANY_RESERVES)
    second.say(hello())
    server.signal(signal.SIGCONT)
    assert isinstance(second.hear(), m.Welcome)
    assert all_is_free(server)


def test_a_lost_connection_frees_nothing_until_the_rank_attaches_again(server, raw):
    scheduler, worker = raw(hello()), raw(hello("worker"))
    scheduler.register(ONE)
    grant = scheduler.reserve(ONE, 4)
    worker.close()
    eventually(lambda: server.session("raw").connected == [-1])
    assert server.session("raw").ranks == [-1, 0]
    assert server.leases() == 1
    again = raw(hello("worker"))
    assert server.leases() == 0
    assert again.ask(m.Commit(grant.lease, 0, 4)) == (m.Settled(0),)
    assert scheduler.lookup(ONE, 4).chunks == 0


def test_a_scheduler_that_comes_back_keeps_the_leases_it_knows(server, raw):
    scheduler, worker = raw(hello()), raw(hello("worker"))
    scheduler.register(ONE)
    grant = scheduler.reserve(ONE, 4)
    worker.ask(m.Commit(grant.lease, 0, 4))
    known, unknown = scheduler.lookup(ONE, 4), scheduler.lookup(ONE, 4)
    assert known.lease != unknown.lease
    scheduler.close()
    raw(hello(leases=(known.lease,)))
    assert server.leases() == 1
    assert worker.ask(m.Release(known.lease, 0, 4)) == (m.Settled(4),)
    assert server.leases() == 0


RESERVES = """
import sys, time
from pathlib import Path
from tests.server.raw import Raw, hello
from tests.server.test_lifetimes import ONE

raw = Raw(Path(sys.argv[1]), hello())
raw.register(ONE)
print(raw.reserve(ONE, 4).lease, flush=True)
time.sleep(60)
"""


def test_a_scheduler_of_another_process_takes_nothing_from_ranks_that_live(server, raw):
    """It is a new one under an old name, and knows nothing of what ranks were told before."""
    worker = raw(hello("worker"))
    command = [sys.executable, "-c", RESERVES, str(server.socket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        lease = int(first.stdout.readline())
        first.kill()
    raw(hello())
    assert server.leases() == 1
    assert worker.ask(m.Commit(lease, 0, 4)) == (m.Settled(4),)
    assert server.leases() == 0


# -- strangers


def test_a_worker_that_no_successor_would_know_of_is_not_let_in(server, raw):
    known, other = (raw(hello("worker", session=name)) for name in ("known", "other"))
    obstacle = server.folder / "roster.draft"
    obstacle.mkdir()  # as on a full file system: it cannot be written
    newcomer = raw()
    newcomer.say(hello("worker", session="newcomer"))
    assert newcomer.refusal() == "unavailable"
    assert other.ask(m.Leave()) == (m.Settled(0),)
    known.close()
    again = raw(hello("worker", session="known"))
    assert [session.name for session in server.status().sessions] == ["known"]
    assert again.ask(m.Leave()) == (m.Settled(0),)
    assert server.status().sessions == []
    obstacle.rmdir()
    raw(hello("worker", session="newcomer"))
    assert [session.name for session in server.status().sessions] == ["newcomer"]


def test_a_worker_comes_back_to_a_server_that_cannot_write_if_its_predecessor_listed_it(server, raw):
    raw(hello("worker"))
    server.kill()
    obstacle = server.folder / "roster.draft"
    obstacle.mkdir()
    server.start()
    raw(hello("worker"))
    assert [session.name for session in server.status().sessions] == ["raw"]
    newcomer = raw()
    newcomer.say(hello("worker", session="newcomer"))
    assert newcomer.refusal() == "unavailable"
    obstacle.rmdir()


@pytest.fixture
def half_a_letter():
    """The kernel keeps 15 bytes of a process's name: of the last letter, here, the first of two."""
    name = Path("/proc/self/comm")
    before = name.read_bytes().rstrip(b"\n")
    name.write_bytes(b"x" * 14 + "é".encode())
    yield
    name.write_bytes(before)


def test_a_process_whose_name_ends_inside_a_letter_is_let_in_and_found_again(server, raw, half_a_letter):
    raw(hello("worker"))
    server.restart()
    raw(hello("worker"))


def test_a_rank_of_a_live_process_is_taken(server, raw, child):
    there = child(session="raw")
    client = raw()
    client.say(hello("worker"))
    refused = client.hear()
    assert refused.code == "rank_taken"
    assert str(there.process.pid) in refused.message
    there.kill()
    eventually(lambda: server.session("raw") is None)
    raw(hello("worker"))


def test_a_lease_of_another_session_is_not_yours(server, engine, raw):
    one = engine()
    one.store(4)
    hit = one.lookup(4)
    thief = raw(hello("worker", session="thief"))
    thief.register(ONE)
    release, commit = m.Release(hit.lease, 0, 4), m.Commit(hit.lease, 0, 4)
    condemn = m.Condemn(hit.lease, 0, 0)
    assert [failure.code for failure in thief.ask(release, commit, condemn)] == ["wrong_owner"] * 3
    assert server.leases() == 1
    assert one.read(hit) == []


# -- servers that die


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_restarted_server_finds_everything_and_clients_come_back(server, engine, end):
    one = engine()
    one.store(8)
    old = one.lookup(8)
    getattr(server, end)()
    start = time.monotonic()
    assert one.hit(8, timeout=20.0) == 0
    assert one.hit(8, timeout=20.0) == 0
    assert time.monotonic() - start < 10.0
    server.start()
    eventually(lambda: one.hit(8) == 8)
    one.ready()
    assert one.read(one.lookup(8)) == []
    with pytest.raises(Unavailable), one.workers[0].copying(old.lease):
        pytest.fail("a lease of a server that is gone was honoured")


def test_a_server_that_falls_silent_costs_one_deadline_and_nothing_stays_held(server, engine):
    one = engine()
    one.store(4)
    server.signal(signal.SIGSTOP)
    start = time.monotonic()
    assert one.lookup(4, timeout=0.2).reason == "deadline_exceeded"
    assert 0.2 <= time.monotonic() - start < 5.0
    assert one.lookup(4, timeout=20.0).reason == "silent"
    assert time.monotonic() - start < 10.0
    server.signal(signal.SIGCONT)
    eventually(lambda: one.hit(4) == 4)  # answers, and gives back what the first one got too late
    eventually(lambda: server.leases() == 0)


def test_what_was_given_back_to_a_silent_server_is_not_lost(server, engine):
    one = engine()
    one.store(4)
    hit = one.lookup(4)
    server.signal(signal.SIGSTOP)
    assert one.hit(4, timeout=0.05) == 0
    one.give_back(hit)
    server.signal(signal.SIGCONT)
    eventually(lambda: one.hit(4) == 4)
    eventually(lambda: server.leases() == 0)


# -- grace


@pytest.fixture
def stalled(server, child):
    """A server restarted under an engine that does not move: it has 8 chunks and was writing 4 more."""
    server.stop()
    server.start(memory="1MiB", hold_percent="100")
    there = child(session="old")
    there.call("store", 8)
    there.call("reserve", 4, seed=1)
    there.signal(signal.SIGSTOP)
    server.restart()
    assert server.status().in_grace
    return there


def fill(engine, first_seed=100):
    """Store until there is no room; returns the number of chunks stored."""
    stored, seed = 0, first_seed
    while (grant := engine.store(16, seed)).chunks:
        stored, seed = stored + grant.chunks, seed + 1
    return stored


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_while_an_old_engine_is_silent_nothing_is_evicted_and_no_limbo_reused(server, engine, stalled, end):
    new = engine(session="new")
    assert new.hit(8) == 8  # readable at once
    stored = fill(new)
    stripes, free, slots = books(server)
    assert (stripes, free) == (8 + stored, 0)
    assert slots == stripes + 4  # what was being written belongs to nobody
    assert server.status().in_grace
    stalled.signal(end)
    eventually(lambda: not server.status().in_grace)
    eventually(lambda: books(server)[1] == 4)
    assert new.store(16, seed=1).chunks == 16
    assert server.slab_bytes() <= 1 << 20


def test_grace_ends_after_its_time(server, engine, child):
    there = child(session="old")
    there.call("store", 8)
    there.signal(signal.SIGSTOP)
    server.restart(grace_seconds="0.3")
    over = eventually(lambda: None if (status := server.status()).in_grace else status)
    assert over.uptime_s >= 0.3
    there.signal(signal.SIGCONT)


def test_grace_waits_for_a_copy_though_its_process_has_come_back(server, engine):
    one = engine()
    grant = one.reserve(4)
    with one.workers[0].copying(grant.lease):
        server.restart()
        eventually(lambda: one.lookup(4).reason == "")  # the scheduler side is back
        assert server.status().in_grace
    eventually(lambda: not server.status().in_grace)
    one.ready()


def test_a_restarted_server_is_idle_after_its_old_engine_died(server, child):
    there = child(session="old", name="tp2")  # three connections of one process
    server.restart()
    there.call("ready")
    eventually(lambda: not server.status().in_grace)
    there.kill()
    eventually(lambda: server.status().sessions == [])
    assert busy_share(server.pid) < 0.5


def busy_share(pid, seconds=0.3):
    def ticks():
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))

    before = ticks()
    time.sleep(seconds)  # measures; waits for nothing
    return (ticks() - before) / 100 / seconds


def test_a_connection_that_attaches_as_its_time_runs_out_is_not_torn_from_its_member(tmp_path, monkeypatch):
    folder = Path(tempfile.mkdtemp(prefix="kvcellar-late-", dir="/dev/shm"))
    settings = Settings(memory=1 << 20, folder=folder, socket=tmp_path / "s")

    async def live():
        loop, server = asyncio.get_running_loop(), Server(settings)
        serving = asyncio.create_task(server.serve())
        accept = loop.connect_accepted_socket

        async def slowly(make, sock):
            await accept(make, sock)
            await asyncio.sleep(1.5)  # the time is over in the moment in which it is handed over

        monkeypatch.setattr(loop, "connect_accepted_socket", slowly)
        monkeypatch.setattr("kvcellar.server.server._OPENING_S", 1.0)
        while not settings.socket_path.exists():
            await asyncio.sleep(0.01)
        client = await asyncio.to_thread(Raw, settings.socket_path, hello("worker"))
        while server._opening:
            await asyncio.sleep(0.01)
        [member] = server._members.all.values()
        assert member.link is not None
        assert member.peer.pidfd is not None
        await asyncio.to_thread(client.close)
        server.stop()
        await serving

    try:
        asyncio.run(live())
    finally:
        shutil.rmtree(folder)


# -- where pids say nothing


def test_a_server_that_is_the_first_of_its_pid_namespace_knows_engines_of_another(stopped_server, engine):
    """As in a container: the pids of all engines read 0 there."""
    wrapper = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode:
        pytest.skip("cannot make a pid namespace")
    pidfd = os.pidfd_open(os.getpid())
    try:
        if not peer._is_of_pidfs(pidfd):
            pytest.skip("this kernel has no pidfs")
    finally:
        os.close(pidfd)
    stopped_server.wrapper = wrapper
    stopped_server.start()
    try:
        one = engine()
        one.store(4)
        assert one.lookup(4).chunks == 4
        one.close()
    finally:
        stopped_server.kill()  # unshare passes no other signal on


def test_a_server_that_is_stopped_while_it_clears_leaves_nothing_to_the_next(tmp_path, monkeypatch):
    folder = Path(tempfile.mkdtemp(prefix="kvcellar-clear-", dir="/dev/shm"))
    settings = Settings(memory=1 << 20, folder=folder, socket=tmp_path / "s")

    monkeypatch.setattr("kvcellar.ledger.ledger.SWEEP", 1)

    async def no_turn_ever_comes(_ledger: object) -> None:
        await asyncio.Event().wait()

    def store_and_clear() -> None:
        scheduler, worker = Raw(settings.socket_path, hello()), Raw(settings.socket_path, hello("worker"))
        for client in (scheduler, worker):
            client.register(ONE)
        grant = scheduler.reserve(ONE, 5)
        worker.ask(m.Commit(grant.lease, 0, 5))
        admin = Raw(settings.socket_path, m.Hello(m.PROTOCOL_VERSION, "admin"))
        admin.say(m.Request(1, 10_000, (m.Clear(),)), m.Request(2, 10_000, (m.Ping(),)))
        reply = admin.hear()
        assert isinstance(reply, m.Reply)
        assert reply.id == 2, "it answers others while it clears"
        for client in (scheduler, worker, admin):
            client.close()

    async def live() -> None:
        server = Server(settings)
        serving = asyncio.create_task(server.serve())
        while not settings.socket_path.exists():
            await asyncio.sleep(0.01)
        monkeypatch.setattr("kvcellar.server.operations.sweep", no_turn_ever_comes)
        await asyncio.to_thread(store_and_clear)
        [room] = server._ledger.rooms.values()
        assert room.shelves[0].free_slots == room.shelves[0].slots - 4
        server.stop()
        await serving
        assert room.shelves[0].free_slots == room.shelves[0].slots

    try:
        asyncio.run(live())
    finally:
        shutil.rmtree(folder)
