"""The wire, from outside: what a client may say, what it hears, and what ends the conversation."""

import signal
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from kvcellar import __version__
from kvcellar.server.members import MAX_OF_A_PROCESS
from kvcellar.wire import MAX_FRAME, PREFIX, encode
from kvcellar.wire import messages as m
from tests.server.engine import NAMESPACES, eventually
from tests.server.raw import hello
from tests.support import full_group, keys, namespace

ONE = NAMESPACES["one"]
SOME_KEYS = b"".join(keys(3))


def test_hello_is_answered_with_version_and_epoch(server, raw):
    client = raw()
    client.say(hello())
    assert client.hear() == m.Welcome(m.PROTOCOL_VERSION, server.status().epoch, __version__)


def test_another_version_is_refused_with_advice(server, raw):
    client = raw()
    client.say(m.Hello(99, "scheduler", "s"))
    refused = client.hear()
    assert refused.code == "version_mismatch"
    assert "speaks protocol 4, not 99; install the same kvcellar" in refused.message
    assert client.hear() is None


def test_a_later_versions_hello_is_refused_with_advice_though_it_says_more(server, raw):
    client = raw()
    body = msgspec.msgpack.encode(["Hello", 99, "scheduler", "s", 0, "", [], "something new"])
    client.sock.sendall(len(body).to_bytes(PREFIX, "little") + body)
    assert client.refusal() == "version_mismatch"


def test_a_request_before_hello_is_refused(server, raw):
    client = raw()
    client.say(m.Request(1, 1000, (m.Ping(),)))
    assert client.refusal() == "not_attached"


def test_a_second_hello_is_refused(server, raw):
    client = raw(hello())
    client.say(hello())
    assert client.refusal() == "bad_request"


def test_a_connection_for_nothing_known_is_closed(server, raw):
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10.0)
        client.connect(str(server.socket))
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""


def test_operations_of_one_frame_are_answered_in_order(server, raw):
    client = raw(hello("worker"))
    results = client.ask(m.Ping(), m.Register(ONE), m.Lookup(ONE.id, SOME_KEYS), m.Release(1, 0, 1), m.Ping())
    assert [type(result) for result in results] == [m.Pong, m.Registered, m.Granted, m.Settled, m.Pong]


def test_one_failing_operation_does_not_touch_the_others(server, raw):
    client = raw(hello())
    half_a_key = m.Lookup(ONE.id, SOME_KEYS + b"half")
    results = client.ask(m.Register(ONE), half_a_key, m.Reserve(ONE.id, SOME_KEYS))
    assert [type(result) for result in results] == [m.Registered, m.Failure, m.Granted]
    assert results[1].code == "bad_request"
    assert results[2].chunks == 3


def test_a_namespace_that_nobody_registered_is_a_clean_miss(server, raw):
    looked_up, reserved = raw(hello()).ask(m.Lookup(ONE.id, SOME_KEYS), m.Reserve(ONE.id, SOME_KEYS))
    assert looked_up == m.Granted(0, 0, (), "unknown_namespace")
    assert reserved.code == "unknown_namespace"


def test_a_namespace_of_another_session_is_a_clean_miss_too(server, raw, engine):
    engine("one").store(3)
    client = raw(hello())
    assert client.lookup(ONE, 3).reason == "unknown_namespace"
    client.register(ONE)
    assert client.lookup(ONE, 3).chunks == 3


