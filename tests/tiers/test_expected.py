"""Requests that wait in an engine's queue, over a real server: what tiers have for them is in memory before
they ask, is held for them, and never more of it than the server can spare.
"""

import pytest

from kvcellar.client import AdminClient
from kvcellar.wire.messages import MAX_KEYS
from tests.server.engine import PATIENCE, Child, eventually
from tests.support import keys
from tests.tiers.test_serving import check, fill_memory


def stripes(server, session="engine"):
    """How many were brought up for this engine's queue."""
    return server.session(session).counts.get("expected_stripes", 0)


def settle_and_forget(server):
    eventually(lambda: not server.status().tiers[0].queued)
    with AdminClient(server.socket) as admin:
        admin.clear()


@pytest.mark.parametrize("name", ["one", "tp2", "mla", "hybrid"])
def test_what_is_expected_is_in_memory_before_it_is_asked_for(cold, engine, name):
    one = engine(name)
    one.store(12)
    settle_and_forget(cold.server)
    expected = one.expect(12)
    eventually(lambda: stripes(cold.server))
    grant = one.lookup(12)
    assert (grant.chunks, grant.ticket) == (12, 0)
    one.no_longer(expected)
    check(one, grant)
    eventually(lambda: cold.server.leases() == 0)


def test_the_lookup_joins_what_is_being_read(gate, stopped_server, engine):
    """And so does another request with the same prefix: one read of each object."""
    server = stopped_server.start()
    one, two = engine(session="one"), engine(session="two")
    one.store(20)
    settle_and_forget(server)
    (gate / "stall").touch()
    expected = [one.expect(20, wait=30.0), two.expect(20, wait=30.0)]
    grants = [each.scheduler.lookup(keys(20), 60.0, 30.0) for each in (one, two)]
    (gate / "stall").unlink()
    for each, grant, known in zip((one, two), grants, expected, strict=True):
        brought = each.wait_for(grant)
        assert brought.chunks == 20
        each.no_longer(known)
        check(each, brought)
    assert server.status().tiers[0].counts["hits"] == 20


def test_it_is_held_while_memory_is_full_and_goes_when_nobody_expects_it(cold, engine):
    cold.wipe(memory="1MiB")
    one = engine()
    one.store(8)
    cold.settled()
    fill_memory(one)
    expected = one.expect(8)
    eventually(lambda: stripes(cold.server) == 8)
    fill_memory(one)
    assert one.hit(8) == 8
    one.no_longer(expected)
    eventually(lambda: one.hit(8) == 0)  # brought up for one use, which will not be


def test_a_request_that_is_gone_before_the_step_ends_is_never_heard_of(cold, engine):
    one = engine()
    one.store(8)
    settle_and_forget(cold.server)
    before = cold.server.session().counts["messages"]
    one.no_longer(one.scheduler.expect(keys(8), 10.0))
    assert one.hit(1, seed=12345) == 0
    assert cold.server.session().counts["messages"] == before + 1, "the lookup alone"


def test_a_request_that_is_gone_before_the_answer_leaves_nothing_behind(cold, engine):
    cold.wipe(memory="1MiB")
    one = engine()
    one.store(60)
    cold.settled()
    fill_memory(one)
    one.no_longer(one.expect(60))
    one.scheduler.collect(0.5)  # the answer, and with the next flush what follows from it
    one.scheduler.flush()
    eventually(lambda: one.hit(60) == 0)
    assert one.reserve(100, seed=1).chunks == 100, "nothing is held"


