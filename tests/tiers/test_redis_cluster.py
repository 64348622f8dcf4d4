"""A real cluster of three masters: sharing, redirection, and life with a part of it gone."""

from collections.abc import Callable, Iterator

import pytest
from redis.crc import key_slot

from kvcellar.tiers import EngineError
from kvcellar.tiers.redis import RedisEngine, open_redis
from tests.server.engine import eventually
from tests.tiers.memory import same
from tests.tiers.suite import MIB, EngineSuite
from tools.backends import Valkey, ValkeyCluster

LARGE = 32 * MIB


@pytest.fixture
def opened() -> Iterator[Callable[..., RedisEngine]]:
    made: list[RedisEngine] = []

    def open_one(url: str, **options: str) -> RedisEngine:
        made.append(open_redis(url, options))
        return made[-1]

    yield open_one
    for engine in made:
        engine.close()


@pytest.fixture
def engine(cluster: ValkeyCluster, opened: Callable[..., RedisEngine]) -> RedisEngine:
    for node in cluster.nodes:
        node.say("FLUSHALL")
    return opened(cluster.url)


class TestCluster(EngineSuite):
    pass


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


def test_parts_lie_on_all_nodes(cluster, engine, arena):
    engine.write("ns/large", arena.value(LARGE))
    assert all(int(node.say("DBSIZE")[1:]) >= 2 for node in cluster.nodes)
    engine.delete(["ns/large"])
    assert all(node.say("DBSIZE") == b":0\r\n" for node in cluster.nodes)


def test_one_seed_is_enough_and_dead_seeds_are_passed_over(cluster, engine, opened, arena):
    engine.write("ns/shared", arena.value(1000))
    other = opened(f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster.nodes[2].port}")
    target = arena.buffer(1000)
    assert other.read("ns/shared", target)
    assert same(arena.value(1000), target)


def test_a_slot_that_moved_is_followed_and_remembered(cluster, engine, arena):
    name = name_in(cluster, 0)
    slot = key_slot(f"kvcellar:{name}".encode())
    engine.write("ns/large", arena.value(LARGE))
    try:
        move_slot(cluster, slot, cluster.nodes[1])
        engine.write(name, arena.value(3 * MIB))
        assert cluster.nodes[1].say("EXISTS", f"kvcellar:{name}") == b":1\r\n"
        target = arena.buffer(3 * MIB)
        assert engine.read(name, target)
        assert same(arena.value(3 * MIB), target)
        assert engine.exist([name, "ns/large", name]) == [True, True, True]
        assert name in dict(engine.list())
        engine.delete([name])
        assert engine.exist([name]) == [False]
    finally:
        move_slot(cluster, slot, cluster.nodes[0])


def test_a_slot_on_its_way_is_asked_for_at_both_ends(cluster, engine, arena):
    source, target_node = cluster.nodes[0], cluster.nodes[1]
    name = name_in(cluster, 0)
    slot = str(key_slot(f"kvcellar:{name}".encode()))
    cluster.expect_ok(target_node, "CLUSTER", "SETSLOT", slot, "IMPORTING", identity(source))
    cluster.expect_ok(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", identity(target_node))
    try:
        engine.write(name, arena.value(3 * MIB))  # not at the source, so it is the other's already
        assert source.say("EXISTS", f"kvcellar:{name}").startswith(b"-ASK ")
        target = arena.buffer(3 * MIB)
        assert engine.read(name, target)
        assert same(arena.value(3 * MIB), target)
        assert engine.exist([name]) == [True]
        engine.delete([name])
        assert engine.exist([name]) == [False]
    finally:
        for node in (source, target_node):
            cluster.expect_ok(node, "CLUSTER", "SETSLOT", slot, "STABLE")


def test_a_missing_slot_range_is_said_and_the_rest_stays_usable(cluster, engine, opened, arena):
    lost, kept = name_in(cluster, 2), name_in(cluster, 0)
    first, last = map(str, cluster.RANGES[2])
    engine.write(kept, arena.value(1000))
    for node in cluster.nodes:
        node.say("CLUSTER", "DELSLOTSRANGE", first, last)
    try:
        with pytest.raises(
            EngineError, match=r"5461 of 16384 slots of the cluster have no node .*--cluster fix"
        ):
            opened(cluster.url)
        with pytest.raises(EngineError, match=r"slots|cluster-require-full-coverage|Hash slot"):
            engine.write(lost, arena.value(1000))
        assert engine.read(kept, arena.buffer(1000))
    finally:
        cluster.expect_ok(cluster.nodes[2], "CLUSTER", "ADDSLOTSRANGE", first, last)
    eventually(cluster.formed)

    def heals() -> bool:
        try:
            engine.write(lost, arena.value(1000))
        except EngineError:
            return False
        return all(engine.exist([lost, kept]))

    eventually(heals)


def test_a_paused_node_costs_its_own_keys_alone(cluster, opened, arena):
    engine = opened(cluster.url, timeout="0.4")
    names = [name_in(cluster, number) for number in range(3)]
    for name in names:
        engine.write(name, arena.value(1000))
    cluster.nodes[0].pause()
    try:
        with pytest.raises(EngineError, match="did not answer in time"):
            engine.read(names[0], arena.buffer(1000))
        with pytest.raises(EngineError, match="a moment ago"):  # and this one costs nothing
            engine.exist(names)
        for name in names[1:]:
            assert engine.read(name, arena.buffer(1000))
    finally:
        cluster.nodes[0].resume()

    def heals() -> bool:
        try:
            return all(engine.exist(names))
        except EngineError:
            return False

    eventually(heals)
    eventually(cluster.formed)


def test_a_node_that_redirects_is_no_single_server(cluster, opened, arena):
    single = opened(f"redis://127.0.0.1:{cluster.nodes[0].port}")
    with pytest.raises(EngineError, match=r"use redis\+cluster:// in the URL"):
        single.write(name_in(cluster, 1), arena.value(1000))


def test_a_killed_node_costs_fast_errors_and_its_own_keys_alone(cluster, opened, arena):
    """The last: the cluster does not come back from this."""
    engine = opened(cluster.url)
    names = [name_in(cluster, number) for number in range(3)]
    for name in names:
        engine.write(name, arena.value(1000))
    cluster.nodes[1].kill()
    with pytest.raises(EngineError, match="is the server running"):
        engine.read(names[1], arena.buffer(1000))
    for name in (names[0], names[2]):
        assert engine.read(name, arena.buffer(1000))
    with pytest.raises(EngineError, match="is the server running"):
        engine.write("ns/large", arena.value(LARGE))
    with pytest.raises(EngineError, match="is the server running"):
        opened(cluster.url)