PING = (m.Ping(),)
OUT_OF_BOUNDS = {
    "no deadline": m.Request(1, 0, PING),
    "a deadline of more than ten minutes": m.Request(1, 600_001, PING),
    "a negative deadline": m.Request(1, -1, PING),
    "a negative request id": m.Request(-1, 1000, PING),
    "no operation": m.Request(1, 1000, ()),
    "too many operations": m.Request(1, 1000, PING * 257),
    "no key": m.Request(1, 1000, (m.Lookup(ONE.id, b""),)),
    "too many keys": m.Request(1, 1000, (m.Lookup(ONE.id, bytes(16 * 65_537)),)),
    "a short namespace id": m.Request(1, 1000, (m.Lookup(b"short", SOME_KEYS),)),
    "a negative lease": m.Request(1, 1000, (m.Release(-1, 0, 1),)),
    "a negative chunk": m.Request(1, 1000, (m.Release(1, -1, 1),)),
    "an absurd chunk": m.Request(1, 1000, (m.Commit(1, 0, 1 << 40),)),
    "an absurd group": m.Request(1, 1000, (m.Reserve(ONE.id, SOME_KEYS, None, (64,)),)),
    "no group": m.Request(1, 1000, (m.Reserve(ONE.id, SOME_KEYS, None, ()),)),
    "a result in place of an operation": m.Request(1, 1000, (m.Pong(),)),  # type: ignore[arg-type]
    "a message only servers send": m.Goodbye(),
}


def test_a_value_out_of_bounds_ends_the_conversation(server, raw):
    for what, message in OUT_OF_BOUNDS.items():
        client = raw(hello(session=what))
        client.say(message)
        assert client.refusal() == "bad_request", what


def test_a_deadline_and_a_count_at_their_bounds_are_accepted(server, raw):
    client = raw(hello())
    for deadline_ms in (1, 600_000):
        client.say(m.Request(7, deadline_ms, PING * 256))
        assert client.hear() == m.Reply(7, (m.Pong(),) * 256)


LARGER_THAN_THE_MEMORY = namespace(groups=(full_group(),), chunk_tokens=1 << 24)


def test_a_geometry_that_does_not_fit_is_refused_and_the_connection_stays(server, raw):
    for space, rank, says in ((LARGER_THAN_THE_MEMORY, 0, "raise --memory"), (ONE, 1, "a world of 1")):
        client = raw(hello("worker", rank=rank))
        failure = client.register(space)
        assert failure.code == "bad_request"
        assert says in failure.message
        assert client.ask(m.Ping()) == (m.Pong(),)


NOT_FOR_THIS_ROLE = [
    ("worker", m.Status(), "forbidden"),
    ("scheduler", m.Clear(), "forbidden"),
    ("scheduler", m.Pin(ONE.id, True), "forbidden"),
    ("admin", m.Lookup(ONE.id, SOME_KEYS), "not_attached"),
    ("admin", m.Register(ONE), "not_attached"),
    ("admin", m.Clear(bytes(16)), "unknown_namespace"),
    ("admin", m.Pin(bytes(16), True), "unknown_namespace"),
]


def test_each_role_has_operations_of_its_own(server, raw):
    for role, op, code in NOT_FOR_THIS_ROLE:
        assert raw(hello(role)).ask(op)[0].code == code


def test_after_leave_a_connection_holds_nothing_more(server, raw, engine):
    engine("one").store(3)
    client = raw(hello(session="gone"))
    client.register(ONE)
    left, looked_up = client.ask(m.Leave(), m.Lookup(ONE.id, SOME_KEYS))
    assert isinstance(left, m.Settled)
    assert looked_up.code == "not_attached"
    assert client.ask(m.Reserve(ONE.id, SOME_KEYS))[0].code == "not_attached"


def test_a_lease_of_an_earlier_server_is_a_counted_nothing(server, raw):
    client = raw(hello("worker"))
    assert client.ask(m.Release(1, 0, 1), m.Commit(2, 0, 1)) == (m.Settled(0), m.Settled(0))
    assert server.status().counts["stale"] == 2


def test_pipelined_requests_are_answered_in_order(server, raw):
    client = raw(hello())
    client.register(ONE)
    client.say(*(m.Request(number, 1000, (m.Lookup(ONE.id, SOME_KEYS),)) for number in range(1000)))
    assert [client.hear().id for _ in range(1000)] == list(range(1000))


def test_a_frame_cut_into_bytes_is_one_frame(server, raw):
    client = raw(hello())
    for byte in encode(m.Request(5, 1000, PING)):
        client.sock.sendall(bytes([byte]))
    assert client.hear() == m.Reply(5, (m.Pong(),))


def test_a_new_rack_is_announced_unasked(server, raw):
    client = raw(hello("worker"))
    client.register(ONE)
    assert client.hear() == m.RackAdded(ONE.id, 0, 0)


