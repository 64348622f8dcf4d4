"""A tier that hangs, or takes its time: nobody waits beyond his deadline, and no place that it may still use
is given away.
"""

import signal

from kvcellar.tiers.tier import HANDS
from tests.server.engine import eventually
from tests.support import keys
from tests.tiers.test_faults import forget, tier
from tests.tiers.test_serving import check


def put_below(server, one, chunks):
    """A prompt that memory no longer has."""
    one.store(chunks)
    eventually(lambda: not tier(server).queued)
    forget(server)


def test_a_hanging_tier_delays_nobody_and_comes_back(gate, stopped_server, engine):
    server = stopped_server.start()
    one = engine()
    one.store(20)
    eventually(lambda: not tier(server).queued)
    one.store(20, seed=1)
    forget(server)
    one.store(20, seed=1)
    eventually(lambda: not tier(server).queued)
    (gate / "hang").touch()
    grant = one.scheduler.lookup(keys(20), 60.0, 0.3)
    assert grant.ticket
    assert one.hit(20, seed=1) == 20, "memory answers as if there were no tier"
    assert one.wait_for(grant).lease == 0, "answered at its deadline, with nothing"
    one.store(20, seed=2)
    assert one.hit(20, seed=2) == 20, "stores go on too"
    eventually(lambda: tier(server).state in ("down", "no writes"))
    assert "no answer within" in tier(server).reason
    assert tier(server).counts["stuck"] > 0
    (gate / "hang").unlink()
    eventually(lambda: one.bring(20).chunks == 20)
    eventually(lambda: tier(server).state == "up")  # when the writes that hung have ended, too
    grant = one.bring(20)
    check(one, grant)


def test_a_tier_that_stalls_while_it_reads_holds_nobody_past_its_deadline(gate, stopped_server, engine):
    server = stopped_server.start()
    one = engine()
    put_below(server, one, 20)
    (gate / "stall").touch()
    grants = [one.scheduler.lookup(keys(20), 60.0, 0.5) for _ in range(3)]
    assert [one.wait_for(grant).lease for grant in grants] == [0, 0, 0]
    (gate / "stall").unlink()
    eventually(lambda: one.hit(1) == 1)  # what was read after all is kept
    check(one, one.bring(20))


def test_a_server_with_a_hanging_tier_stops_in_time(gate, stopped_server, engine):
    server = stopped_server.start()
    one = engine()
    put_below(server, one, 20)
    (gate / "hang").touch()
    assert one.scheduler.lookup(keys(20), 60.0, 60.0).ticket
    one.store(20, seed=1)
    assert server.stop() == 0  # within the time that `wait` has


def test_a_second_sigterm_does_not_wait_for_tiers(gate, stopped_server, engine):
    server = stopped_server.start(drain_seconds="3600")
    (gate / "hang").touch()
    engine().store(20)
    server.signal(signal.SIGTERM)
    eventually(lambda: not server.socket.exists())
    assert server.stop() == 0


def test_a_read_that_hangs_keeps_its_place_until_it_ends(gate, stopped_server, engine):
    """The engine of storage may still write there: nobody else may be given the place."""
    server = stopped_server.start(memory="1MiB")
    one = engine()
    put_below(server, one, 4)
    (gate / "slow").write_text("1000")  # each read of a page takes four seconds, and more to come
    grant = one.scheduler.lookup(keys(4), 60.0, 0.5)
    assert one.wait_for(grant).lease == 0
    for seed in range(100, 108):  # everything that may be taken is taken
        one.store(100, seed)
    [group] = server.status().namespaces[0].groups
    assert group.stripes == group.slots - group.free
    counted = ("hits", "misses", "corrupt", "skipped")
    eventually(lambda: sum(tier(server).counts.get(name, 0) for name in counted) >= 4)
    for seed in range(100, 108):
        grant = one.lookup(100, seed)
        if grant.lease:
            assert one.read(grant, 0, seed) == []
            one.release(grant)
    (gate / "slow").unlink()


def test_what_a_tier_hangs_over_is_stored_and_found_again(gate, stopped_server, engine):
    """The places it may yet write to are nobody's until it returns; the chunks are anybody's at once."""
    server = stopped_server.start(memory="1MiB")
    one = engine()
    put_below(server, one, 20)
    (gate / "stall").touch()
    grant = one.scheduler.lookup(keys(20), 60.0, 3600.0)
    assert one.wait_for(grant).lease == 0, "long before its deadline"
    one.store(20)
    assert one.hit(20) == 20
    for seed in range(100, 108):  # everything that may be taken is taken
        one.store(100, seed)
    [group] = server.status().namespaces[0].groups
    assert 0 < group.slots - group.free - group.stripes <= HANDS
    (gate / "stall").unlink()

    def all_places_are_back() -> bool:
        [group] = server.status().namespaces[0].groups
        return bool(group.stripes + group.free == group.slots)

    eventually(all_places_are_back)
    for seed in (0, *range(100, 108)):
        grant = one.lookup(100, seed)
        if grant.lease:
            assert one.read(grant, 0, seed) == []
            one.release(grant)


def test_what_a_tier_hangs_over_comes_from_the_one_behind(gate, stopped_server, engine):
    stopped_server.flags["--tier"] += " memory://"
    server = stopped_server.start()
    one = engine()
    one.store(20)
    eventually(lambda: not any(one.queued for one in server.status().tiers))
    forget(server)
    (gate / "stall").touch()
    grant = one.scheduler.lookup(keys(20), 60.0, 3600.0)
    assert one.wait_for(grant).lease == 0
    grant = one.bring(20)
    assert grant.chunks == 20
    check(one, grant)
    (gate / "stall").unlink()


def test_reads_that_no_thread_has_begun_hold_no_places(gate, stopped_server, engine):
    server = stopped_server.start(hold_percent="100")
    one = engine()
    for seed in range(10):
        one.store(8, seed)
    eventually(lambda: not tier(server).queued)
    forget(server)
    (gate / "stall").touch()
    grants = [one.scheduler.lookup(keys(8, seed), 60.0, 1.0) for seed in range(10)]
    assert not any(one.wait_for(grant).lease for grant in grants)
    eventually(lambda: server.status().namespaces[0].groups[0].stripes <= HANDS)
    (gate / "stall").unlink()
    eventually(lambda: one.bring(8, seed=9).chunks == 8)
    check(one, one.bring(8, seed=9), seed=9)


def test_what_is_being_written_back_is_not_given_away(gate, stopped_server, engine):
    """A slow tier reads from the slot all the while; what it ends up with must be what was committed."""
    server = stopped_server.start(memory="1MiB")
    one = engine()
    (gate / "slow").write_text("10000")  # 0.4 s an object
    one.store(6)
    for seed in range(100, 108):  # many times what memory holds, while the first are being written
        one.store(100, seed)
    (gate / "slow").unlink()
    eventually(lambda: not tier(server).queued)
    assert tier(server).written_bytes > 0
    for seed in (0, *range(100, 108)):
        grant = one.bring(100, seed)
        if grant.lease:
            check(one, grant, seed)
    assert tier(server).counts.get("corrupt", 0) == 0
