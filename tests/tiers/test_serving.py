"""A real server with a disk tier, and engines that compare every byte: write-back, prefetch, restart."""

import os
import resource
import signal
from pathlib import Path

import pytest

from kvcellar.client import AdminClient
from kvcellar.wire import messages as m
from tests.server.engine import NAMESPACES, PATIENCE, Child, eventually
from tests.server.raw import hello
from tests.support import keys
from tests.tiers.conftest import ColdServer


def check(engine, grant, seed=0):
    """Every rank reads its part, and all of it is right."""
    for rank in engine.workers:
        assert engine.read(grant, rank, seed) == []
    engine.release(grant)


@pytest.mark.parametrize("name", ["one", "tp2", "mla", "hybrid"])
def test_what_was_stored_comes_back_from_disk_after_memory_was_wiped(cold, engine, name):
    engine(name, session="first").store(12)
    cold.settled()
    cold.wipe()
    second = engine(name, session="second")
    assert second.hit(12) == 0, "memory alone has nothing"
    grant = second.bring(12)
    assert grant.chunks == 12
    check(second, grant)
    assert second.hit(12) == 12, "it stays: there was room"
    report = cold.tier()
    assert report.counts["hits"] > 0
    assert report.read_rate > 0
    eventually(lambda: cold.server.leases() == 0)


def test_sigterm_writes_back_what_is_queued(cold, engine):
    cold.wipe(drain_seconds="60")  # as long as it takes
    first = engine(session="first")
    cold.has_grown(1000)
    assert first.store(1000).chunks == 1000
    cold.wipe(memory="16MiB")
    second = engine(session="second")
    grant = second.bring(1000)
    assert grant.chunks == 1000
    check(second, grant)


def test_a_disk_for_what_is_reused_holds_nothing_that_was_seen_once(stopped_server, engine, tmp_path):
    """One chunk in two groups is not a chunk seen twice."""
    cold = ColdServer(stopped_server)
    cold.start(tier=f"disk://{tmp_path / 'disk'}?size=64MiB&write=reused")
    first = engine("hybrid", session="first")
    first.store(12)
    first.store(12, seed=1)
    assert first.hit(12, seed=1) == 12
    eventually(lambda: cold.tier().objects == 14)  # 12 of one group, the last 2 of the one with a window
    cold.wipe()
    second = engine("hybrid", session="second")
    assert second.bring(12).chunks == 0
    grant = second.bring(12, seed=1)
    assert grant.chunks == 12
    check(second, grant, seed=1)


def test_the_part_in_memory_comes_at_once_and_the_rest_is_pushed(cold, engine):
    first = engine(session="first")
    first.store(10)
    cold.settled()
    cold.forget()
    first.store(4)
    grant = first.scheduler.lookup(keys(10), 60.0, 60.0)
    assert grant.chunks == 4
    assert grant.ticket
    brought = first.wait_for(grant)
    assert brought.chunks == 10
    first.give_back(grant)
    check(first, brought)


def test_what_the_lookup_holds_counts_once_against_what_one_engine_may_hold(stopped_server, engine, tmp_path):
    """40 chunks: a prompt of 30 comes whole, also where 20 of them are in memory; two of them do not."""
    stopped_server.flags |= {"--disk": str(tmp_path / "disk"), "--disk-size": "64MiB", "--hold-percent": "1"}
    cold = ColdServer(stopped_server).start()
    first = engine(session="first")
    for seed in (0, 1):
        first.store(30, seed)
    cold.settled()
    cold.forget()
    first.store(20)
    grant = first.scheduler.lookup(keys(30), 60.0, 60.0)
    assert grant.chunks == 20
    brought = first.wait_for(grant)
    assert brought.chunks == 30
    first.give_back(grant)
    assert first.bring(30, seed=1).chunks == 10
    check(first, brought)


def test_nothing_is_read_for_lookups_that_together_hold_more_than_one_engine_may(
    gate, stopped_server, engine
):
    """40 chunks: of three prompts of 30 that are waited for at once, one comes whole and 10 of another."""
    cold = ColdServer(stopped_server).start(hold_percent="1")
    one = engine()
    for seed in range(3):
        one.store(30, seed)
    cold.settled()
    cold.forget()
    (gate / "stall").touch()
    grants = [one.scheduler.lookup(keys(30, seed), 60.0, 60.0) for seed in range(3)]
    (gate / "stall").unlink()
    assert sorted(one.wait_for(grant).chunks for grant in grants) == [0, 10, 30]
    assert cold.tier().counts["hits"] == 40


def test_a_gap_ends_the_hit(cold, engine, tmp_path):
    first = engine(session="first")
    first.store(6)
    cold.settled()
    cold.forget()
    assert engine(session="second").bring(10).chunks == 6


def test_a_miss_is_said_soon_and_grants_nothing(cold, engine):
    one = engine()
    grant = one.scheduler.lookup(keys(5, seed=9), 60.0, 60.0)
    assert grant.ticket
    brought = one.wait_for(grant, 30)
    assert (brought.lease, brought.chunks) == (0, 0)


