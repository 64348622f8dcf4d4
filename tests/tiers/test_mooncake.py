"""A real Mooncake Store: master and two segments, in a network namespace of their own."""

import mmap
import os
import sys
from collections.abc import Callable, Iterator

import pytest

from kvcellar.errors import ConfigError, EngineError
from kvcellar.tiers import Buffer
from kvcellar.tiers.mooncake import MooncakeEngine, _address, open_mooncake
from tests.server.engine import eventually
from tests.tiers.conformance import MIB, buffer, name_of, same
from tests.tiers.remote import NAME, RemoteConformance, answers, every_call, round_trip
from tools import backends

LATE = name_of(4)
PATIENCE = "20"  # seconds for what must work


@pytest.fixture(scope="module")
def mooncake(needs_backends: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[backends.Mooncake]:
    if os.geteuid():
        pytest.skip("Mooncake listens on all interfaces, and a network of its own needs root")
    sys.path.append(str(backends.install()))  # has Mooncake's client
    with (
        backends.private_network(),
        backends.Mooncake(tmp_path_factory.mktemp("mooncake"), 512 * MIB) as store,
    ):
        yield store


@pytest.fixture
def opened(mooncake: backends.Mooncake) -> Iterator[Callable[..., MooncakeEngine]]:
    made: list[MooncakeEngine] = []

    def open_one(url: str = mooncake.url, **options: str) -> MooncakeEngine:
        made.append(open_mooncake(url, {"timeout": PATIENCE} | options))
        return made[-1]

    yield open_one
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def janitor(mooncake: backends.Mooncake) -> Iterator[MooncakeEngine]:
    engine = open_mooncake(mooncake.url, {"timeout": PATIENCE})
    yield engine
    engine.close()


@pytest.fixture
def empty(janitor: MooncakeEngine) -> None:
    eventually(answers(janitor))  # the master may be another one
    assert janitor.store.remove_all(True) >= 0  # by force: also what was read a moment ago


@pytest.fixture
def engine(empty: None, opened: Callable[..., MooncakeEngine]) -> MooncakeEngine:
    return opened()


@pytest.fixture
def hasty(opened: Callable[..., MooncakeEngine]) -> MooncakeEngine:
    """For calls that nobody answers."""
    return opened(timeout="1")


class TestMooncake(RemoteConformance):
    @pytest.fixture
    def make(self, empty, opened):
        return opened


# -- memory ---------------------------------------------------------------------------------------------


def test_a_slab_is_registered_once_and_let_go_when_it_is_forgotten(engine):
    slab = memoryview(mmap.mmap(-1, 20 * MIB))
    source = buffer(9 * MIB, seed=1)
    engine.write(NAME, source)
    for _ in range(2):  # forgotten memory may come back
        for start in (0, 10 * MIB):
            slot = slab[start + 4096 : start + 4096 + 9 * MIB]
            target = Buffer(slab[start + 64 : start + 128], slot, 9 * MIB, slab)
            assert engine.read(NAME, target)
            assert same(source, target)
        assert engine.store.register_buffer(_address(slab), len(slab)) < 0  # is there already
        engine.forget(slab)
        assert engine.store.register_buffer(_address(slab), len(slab)) == 0
        engine.store.unregister_buffer(_address(slab))
        engine.forget(slab)


def test_memory_that_is_registered_cannot_be_unmapped(engine):
    memory = mmap.mmap(-1, 4 * MIB)
    slab = memoryview(memory)
    engine.write(NAME, Buffer(slab[:64], slab[4096 : 4096 + MIB], MIB, slab))
    slab.release()
    with pytest.raises(BufferError):
        memory.close()
    engine.forget(memoryview(memory))


# -- faults ---------------------------------------------------------------------------------------------


def test_nobody_there_is_said(mooncake, opened):
    with pytest.raises(EngineError, match="is mooncake_master running there, and is the port right"):
        opened("mooncake://127.0.0.1:1")


def test_a_paused_master_is_an_error_in_time_and_heals(mooncake, engine, hasty):
    assert round_trip(engine, 1000)
    mooncake.master.pause()
    try:
        for call in every_call(hasty).values():
            with pytest.raises(EngineError, match=r"did not answer|does not answer"):
                call()
    finally:
        mooncake.master.resume()
    eventually(answers(hasty))
    assert round_trip(engine, 9 * MIB)


def test_paused_segments_are_an_error_in_time_and_nothing_arrives_late(mooncake, engine, hasty):
    assert round_trip(engine, 9 * MIB, LATE)
    target = buffer(9 * MIB)
    assert hasty.read(LATE, target)  # Mooncake's own patience is endless where it has never talked to a host
    for segment in mooncake.segments:
        segment.pause()
    try:
        with pytest.raises(EngineError, match="the host that lends this memory did not answer"):
            hasty.read(LATE, target)
    finally:
        for segment in mooncake.segments:
            segment.resume()
    target.payload[:] = b"\x55" * target.size  # somebody else's by now
    eventually(lambda: _reads(hasty))
    assert target.payload == b"\x55" * target.size


def _reads(engine: MooncakeEngine) -> bool:
    try:
        return engine.read(LATE, buffer(9 * MIB))
    except EngineError:
        return False


def test_a_full_store_makes_room(mooncake, engine):
    """Two segments of 512 MiB: writes go on, the oldest are misses."""
    sources = [buffer(64 * MIB, seed=number) for number in range(2)]
    for number in range(24):

        def written(number: int = number) -> bool:
            try:
                engine.write(name_of(number), sources[number % 2])
            except EngineError:
                return False  # it is still making room
            return True

        eventually(written)
    there = engine.exist([name_of(number) for number in range(24)])
    assert there[23]
    assert not all(there)
    engine.delete([name_of(number) for number in range(24)])


def test_a_killed_master_is_an_error_and_restarted_empty_is_a_miss(mooncake, engine, hasty):
    assert round_trip(engine, 9 * MIB, name_of(3))
    mooncake.master.kill()
    try:
        for call in every_call(hasty).values():
            with pytest.raises(EngineError, match="is mooncake_master running"):
                call()
    finally:
        mooncake.master.start()
    eventually(answers(hasty))
    assert not hasty.read(name_of(3), buffer(9 * MIB))
    eventually(lambda: _heals(hasty))


def _heals(engine: MooncakeEngine) -> bool:
    """When its segments have found the new master."""
    try:
        return round_trip(engine, 1000)
    except EngineError:
        return False


def test_a_killed_segment_costs_its_own_objects_alone(mooncake, engine, hasty):
    """The last: the segment does not come back under its name at once."""
    names = [name_of(number) for number in range(12)]
    for number, name in enumerate(names):
        engine.write(name, buffer(MIB, seed=number))
    mooncake.segments[0].kill()
    outcomes = []
    for number, name in enumerate(names):
        target = buffer(MIB)
        try:
            outcomes.append(hasty.read(name, target) and same(buffer(MIB, seed=number), target))
        except EngineError:
            outcomes.append(False)
    assert any(outcomes)
    assert not all(outcomes)


@pytest.mark.parametrize(
    ("url", "options", "problem"),
    [
        ("mooncake://a:1,b:2", {}, "one mooncake_master"),
        ("mooncake://a:1/x", {}, "nothing after it"),
        ("mooncake://user@a:1", {}, "holds no user and password"),
        ("mooncake://a:1", {"protocol": "carrier-pigeon"}, "should match tcp|rdma"),
        ("mooncake://a:1", {"replicas": "2"}, "unknown option 'replicas'"),
        ("mooncake://", {}, "should be HOST:PORT"),
    ],
)
def test_bad_settings_are_refused(url, options, problem):
    with pytest.raises(ConfigError, match=problem):
        open_mooncake(url, options)
