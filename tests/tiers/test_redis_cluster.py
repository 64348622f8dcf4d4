"""A real cluster of three masters: sharing, redirection, and life with a part of it gone."""

import asyncio
from collections.abc import Callable

import pytest
from redis.crc import key_slot

from kvcellar.tiers import EngineError, redis_nodes
from kvcellar.tiers.redis import RedisEngine
from kvcellar.tiers.tier import Tier
from tests.server.engine import PATIENCE, eventually
from tests.tiers.conformance import MIB, buffer, same
from tests.tiers.remote import RemoteConformance
from tools.backends import Valkey, ValkeyCluster

LARGE = 32 * MIB


@pytest.fixture
def engine(cluster: ValkeyCluster, opened: Callable[..., RedisEngine]) -> RedisEngine:
    for node in cluster.nodes:
        node.say("FLUSHALL")
    return opened(cluster.url)


class TestCluster(RemoteConformance):
    @pytest.fixture
    def make(self, cluster, opened):
        for node in cluster.nodes:
            node.say("FLUSHALL")
        return lambda: opened(cluster.url)


def name_in(cluster: ValkeyCluster, number: int, nth: int = 0) -> str:
    """A name whose key belongs to that node, while slots are divided as at the start."""
    first, last = cluster.RANGES[number]
    names = (f"ns/{candidate}" for candidate in range(10_000))
    return [name for name in names if first <= key_slot(f"kvcellar:{name}".encode()) <= last][nth]


def move_slot(cluster: ValkeyCluster, slot: int, target: Valkey) -> None:
    identity = target.say("CLUSTER", "MYID").split(b"\r\n")[1].decode()
    for node in (target, *cluster.nodes):
        cluster.expect_ok(node, "CLUSTER", "SETSLOT", str(slot), "NODE", identity)


def identity(node: Valkey) -> str:
    return node.say("CLUSTER", "MYID").split(b"\r\n")[1].decode()


def test_parts_lie_on_all_nodes(cluster, engine):
    engine.write("ns/large", buffer(LARGE, seed=1))
    assert all(int(node.say("DBSIZE")[1:]) >= 2 for node in cluster.nodes)
    engine.delete(["ns/large"])
    assert all(node.say("DBSIZE") == b":0\r\n" for node in cluster.nodes)


def test_one_seed_is_enough_and_dead_seeds_are_passed_over(cluster, engine, opened):
    engine.write("ns/shared", buffer(1000, seed=1))
    other = opened(f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster.nodes[2].port}")
    target = buffer(1000)
    assert other.read("ns/shared", target)
    assert same(buffer(1000, seed=1), target)


def test_a_slot_that_moved_is_followed_and_remembered(cluster, engine):
    name = name_in(cluster, 0)
    slot = key_slot(f"kvcellar:{name}".encode())
    engine.write("ns/large", buffer(LARGE, seed=1))
    try:
        move_slot(cluster, slot, cluster.nodes[1])
        engine.write(name, buffer(3 * MIB, seed=1))
        assert cluster.nodes[1].say("EXISTS", f"kvcellar:{name}") == b":1\r\n"
        target = buffer(3 * MIB)
        assert engine.read(name, target)
        assert same(buffer(3 * MIB, seed=1), target)
        assert engine.exist([name, "ns/large", name]) == [True, True, True]
        engine.delete([name])
        assert engine.exist([name]) == [False]
    finally:
        move_slot(cluster, slot, cluster.nodes[0])