def test_without_patience_tiers_are_not_asked(cold, engine):
    one = engine()
    one.store(5)
    cold.settled()
    cold.forget()
    assert one.lookup(5).ticket == 0
    assert cold.tier().counts.get("hits", 0) == 0


def test_several_that_wait_for_the_same_cause_one_read(cold, engine):
    engine(session="first").store(50)
    cold.settled()
    cold.forget()
    others = [engine(session=f"other{number}") for number in range(3)]
    grants = [one.scheduler.lookup(keys(50), 60.0, 60.0) for one in others]
    for one, grant in zip(others, grants, strict=True):
        brought = one.wait_for(grant) if grant.ticket else grant  # which came when all was there again
        assert brought.chunks == 50
        check(one, brought)
    assert cold.tier().counts["hits"] == 50


def test_who_joins_a_read_has_time_of_his_own(gate, stopped_server, engine):
    """The first gives up while some of what both wait for is not begun."""
    cold = ColdServer(stopped_server).start()
    one, other = engine(session="one"), engine(session="other")
    one.store(40)
    cold.settled()
    cold.forget()
    (gate / "slow").write_text("8000")  # bytes a second: half a second an object and thread
    grants = [
        each.scheduler.lookup(keys(40), PATIENCE, wait) for each, wait in ((one, 0.3), (other, PATIENCE))
    ]
    one.give_back(one.wait_for(grants[0]))
    brought = other.wait_for(grants[1])
    assert brought.chunks == 40
    check(other, brought)


def fill_memory(engine):
    """Push everything else out of a memory of 1 MiB."""
    for seed in range(100, 108):
        engine.store(100, seed)


def test_what_is_brought_into_full_memory_goes_with_its_last_reader(cold, engine):
    cold.wipe(memory="1MiB")
    one = engine("mla")
    one.store(8)
    cold.settled()
    fill_memory(one)
    assert one.hit(8) == 0, "it was evicted"
    grant = one.bring(8)
    assert grant.chunks == 8
    one.read(grant, 0)
    one.release(grant, 0)
    assert one.hit(8) == 8, "rank 1 still has it"
    one.read(grant, 1)
    one.release(grant, 1)
    assert one.hit(8) == 0, "temporary: gone with the last share"
    grant = one.bring(8)
    check(one, grant)
    assert one.hit(8) == 8, "wanted twice: it stays"


def test_what_is_brought_once_is_temporary_in_every_group(cold, engine):
    """The same key in two groups is not a chunk that was brought twice."""
    cold.wipe(memory="1MiB")
    one = engine("hybrid")
    one.store(8)
    cold.settled()
    fill_memory(one)
    grant = one.bring(8)
    assert grant.chunks == 8
    check(one, grant)
    eventually(lambda: cold.server.leases() == 0)
    groups = cold.server.status().namespaces[0].groups
    assert [group.left_by.get("temporary", 0) for group in groups] == [8, 2]


def test_one_pass_over_much_cold_kv_leaves_memory_as_it_was(cold, engine):
    """More than memory holds, each prompt read once; what engines use stays but for a prompt or two."""
    cold.wipe(memory="1MiB", hold_percent="100")
    one = engine()
    for seed in range(40):
        one.store(8, seed)
        cold.settled()  # or memory would run over before all are written
    cold.forget()
    fill_memory(one)
    cold.settled()
    [before] = cold.server.status().namespaces[0].groups
    assert before.free == 0
    brought = 0
    for seed in range(40):
        grant = one.bring(8, seed)
        brought += grant.chunks
        check(one, grant, seed)
        eventually(lambda: cold.server.leases() == 0)
    [after] = cold.server.status().namespaces[0].groups
    assert brought > after.slots
    assert after.left_by["evicted"] - before.left_by.get("evicted", 0) <= 16


def test_memory_that_moves_to_another_namespace_is_unmapped(stopped_server, engine):
    """It is the server that mapped it, for write-back, and pages stay as long as anybody maps them."""
    cold = ColdServer(stopped_server).start(memory="1MiB", hold_percent="100", tier="memory://")
    rich = engine("one", session="rich")
    for seed in range(24):
        rich.store(16, seed)
    cold.settled()
    poor = engine("other", session="poor")
    eventually(lambda: poor.reserve(8).chunks)  # nothing of it is committed, so nothing more is mapped
    assert cold.server.status().namespaces[0].groups[0].left_by["returned"] > 0
    maps = Path(f"/proc/{cold.server.pid}/maps").read_text().splitlines()
    slabs = [line for line in maps if ".slab" in line]
    assert slabs
    assert not [line for line in slabs if line.endswith("(deleted)")]


