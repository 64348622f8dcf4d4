"""What is surely nowhere is not waited for; all else is asked, and found."""

import signal

import pytest

from kvcellar.client import AdminClient
from kvcellar.client.slabs import fetch_sketch
from kvcellar.errors import VersionMismatch
from kvcellar.wire import messages as m
from tests.server.engine import eventually
from tests.support import keys, namespace, window_group


def waits(server, engine, *asked):
    """Is the server asked, and waited for, when an engine looks this up?"""
    server.signal(signal.SIGSTOP)
    reason = engine.lookup(*asked, timeout=0.01).reason
    server.signal(signal.SIGCONT)
    assert reason in ("", "deadline_exceeded")
    engine.scheduler.flush()
    eventually(lambda: not (engine.scheduler.collect() or engine.scheduler._sent))  # it is heard again
    engine.scheduler.flush()  # and what it granted too late is given back
    return reason == "deadline_exceeded"


def test_a_new_prompt_does_not_wait_for_the_server(server, engine):
    one = engine()
    one.store(2)
    assert not waits(server, one, 3, 1)
    # It is in the server's books all the same.
    counts = eventually(lambda: server.session().counts.get("lookups") and server.session().counts)
    assert (counts["lookups"], counts["asked_chunks"], counts["hit_chunks"]) == (1, 3, 0)


@pytest.mark.parametrize("name", ["one", "tp2", "mla", "hybrid"])
def test_what_another_engine_stored_is_found_at_once(server, engine, name):
    one, other = engine(name, session="one"), engine(name, session="other")
    assert one.hit(3) == 0
    other.store(3)
    assert one.hit(3) == 3


def test_what_is_being_written_is_asked_for(server, engine):
    one = engine()
    grant = one.reserve(1)
    assert waits(server, one, 1)
    one.write(grant)
    one.commit(grant)
    assert one.hit(1) == 1


def test_what_has_left_memory_is_not_waited_for(server, engine):
    one = engine()
    one.store(3)
    assert waits(server, one, 3)
    with AdminClient(server.socket) as admin:
        admin.clear()
    assert not waits(server, one, 3)


def test_a_server_that_comes_back_has_a_sketch_of_what_it_found_again(server, engine):
    one = engine()
    one.store(3)
    server.restart()
    eventually(lambda: one.hit(3) == 3)
    assert waits(server, one, 3)
    assert not waits(server, one, 3, 1)


def test_with_tiers_everything_is_asked_for(stopped_server, engine, tmp_path):
    stopped_server.start(disk=str(tmp_path / "disk"), disk_size="8MiB")
    assert waits(stopped_server, engine(), 3)


def test_where_the_kernel_makes_no_such_memory_everything_is_asked_for(
    stopped_server, engine, tmp_path, monkeypatch
):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\ndef memfd_create(*_): raise PermissionError(13, 'Permission denied')\n"
        "os.memfd_create = memfd_create\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    server = stopped_server.start()
    one = engine()
    assert waits(server, one, 3)
    one.store(3)
    assert one.hit(3) == 3
    assert "engines ask for every prompt: Permission denied" in server.log.read_text()


def test_a_hit_that_does_not_need_its_first_chunk_is_found(server, engine):
    """Where all layers have a window."""
    one = engine()
    one.change(namespace(checksum="xxh3-64", groups=(window_group(2),)))
    first, *rest = keys(3)
    one.scheduler.reserve("store", rest, first)
    one.scheduler.flush()
    [(_, grant)] = one.scheduler.collect(10.0)
    one.commit(grant)
    assert one.hit(3) == 3
    assert one.hit(1) == 0


def test_an_engine_of_another_version_gets_no_sketch(server, monkeypatch):
    fetch_sketch(server.socket)
    monkeypatch.setattr(m, "PROTOCOL_VERSION", 0)
    with pytest.raises(VersionMismatch):
        fetch_sketch(server.socket)


def test_what_is_asked_while_the_server_is_silent_does_not_pile_up(server, engine):
    one = engine()
    one.store(1)
    server.signal(signal.SIGSTOP)
    assert one.lookup(1, timeout=0.01).reason == "deadline_exceeded"
    for seed in range(1, 100):
        assert one.lookup(1, seed).reason == ""
        one.scheduler.flush()
    server.signal(signal.SIGCONT)
    eventually(lambda: server.session().counts.get("lookups"))
    assert one.hit(1) == 1
    assert server.session().counts["lookups"] == 2