def test_a_slot_on_its_way_is_asked_for_at_both_ends(cluster, engine):
    source, target_node = cluster.nodes[0], cluster.nodes[1]
    name = name_in(cluster, 0)
    slot = str(key_slot(f"kvcellar:{name}".encode()))
    cluster.expect_ok(target_node, "CLUSTER", "SETSLOT", slot, "IMPORTING", identity(source))
    cluster.expect_ok(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", identity(target_node))
    try:
        engine.write(name, buffer(3 * MIB, seed=1))  # not at the source, so it is the other's already
        assert source.say("EXISTS", f"kvcellar:{name}").startswith(b"-ASK ")
        target = buffer(3 * MIB)
        assert engine.read(name, target)
        assert same(buffer(3 * MIB, seed=1), target)
        assert engine.exist([name]) == [True]
        engine.delete([name])
        assert engine.exist([name]) == [False]
    finally:
        for node in (source, target_node):
            cluster.expect_ok(node, "CLUSTER", "SETSLOT", slot, "STABLE")


def test_a_missing_slot_range_is_said_and_the_rest_stays_usable(cluster, engine, opened):
    lost, kept = name_in(cluster, 2), name_in(cluster, 0)
    first, last = map(str, cluster.RANGES[2])
    engine.write(kept, buffer(1000, seed=1))

    def lost_by_all() -> bool:
        """A node that still claims them would tell the others."""
        for node in reversed(cluster.nodes):
            node.say("CLUSTER", "DELSLOTSRANGE", first, last)
        states = [node.say("CLUSTER", "INFO") for node in cluster.nodes]
        return all(b"cluster_slots_assigned:10923" in state for state in states)

    eventually(lost_by_all)
    try:
        with pytest.raises(
            EngineError, match=r"5461 of 16384 slots of the cluster have no node .*--cluster fix"
        ):
            opened(cluster.url)
        with pytest.raises(EngineError, match=r"slots|cluster-require-full-coverage|Hash slot"):
            engine.write(lost, buffer(1000, seed=1))
        assert engine.read(kept, buffer(1000))
    finally:
        cluster.expect_ok(cluster.nodes[2], "CLUSTER", "ADDSLOTSRANGE", first, last)
    eventually(cluster.formed)

    def heals() -> bool:
        try:
            engine.write(lost, buffer(1000, seed=1))
        except EngineError:
            return False
        return all(engine.exist([lost, kept]))

    eventually(heals)


def test_a_paused_node_costs_its_own_keys_alone(cluster, opened, monkeypatch):
    engine = opened(cluster.url, timeout="5")
    names = [name_in(cluster, number) for number in range(3)]
    for name in names:
        engine.write(name, buffer(1000, seed=1))
    monkeypatch.setattr(redis_nodes, "_REST_S", 60.0)
    cluster.nodes[0].pause()
    try:
        with pytest.raises(EngineError, match="did not answer in time"):
            engine.read(names[0], buffer(1000))
        with pytest.raises(EngineError, match="a moment ago"):  # and this one costs nothing
            engine.read(names[0], buffer(1000))
        assert engine.exist(names) == [False, True, True]
        for name in names[1:]:
            assert engine.read(name, buffer(1000))
    finally:
        cluster.nodes[0].resume()
        monkeypatch.undo()

    def heals() -> bool:
        try:
            return all(engine.exist(names))
        except EngineError:
            return False

    eventually(heals)
    eventually(cluster.formed)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_node_that_falls_silent_costs_the_others_no_answer(cluster, opened, number):
    """Nor is any of them taken for silent: they are heard, whatever the order in which they are asked."""
    engine = opened(cluster.url, timeout="3")
    names = [name_in(cluster, node) for node in range(3)]
    for name in names:
        engine.write(name, buffer(1000, seed=1))
    cluster.nodes[number].pause()
    try:
        assert engine.exist(names) == [node != number for node in range(3)]
        others = [name for node, name in enumerate(names) if node != number]
        assert all(engine.read(name, buffer(1000)) for name in others)
    finally:
        cluster.nodes[number].resume()
    eventually(lambda: all(engine.exist(names)))
    eventually(cluster.formed)


def test_a_node_that_falls_silent_when_it_is_asked_for_the_map_costs_the_others_no_answer(
    cluster, opened, monkeypatch
):
    engine = opened(cluster.url, timeout="3")
    names = [name_in(cluster, node) for node in range(3)]
    for name in names:
        engine.write(name, buffer(1000, seed=1))
    monkeypatch.setattr(redis_nodes, "_REST_S", 0.0)
    engine._nodes.fetch_soon()
    cluster.nodes[0].pause()
    try:
        assert engine.exist(names) == [False, True, True]
    finally:
        cluster.nodes[0].resume()
    eventually(lambda: all(engine.exist(names)))
    eventually(cluster.formed)


def test_a_node_that_has_lost_its_memory_of_the_cluster_costs_its_own_keys_alone(
    needs_backends, tmp_path, opened, monkeypatch
):
    """It comes back under its address, and knows of no slots and no other node."""
    monkeypatch.setattr(redis_nodes, "_REST_S", 0.0)
    with ValkeyCluster(tmp_path) as cluster:
        engine = opened(cluster.url)
        names = [name_in(cluster, number) for number in (1, 0, 2)]
        for name in names:
            engine.write(name, buffer(1000, seed=1))
        cluster.nodes[0].kill()
        with pytest.raises(EngineError, match="is the server running"):
            engine.read(names[1], buffer(1000))
        cluster.nodes[0].start()
        for _ in range(2):
            assert engine.exist(names) == [True, False, True]
        # The others may have noticed, by their own gossip, that it is another now.
        with pytest.raises(EngineError, match=r"CLUSTERDOWN|slots of the cluster have no node"):
            engine.read(names[1], buffer(1000))
        asyncio.run(live_without_a_node(engine, names))


def test_a_node_that_redirects_is_no_single_server(cluster, opened):
    single = opened(f"redis://127.0.0.1:{cluster.nodes[0].port}")
    with pytest.raises(EngineError, match=r"use redis\+cluster:// in the URL"):
        single.write(name_in(cluster, 1), buffer(1000, seed=1))


def test_a_killed_node_costs_fast_errors_and_its_own_keys_alone(cluster, opened):
    """The last: the cluster does not come back from this."""
    engine = opened(cluster.url)
    names = [name_in(cluster, number) for number in range(3)]
    for name in names:
        engine.write(name, buffer(1000, seed=1))
    cluster.nodes[1].kill()
    with pytest.raises(EngineError, match="is the server running"):
        engine.read(names[1], buffer(1000))
    for name in (names[0], names[2]):
        assert engine.read(name, buffer(1000))
    assert engine.exist(names) == [True, False, True]
    with pytest.raises(EngineError, match="is the server running"):
        engine.exist([names[1]])
    with pytest.raises(EngineError, match="is the server running"):
        engine.write("ns/large", buffer(LARGE, seed=1))
    asyncio.run(live_without_a_node(engine, names))
    with pytest.raises(EngineError, match="is the server running"):
        opened(cluster.url)


async def live_without_a_node(engine: RedisEngine, names: list[str]) -> None:
    """What the server sees of it: a tier that is up, and misses."""
    tier = Tier("cluster", lambda: engine)
    await tier.start(PATIENCE)
    assert await tier.exist(names) == [True, False, True]
    for _ in range(4):
        assert not await tier.read(names[1], buffer(1000), lambda _: True)
        assert not await tier.write(names[1], buffer(1000, seed=1))
        assert not any(await tier.exist([names[1]]))
    assert tier.state == ("up", "")
    assert tier.stats.counts["errors"] == 12
    for name in (names[0], names[2]):
        assert await tier.read(name, buffer(1000), lambda _: True)
        assert await tier.write(name, buffer(1000, seed=1))
    tier.close()