def test_giving_up_leaves_nothing_behind(cold, engine):
    cold.wipe(memory="1MiB")
    one = engine()
    one.store(60)
    cold.settled()
    fill_memory(one)
    grant = one.scheduler.lookup(keys(60), 60.0, 60.0)
    one.scheduler.give_up(grant.ticket)
    one.give_back(grant)
    one.scheduler.flush()
    assert one.hit(1, seed=12345) == 0  # whatever was pushed meanwhile has been heard, and given back
    one.scheduler.flush()
    eventually(lambda: cold.server.leases() == 0)
    free = one.bring(60)
    assert free.chunks == 60
    check(one, free)


def test_what_tiers_bring_for_a_lookup_that_was_answered_too_late_is_given_back(gate, stopped_server, engine):
    """Also by an engine that asks nothing else, and so hears of nothing."""
    server = stopped_server.start()
    one, other = engine(session="one"), engine(session="other")
    one.store(10)
    eventually(lambda: not server.status().tiers[0].queued)
    with AdminClient(server.socket) as admin:
        admin.clear()
    (gate / "stall").touch()
    server.signal(signal.SIGSTOP)
    assert one.scheduler.lookup(keys(10), 0.01, PATIENCE).reason == "deadline_exceeded"
    server.signal(signal.SIGCONT)

    def holds_nothing_after_a_step() -> bool:
        one.scheduler.collect()
        one.scheduler.flush()
        return bool(server.leases() == 0)

    eventually(lambda: server.session("one").counts.get("lookups"))
    assert holds_nothing_after_a_step()
    waiting = other.lookup_and_wait(10)
    (gate / "stall").unlink()
    brought = other.wait_for(waiting)  # when the other, which came first, has its own
    assert brought.chunks == 10
    check(other, brought)
    eventually(holds_nothing_after_a_step)


def test_what_is_abandoned_in_the_same_breath_is_forgotten(cold, raw):
    """Before the server has so much as begun to ask; three times as many as may wait."""
    client = raw(hello())
    client.register(NAMESPACES["one"])
    lookup = m.Lookup(NAMESPACES["one"].id, b"".join(keys(3)), 60_000)
    first = client.ask(lookup)[0].ticket
    for ticket in range(first + 1, first + 201):
        granted, _ = client.ask(lookup, m.Abandon(ticket))
        assert granted.ticket == ticket


def test_an_engine_that_dies_while_it_waits_leaves_nothing_behind(cold, engine, tmp_path):
    first = engine(session="first")
    first.store(100)
    cold.settled()
    cold.forget()
    child = Child(cold.server.socket, tmp_path / "child.log", session="doomed")
    child.call("lookup_and_wait", 100)
    child.kill()
    eventually(lambda: cold.server.session("doomed") is None)
    eventually(lambda: cold.server.leases() == 0)
    grant = first.bring(100)
    check(first, grant)


def test_a_hit_in_a_far_tier_fills_the_near_one(gate, stopped_server, engine, tmp_path):
    server = stopped_server.start()  # the shared tier alone
    engine(session="first").store(10)
    eventually(lambda: not server.status().tiers[0].queued)
    assert server.stop() == 0
    ColdServer(server).start(disk=str(tmp_path / "near"), disk_size="8MiB", memory="16MiB")
    second = engine(session="second")
    near, far = server.status().tiers
    assert (near.label, near.objects) == (f"disk://{tmp_path / 'near'}", 0)
    with AdminClient(server.socket) as admin:
        admin.clear()
    grant = second.bring(10)
    assert grant.chunks == 10
    check(second, grant)
    eventually(lambda: server.status().tiers[0].objects == 10)
    assert far.label == f"gated://{gate}"


def test_a_lookup_is_answered_within_its_time_by_a_slow_tier_with_what_has_come(gate, stopped_server, engine):
    stopped_server.start()
    one = engine()
    one.store(100)
    eventually(lambda: not stopped_server.status().tiers[0].queued)
    with AdminClient(stopped_server.socket) as admin:
        admin.clear()
    (gate / "slow").write_text("8000")  # bytes a second: half a second an object and thread
    grant = one.bring(100, wait=5.0)
    assert 0 < grant.chunks < 100
    check(one, grant)


def test_what_tiers_read_and_write_leaves_descriptors_for_connections(cold, engine, raw):
    """The server maps a slab when a tier first uses it, and each takes a descriptor more."""
    engine("tp2", session="first").store(4)
    cold.settled()
    cold.wipe()
    second = engine("tp2", session="second")
    cold.has_grown(8)
    limits = resource.prlimit(cold.server.pid, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{cold.server.pid}/fd")}
    lowest = min(set(range(len(used) + 1)) - used)
    resource.prlimit(cold.server.pid, resource.RLIMIT_NOFILE, (lowest + 100, limits[1]))
    assert second.bring(4).chunks == 0
    second.store(4, seed=1)
    assert cold.settled().dropped["failed"] == 4
    assert second.hit(4, seed=1) == 4
    raw(hello(session="another"))
    resource.prlimit(cold.server.pid, resource.RLIMIT_NOFILE, limits)
    grant = second.bring(4)
    assert grant.chunks == 4
    check(second, grant)
    second.store(4, seed=2)
    assert cold.settled().dropped["failed"] == 4
