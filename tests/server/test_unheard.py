"""Engines that do not hear what they are told: they make no steps, or the server makes no sound."""

import signal
import threading

from kvcellar.client import AdminClient, WorkerClient, scheduler, slabs, worker
from kvcellar.client.slabs import fetch_slab
from tests.server.engine import NAMESPACES, PATIENCE, eventually
from tests.support import keys


def test_what_is_granted_to_an_engine_that_makes_no_more_steps_is_taken_back(server, engine, monkeypatch):
    one, other = engine(session="one"), engine(session="other")
    one.store(1)
    one.scheduler.reserve("unheard", keys(3, seed=1), None)
    one.scheduler.flush()
    eventually(lambda: server.leases() == 1)
    assert not (other.reserve(3, seed=1).lease), "or this test shows nothing"
    monkeypatch.setattr(scheduler, "_UNHEARD_S", 0.1)
    eventually(lambda: server.leases() == 0)
    assert other.store(3, seed=1).lease
    eventually(lambda: one.scheduler.is_connected)
    [(tag, grant)] = eventually(one.scheduler.collect)
    assert (tag, grant.lease, grant.reason) == ("unheard", 0, "disconnected")
    assert one.hit(3, seed=1) == 3


def test_a_lookup_that_is_answered_when_nobody_listens_any_more_leaves_nothing(server, engine, monkeypatch):
    one = engine()
    one.store(3)
    server.signal(signal.SIGSTOP)
    assert one.lookup(3, timeout=0.01).reason == "deadline_exceeded"
    server.signal(signal.SIGCONT)
    eventually(lambda: server.leases() == 1)
    monkeypatch.setattr(scheduler, "_UNHEARD_S", 0.1)
    eventually(lambda: server.leases() == 0)


def test_what_tiers_brought_when_it_was_given_up_leaves_nothing(
    stopped_server, engine, monkeypatch, tmp_path
):
    """It is in the socket, and the last thing that the engine says is that it is not wanted."""
    server = stopped_server.start(disk=str(tmp_path / "disk"), disk_size="8MiB")
    one = engine()
    one.store(3)
    eventually(lambda: not server.status().tiers[0].queued)
    with AdminClient(server.socket) as admin:
        admin.clear()
    grant = one.lookup_and_wait(3)
    assert grant.ticket
    eventually(lambda: server.leases() == 1)
    one.scheduler.give_up(grant.ticket)
    one.scheduler.flush()
    monkeypatch.setattr(scheduler, "_UNHEARD_S", 0.1)
    eventually(lambda: server.leases() == 0)


def test_who_has_heard_everything_is_left_alone(server, engine):
    one = engine()
    one.store(2)
    assert one.hit(2) == 2
    assert one.hit(2, seed=1) == 0
    one.scheduler.flush()
    eventually(lambda: server.session().counts["lookups"] == 2)
    one.scheduler.collect()
    link = one.scheduler._link
    assert link is not None
    assert link.silent_since == 0


def test_a_server_that_owes_answers_is_asked_for_nothing_more(server, engine, monkeypatch):
    """Also by engines that ask for nothing but places, and so wait for nothing."""
    one = engine()
    one.store(1)
    server.signal(signal.SIGSTOP)
    one.scheduler.reserve("first", keys(3, seed=1), None)
    one.scheduler.flush()
    monkeypatch.setattr(scheduler, "_OWED_S", 0.0)
    one.scheduler.reserve("second", keys(3, seed=2), None)
    one.scheduler.flush()
    assert [(tag, grant.reason) for tag, grant in one.scheduler.collect()] == [("second", "silent")]
    server.signal(signal.SIGCONT)
    [(tag, grant)] = eventually(one.scheduler.collect)
    assert (tag, grant.chunks) == ("first", 3)
    one.scheduler.abort(grant.lease, 0, 3)
    one.scheduler.flush()
    eventually(lambda: server.leases() == 0)
    assert one.store(3, seed=2).chunks == 3


class Mapped:
    """Counts, as one who page-locks them would."""

    def __init__(self) -> None:
        self.slabs: list[object] = []
        self.all = 0

    def mapped(self, slab: object) -> None:
        self.slabs.append(slab)
        self.all += 1

    def unmapped(self, slab: object) -> None:
        self.slabs.remove(slab)


def test_a_slab_that_comes_when_the_engine_works_with_another_namespace_is_let_go(
    server, engine, monkeypatch
):
    engine("one", session="one").store(1)
    engine("other", session="other").store(1)
    coming, changed = threading.Event(), threading.Event()

    def slow(*asked):
        slab = fetch_slab(*asked)
        coming.set()
        assert changed.wait(PATIENCE)
        return slab

    monkeypatch.setattr(worker, "fetch_slab", slow)
    mapped = Mapped()
    late = WorkerClient(server.socket, "late", 0, NAMESPACES["one"], watcher=mapped)
    assert coming.wait(PATIENCE)
    late.register(NAMESPACES["other"])
    changed.set()
    assert late.wait_connected(PATIENCE)
    assert late.flush(PATIENCE)
    known = {space.id: space.groups[0].racks for space in server.status().namespaces}
    eventually(lambda: len(mapped.slabs) >= known[NAMESPACES["other"].id.hex()])
    assert len(mapped.slabs) == len(late._slabs._slabs)
    late.close()


def test_a_worker_that_is_closed_while_it_connects_lets_go_of_its_slabs_all_the_same(
    server, engine, monkeypatch
):
    """The server may be so slow that nobody waits for the end of that."""
    engine(session="first").store(1)
    for module, name in ((slabs, "_FETCH_S"), (worker, "_SEND_S")):
        monkeypatch.setattr(module, name, PATIENCE)
    coming, closed = threading.Event(), threading.Event()

    def slow(*asked):
        coming.set()
        assert closed.wait(PATIENCE)
        return fetch_slab(*asked)

    monkeypatch.setattr(worker, "fetch_slab", slow)
    mapped = Mapped()
    client = WorkerClient(server.socket, "late", 0, NAMESPACES["one"], watcher=mapped)
    assert coming.wait(PATIENCE)
    with monkeypatch.context() as impatient:
        impatient.setattr(worker, "_CONNECT_S", 0.0)
        impatient.setattr(worker, "_SEND_S", 0.0)
        client.close()
    closed.set()
    client._thread.join(PATIENCE)
    assert mapped.all
    assert mapped.slabs == []
    assert server.session("late") is None