def test_a_frame_over_the_limit_is_refused_before_it_is_read(server, raw):
    client = raw(hello())
    client.sock.sendall((MAX_FRAME + 1).to_bytes(4, "little"))
    assert client.refusal() == "bad_request"


def send_until_full(client, frame):
    """Say the same again and again until the server takes no more; returns the bytes it took."""
    sent = 0
    client.sock.settimeout(0.5)
    with suppress(TimeoutError):
        while sent < 64 << 20:
            sent += client.sock.send(frame[sent % len(frame) :])
    client.sock.settimeout(10.0)
    return sent


def test_who_does_not_read_is_not_read_from_and_costs_no_memory(server, raw, engine):
    other = engine()
    before = server.resident_bytes()
    client = raw(hello("admin"))
    request = encode(m.Request(1, 1000, (m.Status(),) * 256))
    sent = send_until_full(client, request)
    assert sent < 8 << 20
    assert server.resident_bytes() - before < 16 << 20
    assert other.store(3).chunks == 3
    for _ in range(sent // len(request)):  # and whoever reads again is answered
        assert len(client.hear().results) == 256


def test_connections_leave_no_descriptors_behind(server, raw):
    def open_descriptors():
        return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))

    before = open_descriptors()
    for number in range(20):
        raw().close()
        raw(hello("admin")).close()
        refused = raw()
        refused.say(m.Hello(99, "worker", "s"))
        refused.refusal()
        half = raw(hello("worker", session=str(number)))
        half.sock.sendall(encode(m.Request(1, 1000, PING))[:3])
        half.close()
        again = raw(hello("worker", session=str(number)))
        again.ask(m.Leave())
        again.close()
    eventually(lambda: open_descriptors() <= before)


# -- the end


def test_sigterm_says_goodbye_and_closes(server, raw):
    client = raw(hello("worker"))
    server.signal(signal.SIGTERM)
    assert client.hear() == m.Goodbye()
    assert client.hear() is None
    assert server.wait() == 0
    assert not server.socket.exists()


def test_a_server_whose_socket_cannot_be_removed_stops_in_order_all_the_same(stopped_server, engine):
    server = stopped_server
    place = server.socket.with_name("place")
    server.socket = place / "s"
    server.start(drain_seconds="60")
    writer = engine()
    grant = writer.reserve(3)
    writer.write(grant)
    server.socket.unlink()
    place.rmdir()
    place.touch()
    server.signal(signal.SIGTERM)
    eventually(lambda: writer.lookup(3).reason == "draining")
    writer.commit(grant)
    assert server.wait() == 0


def test_a_write_under_way_may_be_finished_while_draining(stopped_server, engine):
    server = stopped_server.start(drain_seconds="60")
    writer = engine()
    grant = writer.reserve(3)
    writer.write(grant)
    server.signal(signal.SIGTERM)
    eventually(lambda: not server.socket.exists())
    assert writer.lookup(3).reason == "draining"
    writer.commit(grant)
    assert server.wait() == 0
    server.start()
    eventually(lambda: writer.hit(3) == 3)


def test_a_write_that_never_ends_does_not_keep_the_server(server, engine):
    writer = engine()
    writer.reserve(3)
    assert server.stop() == 0
    server.start()
    assert engine(session="other").hit(3) == 0


def test_a_second_sigterm_does_not_wait(server, engine):
    server.stop()
    server.start(drain_seconds="3600")
    engine().reserve(3)
    server.signal(signal.SIGTERM)
    eventually(lambda: not server.socket.exists())
    assert server.stop() == 0


def test_a_process_attaches_so_often_and_not_more(server, raw):
    first = raw(hello(session="0"))
    others = [raw(hello(session=str(number))) for number in range(1, MAX_OF_A_PROCESS)]
    late = raw()
    late.say(hello(session="late"))
    assert late.refusal() == "overloaded"
    raw(hello(session="0"))  # it comes back
    others[0].close()
    eventually(lambda: server.session("1") is None)
    raw(hello(session="late"))
    assert first.hear() is None