def test_a_long_queue_holds_no_more_than_its_part_and_moves_on(cold, engine):
    """Forty requests of ten chunks, and memory for 256; a quarter of that is for queues."""
    cold.wipe(memory="1MiB")
    one = engine()
    for seed in range(40):
        one.store(10, seed)
        cold.settled()
    fill_memory(one)
    expected = [one.expect(10, seed) for seed in range(40)]
    [group] = cold.server.status().namespaces[0].groups
    fit = group.slots // 4 // 10
    assert 1 < fit < 10
    eventually(lambda: stripes(cold.server) == 10 * fit)
    fill_memory(one)
    assert one.hit(100, seed=107) == 100, "there is room for others"
    assert [one.hit(10, seed) for seed in range(12)] == [10] * fit + [0] * (12 - fit), "the first in the line"
    assert stripes(cold.server) == 10 * fit
    one.no_longer(*expected[:2])
    eventually(lambda: stripes(cold.server) == 10 * (fit + 2))
    assert [one.hit(10, seed) for seed in range(fit + 3)] == [0] * 2 + [10] * fit + [0], "the next two"
    one.no_longer(*expected[2:])
    eventually(lambda: not any(one.hit(10, seed) for seed in range(fit)))


def test_a_prompt_that_is_larger_than_the_part_gets_its_beginning(cold, engine):
    cold.wipe(memory="1MiB")
    one = engine()
    one.store(100)
    cold.settled()
    fill_memory(one)
    one.expect(100)
    [group] = cold.server.status().namespaces[0].groups
    eventually(lambda: stripes(cold.server) == group.slots // 4)
    assert one.hit(100) == group.slots // 4


def test_the_longest_prompts_are_told_of_in_frames_that_fit(cold, engine):
    one = engine()
    prompt = keys(MAX_KEYS)
    for _ in range(5):  # their keys are 1 MiB each, and a frame has 4
        one.scheduler.expect(prompt, 1.0)
    one.scheduler.reserve("store", keys(3, seed=1), None)
    one.scheduler.flush()
    assert [(tag, grant.chunks) for tag, grant in one.scheduler.collect(PATIENCE)] == [("store", 3)]


def test_a_slow_tier_reads_for_its_time_and_then_for_the_next_in_line(gate, stopped_server, engine):
    server = stopped_server.start()
    one = engine()
    one.store(200)
    one.store(200, seed=1)
    settle_and_forget(server)
    (gate / "slow").write_text("40000")  # bytes a second: 0.1 s an object and thread
    one.expect(200, wait=2.0)
    one.expect(200, seed=1, wait=2.0)
    eventually(lambda: one.hit(200, seed=1))
    assert 0 < one.hit(200) < 200


def test_an_engine_that_dies_expects_nothing_any_more(cold, engine, tmp_path):
    cold.wipe(memory="1MiB")
    one = engine(session="one")
    one.store(8)
    cold.settled()
    fill_memory(one)
    child = Child(cold.server.socket, tmp_path / "child.log", session="doomed")
    child.call("expect_and_forget", 8)
    eventually(lambda: one.hit(8) == 8)
    child.kill()
    eventually(lambda: one.hit(8) == 0)


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_ticket_is_not_taken_for_one_of_another_server(gate, stopped_server, engine, is_queued):
    """Given up when the other is there, or just before, in a message that was not sent."""
    server = stopped_server.start()
    one = engine()
    one.store(8)
    settle_and_forget(server)
    expected = one.expect(8)
    eventually(lambda: stripes(server) == 8)
    assert one.hit(8) == 8  # and the ticket has come
    assert expected.ticket
    settle_and_forget(server)
    (gate / "stall").touch()
    ticket = expected.ticket
    if is_queued:
        one.scheduler.no_longer(expected)
    server.restart()
    eventually(lambda: one.scheduler.is_connected)
    eventually(lambda: one.lookup(1, seed=12345).reason == "")
    eventually(lambda: server.status().tiers[0].state == "up")  # or it has not found yet what it has
    grant = one.scheduler.lookup(keys(8), 60.0, 30.0)
    assert grant.ticket not in (0, ticket)
    one.no_longer(expected)
    (gate / "stall").unlink()
    assert one.wait_for(grant).chunks == 8


def test_a_server_without_tiers_is_told_nothing(server, engine):
    one = engine()
    assert not one.scheduler.has_tiers
    one.expect(8)
    assert one.hit(8) == 0


def test_a_server_with_tiers_says_so(cold, engine):
    assert engine().scheduler.has_tiers
