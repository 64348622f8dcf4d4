"""What no real Valkey does: answers that are none, or too many. An error, and never the answer to another."""

import itertools
import time

import pytest
from redis.crc import key_slot

from kvcellar.tiers import EngineError, redis_nodes
from kvcellar.tiers.redis_nodes import Node
from kvcellar.tiers.remote import Address
from tests.server.engine import PATIENCE, eventually
from tests.tiers.conformance import buffer
from tests.tiers.liar import Liar, cluster
from tests.tiers.remote import NAME


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param(b"*1\r\n:5\r\n", id="no array"),
        pytest.param(b"*1\r\n*3\r\n:0\r\n:1\r\n:5\r\n", id="no node"),
        pytest.param(b"*1\r\n*3\r\n$1\r\n0\r\n$1\r\n1\r\n*2\r\n$1\r\nh\r\n:1\r\n", id="slots in words"),
        pytest.param(cluster((0, 1 << 45, 1)), id="more slots than there are"),
        pytest.param(cluster((0, 16383, 1 << 70)), id="a port that is none"),
        pytest.param(b"*1\r\n" * 5000, id="arrays in arrays"),
        pytest.param(b"*1\r\n$%d\r\n" % (1 << 63), id="a word without an end"),
    ],
)
def test_a_map_that_is_none_is_an_error(opened, slots):
    with Liar() as liar:
        liar.slots = slots
        with pytest.raises(EngineError, match=str(liar.port)):
            opened(liar.url)


def test_a_node_that_is_known_to_be_gone_is_none(opened):
    """It has no port, and real ones hear of that at some time."""
    with Liar() as liar:
        liar.slots = cluster((0, 8191, liar.port), (8192, 16383, 0))
        with pytest.raises(EngineError, match="8192 of 16384 slots of the cluster have no node"):
            opened(liar.url)


def test_an_engine_that_cannot_be_opened_keeps_no_connection(opened):
    with Liar() as liar:
        liar.slots = cluster((0, 8191, liar.port))
        with pytest.raises(EngineError) as kept:  # and with it, all that its frames know
            opened(liar.url)
        eventually(lambda: not liar.connections)
        assert "have no node" in str(kept.value)


@pytest.mark.parametrize("reply", [b"-MOVED 1\r\n", b"-MOVED 1 h\r\n", b"-ASK 1 h:x\r\n"])
def test_a_redirect_to_nowhere_is_an_error(opened, reply):
    with Liar() as liar:
        engine = opened(liar.url)
        liar.reply = lambda _: reply
        with pytest.raises(EngineError):
            engine.exist([NAME])
        with pytest.raises(EngineError):
            engine.read(NAME, buffer(1000))


def test_an_envelope_that_is_larger_than_it_can_be_is_an_error(opened):
    with Liar() as liar:
        engine = opened(liar.url)
        liar.reply = lambda _: b"$%d\r\n" % (1 << 62)
        with pytest.raises(EngineError, match="where few were due"):
            engine.delete([NAME])


def test_what_follows_a_bad_answer_is_not_taken_for_the_next_one(opened):
    """Two names are asked for at the node that they have moved to."""
    with Liar() as old, Liar() as new:
        engine = opened(old.url)
        old.reply = lambda _: b"-MOVED 1 127.0.0.1:%d\r\n" % new.port
        bad = iter([b"+what?\r\n:1\r\n"])
        new.reply = lambda _: next(bad, b":0\r\n")
        assert engine.exist(["ns/0", "ns/1"]) == [False, False]


def test_a_node_that_does_not_read_costs_the_others_no_answer(opened):
    def name_in(half: int, size: int) -> str:
        names = (f"{number:0{size}}" for number in itertools.count())
        return next(name for name in names if key_slot(f"kvcellar:{name}".encode()) // 8192 == half)

    with Liar() as deaf, Liar() as other:
        deaf.slots = cluster((0, 8191, deaf.port), (8192, 16383, other.port))
        engine = opened(deaf.url, timeout="2")
        deaf.reply = lambda _: None
        other.reply = lambda _: b":1\r\n"
        names = [name_in(0, 64 << 10)] * 400 + [name_in(1, 8)]  # more than any socket takes in advance
        assert engine.exist(names) == [False] * 400 + [True]


def test_a_node_that_there_was_no_time_to_ask_is_not_asked_and_not_blamed():
    with Liar() as liar:
        node = Node(Address("127.0.0.1", liar.port), None, {})
        with pytest.raises(EngineError, match="no time left"), node.connection(time.monotonic() - 1):
            pytest.fail("it was asked")
        with node.connection(time.monotonic() + PATIENCE) as wire:
            wire.send(b"PING")
            wire.status()
        assert liar.connections == 1
        node.close()


def test_a_node_that_has_left_the_cluster_keeps_no_connection(opened, monkeypatch):
    monkeypatch.setattr(redis_nodes, "_REST_S", 0.0)
    with Liar() as stays, Liar() as goes:
        stays.slots = cluster((0, 8191, stays.port), (8192, 16383, goes.port))
        engine = opened(stays.url)
        assert goes.connections == 1
        stays.slots = cluster((0, 16383, stays.port))
        goes.reply = lambda words: b"-MOVED 1 127.0.0.1:%d\r\n" % stays.port
        engine.exist([f"ns/{number}" for number in range(100)])
        eventually(lambda: not goes.connections)
        assert engine.exist([NAME]) == [False]
