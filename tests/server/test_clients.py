"""Clients that leave, and clients that come back: nothing of them stays, and none takes what is another's."""

import errno
import socket
import threading

from kvcellar.client import SchedulerClient, WorkerClient, backoff, scheduler, worker
from kvcellar.client.slabs import fetch_sketch
from kvcellar.wire import messages as m
from tests.server.engine import NAMESPACES, PATIENCE, eventually
from tests.vllm.tap import Tap


def test_a_client_that_leaves_gives_everything_back_at_once(server, engine):
    one = engine()
    one.store(4)
    one.lookup(4)
    one.close()
    eventually(lambda: server.status().sessions == [])


def test_a_worker_stays_until_its_leaving_was_heard(server, monkeypatch):
    """A server that tells it of a rack in that moment would meet a closed connection, and read no further."""
    monkeypatch.setattr("kvcellar.client.worker._SEND_S", PATIENCE)
    closed, gone_before = threading.Event(), []
    with Tap(server.socket.with_name("tap"), server.socket) as tap:

        def before(role, _reply):
            if m.Leave() in tap.requests(role)[-1].ops:
                gone_before.append(closed.wait(0.3))

        tap.before_reply = before
        worker = WorkerClient(tap.path, "here", 0)
        assert worker.wait_connected(10.0)  # or it may leave without ever having come
        worker.close()
        closed.set()
    assert gone_before == [False]


def test_a_scheduler_that_is_closed_while_it_connects_leaves_all_the_same(server, monkeypatch):
    """The server may be so slow that nobody waits for the end of that."""
    coming, closed = threading.Event(), threading.Event()

    def slow(path):
        coming.set()
        assert closed.wait(PATIENCE)
        return fetch_sketch(path)

    monkeypatch.setattr(scheduler, "fetch_sketch", slow)
    client = SchedulerClient(server.socket, "here", NAMESPACES["one"])
    assert coming.wait(PATIENCE)
    with monkeypatch.context() as impatient:
        impatient.setattr(scheduler, "_CONNECT_S", 0.0)
        client.close()
    assert server.session("here")
    closed.set()
    client._thread.join(PATIENCE)
    assert not client._thread.is_alive()
    eventually(lambda: server.status().sessions == [])


def test_two_engines_of_one_name_in_one_process_do_not_take_it_from_each_other_all_the_time(
    server, engine, monkeypatch
):
    """The server cannot tell them from one that has lost its connection and comes back."""
    monkeypatch.setattr(backoff, "_LONGEST_S", 3600.0)
    first, second = engine(), engine()
    eventually(lambda: not any(client.is_connected for client in (first.scheduler, first.workers[0])))
    reasons = {second.lookup(1).reason for _ in range(2000)}
    assert reasons == {""}
    assert second.store(1).lease


def test_a_client_that_had_no_descriptors_left_comes_back(server, engine, monkeypatch):
    one, make, refused = engine(), socket.socket, threading.Event()

    def none_left(*arguments):
        if threading.current_thread() is threading.main_thread():
            return make(*arguments)
        refused.set()
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", none_left)
        server.restart()
        assert refused.wait(PATIENCE)
    one.ready()


def test_what_a_rank_says_while_there_is_no_server_does_not_pile_up(tmp_path):
    rank = WorkerClient(tmp_path / "nobody", "engine", 0)
    for lease in range(10_000):
        rank.abort(lease, 0, 1)
    assert rank._queue == [m.Abort(lease, 0, 1) for lease in range(10_000)][-worker._MAX_EARLY :]
    rank.close()
