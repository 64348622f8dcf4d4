"""Shared memory grows on demand up to the limit, moves to who needs it, and is mapped by its owners only."""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from kvcellar.arena import Arena, Rack
from kvcellar.client import Grant
from kvcellar.client.grants import granted
from kvcellar.client.slabs import fetch_slab
from kvcellar.errors import UnknownNamespace, WrongOwner
from kvcellar.identity import Group, Layer, ParallelStrategy
from kvcellar.ledger import Ledger, Room, Shelf
from kvcellar.server.members import Members
from kvcellar.server.steward import Steward
from kvcellar.wire import DESCRIPTOR, PREFIX, encode, receive_with_fd
from kvcellar.wire import messages as m
from tests.server.engine import NAMESPACES, PATIENCE, eventually
from tests.server.raw import hello
from tests.support import keys, namespace

ONE, OTHER = NAMESPACES["one"], NAMESPACES["other"]
MIB = 1 << 20


@pytest.fixture
def small(stopped_server):
    """1 MiB: room for about 230 chunks of the namespace `one`."""
    return stopped_server.start(memory="1MiB", hold_percent="100")


def memory_of(server, namespace):
    return next(one.memory_bytes for one in server.status().namespaces if one.id == namespace.id.hex())


def fill(engine, prompts=24):
    """More than there is room for; returns what the last reserve granted."""
    for seed in range(prompts):
        grant = engine.store(16, seed)
    return grant


def test_a_reserve_that_waits_for_memory_is_not_overtaken_by_what_follows_its_chunks(stopped_server, raw):
    """All of it in one write, so that no memory can have come in between; also two in one request."""
    stopped_server.start(hold_percent="100")
    wide = namespace(groups=(Group(16, (Layer("layer", 4096),)),))
    client, wanted = raw(hello()), keys(102)

    def reserve(first: int, stop: int) -> m.Reserve:
        parent = wanted[first - 1] if first else None
        return m.Reserve(wide.id, b"".join(wanted[first:stop]), parent)

    client.say(
        m.Request(1001, 10_000, (m.Register(wide),)),
        m.Request(1002, 10_000, (reserve(0, 100), reserve(100, 101))),
        m.Request(1003, 10_000, (reserve(101, 102),)),
    )
    grants: dict[int, list[Grant]] = {}
    while len(grants) < 2:
        message = client.hear()
        if isinstance(message, m.Reply) and message.id > 1001:
            grants[message.id] = [granted(result) for result in message.results]
    found = [(grant.chunks, grant.reason) for reply in sorted(grants) for grant in grants[reply]]
    assert found == [(100, ""), (1, ""), (1, "")]


def test_memory_grows_to_the_limit_and_then_the_oldest_go(small, engine):
    one = engine()
    sizes = []
    for seed in range(24):
        assert one.store(16, seed).chunks == 16
        sizes.append(small.slab_bytes())
    assert sizes == sorted(sizes)
    assert MIB // 2 < sizes[-1] <= MIB
    [group] = small.status().namespaces[0].groups
    assert group.left_by["evicted"] == 24 * 16 - group.stripes > 0
    assert small.status().memory_used == small.slab_bytes()
    assert one.read(one.lookup(16, seed=23), seed=23) == []
    assert one.hit(16, seed=0) == 0


def test_pinned_chunks_stay_however_much_is_stored(small, engine):
    one = engine()
    one.store(16, seed=1000)
    hit = one.lookup(16, seed=1000)
    fill(one)
    assert one.read(hit, seed=1000) == []


def test_one_engine_may_hold_its_share_and_no_more(stopped_server, engine):
    stopped_server.start(memory="1MiB", hold_percent="10")
    grant = engine().reserve(100)
    assert (grant.chunks, grant.reason) == (MIB // 10 // 4096, "hold_limit")


def test_a_second_namespace_gets_memory_from_an_engine_that_has_it_all(small, engine):
    rich = engine("one", session="rich")
    fill(rich)
    poor = engine("other", session="poor")
    eventually(lambda: poor.store(8).chunks == 8)
    assert poor.read(poor.lookup(8)) == []
    assert memory_of(small, OTHER) > 0
    assert small.slab_bytes() <= MIB
    assert small.status().namespaces[0].groups[0].left_by["returned"] > 0
    rich.store(16, seed=77)  # and the rich one works on with what it has left
    assert rich.read(rich.lookup(16, seed=77), seed=77) == []


def test_a_namespace_that_nobody_uses_gives_up_all_its_memory(small, engine):
    gone = engine("one", session="gone")
    fill(gone)
    gone.close()
    eventually(lambda: small.status().sessions == [])
    heir = engine("other", session="heir")
    fill(heir)
    eventually(lambda: memory_of(small, ONE) == 0)
    assert memory_of(small, OTHER) > MIB // 2
    assert small.slab_bytes() <= MIB


def test_an_engine_whose_weights_change_leaves_the_memory_of_before(small, engine):
    """Its connections stay, and what it maps of the old namespace is let go when others need it."""
    trainer = engine("one", session="trainer")
    for generation in range(6):
        made = namespace(checksum="xxh3-64", weights_generation=generation)
        trainer.change(made)
        assert trainer.hit(16) == 0
        fill(trainer)
        hit = trainer.lookup(16, seed=23)
        assert trainer.read(hit, seed=23) == []
        trainer.release(hit)
    eventually(lambda: memory_of(small, made) > MIB // 2)
    assert small.status().sessions[0].namespaces == [made.id.hex()]
    assert small.slab_bytes() <= MIB


def test_memory_of_a_stalled_engine_is_not_taken_under_its_hands(small, engine, child):
    rich = child(session="rich")
    for seed in range(24):
        rich.call("store", 16, seed)
    poor = engine("other", session="poor")
    rich.signal(signal.SIGSTOP)
    poor.store(16)
    assert small.slab_bytes() <= MIB
    rich.signal(signal.SIGCONT)
    eventually(lambda: poor.store(16, seed=2).chunks == 16)


def test_a_reserve_that_waits_for_memory_is_answered_within_its_deadline(small, engine, raw, child):
    rich = child(session="rich")
    for seed in range(24):
        rich.call("store", 16, seed)
    rich.signal(signal.SIGSTOP)
    poor = raw(hello(session="poor"))
    poor.register(OTHER)
    patient, hasty = keys(64, 1), keys(64, 2)
    poor.say(m.Request(1000, 10_000, (m.Reserve(OTHER.id, b"".join(patient)),)))
    poor.say(m.Request(1001, 50, (m.Reserve(OTHER.id, b"".join(hasty)),)))
    while not isinstance(answer := poor.hear(), m.Reply):
        pass
    assert answer.id == 1001


# -- the steward by itself


class Rig:
    """A steward with its ledger and its files, without a server."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.ledger, self.arena = Ledger(epoch=1, hold_limit=MIB), Arena(folder, MIB)
        self.steward = Steward(self.ledger, self.arena, Members(self.ledger, folder / "roster"), clock)

    async def fill(self, room: Room) -> None:
        """Make all the memory that there is."""
        while growth := self.steward.grow(room, 0, MIB):
            await growth

    async def close(self) -> None:
        await self.steward.close()
        self.arena.close()


@pytest.fixture
def alone():
    """alone(test): runs it with a rig."""
    folder = Path(tempfile.mkdtemp(prefix="kvcellar-steward-", dir="/dev/shm"))

    def run(test: Callable[[Rig], Awaitable[None]], *clock: Callable[[], float]) -> None:
        async def live() -> None:
            rig = Rig(folder, *clock)
            async with asyncio.timeout(PATIENCE):
                await test(rig)
            await rig.close()

        asyncio.run(live())

    yield run
    shutil.rmtree(folder)


def test_no_memory_is_made_for_a_namespace_that_was_forgotten(alone):
    """Its engine left, and another came, just after a tier was asked for more of it."""

    async def test(rig):
        room = rig.ledger.open_room(ONE)
        rig.steward.close_rooms()
        assert rig.steward.grow(room, 0, 1) is None
        growth = rig.steward.grow(rig.ledger.open_room(ONE), 0, 1)
        assert growth is not None
        await growth

    alone(test)


def test_where_no_rack_can_be_taken_it_is_not_looked_for_at_every_store(alone, monkeypatch):
    """To look is to look at every stripe; by this clock it takes a second."""
    looks = 0

    def idle_racks(shelf: Shelf) -> set[int]:
        nonlocal looks
        looks += 1
        return set()

    async def test(rig):
        rich, poor = rig.ledger.open_room(ONE), rig.ledger.open_room(OTHER)
        await rig.fill(rich)
        assert len(rich.shelves[0].tables) > 10
        while not looks:
            assert rig.steward.grow(poor, 0, 1) is None
        assert looks == 1, "once for all racks of a shelf"
        for _ in range(30):
            assert rig.steward.grow(poor, 0, 1) is None
        assert looks < 15

    monkeypatch.setattr(Shelf, "idle_racks", idle_racks)
    alone(test, itertools.count().__next__)


class Gate:
    """Whoever comes to it waits until it is open."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def wait(self) -> None:
        self._reached.set()
        assert threading.current_thread() is not threading.main_thread()
        assert self._open.wait(PATIENCE)

    async def reached(self) -> None:
        while not self._reached.is_set():
            await asyncio.sleep(0)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch):
    """In the way of every rack that is removed."""
    gate, remove = Gate(), Rack.remove

    def wait_and_remove(rack: Rack) -> None:
        gate.wait()
        remove(rack)

    monkeypatch.setattr(Rack, "remove", wait_and_remove)
    return gate


def test_memory_is_freed_beside_the_event_loop_and_counts_until_it_is(alone, gate):
    async def test(rig):
        rich, poor = rig.ledger.open_room(ONE), rig.ledger.open_room(OTHER)
        await rig.fill(rich)
        used = rig.arena.used
        taking = rig.steward.grow(poor, 0, 1)
        assert taking is not None
        await gate.reached()
        assert rig.steward.grow(poor, 0, 1) is taking, "one rack is enough"
        assert rig.arena.used == used
        gate.open()
        await taking
        assert rig.arena.used < used
        await rig.steward.grow(poor, 0, 1)
        assert poor.shelves[0].free_slots

    alone(test)


def test_a_server_that_stops_while_memory_is_freed_leaves_its_folder_in_order(alone, gate):
    async def stop(rig):
        rich, poor = rig.ledger.open_room(ONE), rig.ledger.open_room(OTHER)
        await rig.fill(rich)
        assert rig.steward.grow(poor, 0, 1)
        await gate.reached()
        rig.steward.draining = True
        gate.open()

    async def adopt(rig):
        rig.steward.adopt()
        assert rig.arena.refused == 0
        assert rig.arena.used == sum(path.stat().st_size for path in rig.arena.folder.glob("*/g*"))

    alone(stop)
    alone(adopt)


# -- who may map a slab


def test_memory_leaves_descriptors_for_connections(stopped_server, raw):
    """Of a namespace with many shards, each rack of which is as many files."""
    stopped_server.wrapper = ["prlimit", "--nofile=256:512"]
    server = stopped_server.start()
    wide = namespace(parallel=ParallelStrategy(tp=32))
    raw(hello()).register(wide)
    eventually(lambda: server.status().counts.get("growth_refused"))
    assert memory_of(server, wide) > MIB
    for number in range(40):  # each is a socket and the pidfd of its process
        raw(hello(session=f"engine {number}"))
    assert len(os.listdir(f"/proc/{server.pid}/fd")) > 256


def test_a_slab_is_given_to_the_process_of_a_rank_that_registered_its_namespace(server, engine, raw):
    engine("one", session="owner").store(1)
    raw(hello("worker", session="owner-too")).register(ONE)
    assert fetch_slab(server.socket, "owner-too", 0, ONE.id, 0, 0).shape.slot_bytes == 4096
    raw(hello("worker", session="stranger")).register(OTHER)
    with pytest.raises(UnknownNamespace):
        fetch_slab(server.socket, "stranger", 0, ONE.id, 0, 0)
    with pytest.raises(UnknownNamespace, match="no rack 999"):
        fetch_slab(server.socket, "owner-too", 0, ONE.id, 0, 999)
    for session, rank in (("nobody", 0), ("owner-too", 1)):
        with pytest.raises(WrongOwner, match="attach as this rank first"):
            fetch_slab(server.socket, session, rank, ONE.id, 0, 0)


def test_a_slab_is_not_given_to_another_process_that_knows_the_session(server, child):
    child(session="owner").call("store", 1)
    with pytest.raises(WrongOwner, match="from the same process"):
        fetch_slab(server.socket, "owner", 0, ONE.id, 0, 0)


def ask_for_a_slab(server, question):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10.0)
        sock.connect(str(server.socket))
        sock.sendall(DESCRIPTOR + question)
        data, fd = receive_with_fd(sock, 4096)
    return msgspec.msgpack.decode(data[PREFIX:], type=m.DescriptorAnswer), fd


def test_a_question_that_is_none_is_refused(server):
    question = encode(m.FetchSlab(m.PROTOCOL_VERSION, "name", 0, ONE.id, 0, 0))
    old = encode(m.FetchSlab(0, "name", 0, ONE.id, 0, 0))
    junk = [b"\x05\0\0\0junk!", (5000).to_bytes(4, "little"), question.replace(b"name", b"\xff\xfe\xfd\xfc")]
    for asked, code in [*((one, "bad_request") for one in junk), (old, "version_mismatch")]:
        answer, fd = ask_for_a_slab(server, asked)
        assert (answer.code, fd) == (code, None)


def test_descriptors_do_not_leak_into_children(server, raw):
    raw(hello("worker")).register(ONE)
    question = encode(m.FetchSlab(m.PROTOCOL_VERSION, "raw", 0, ONE.id, 0, 0))
    eventually(lambda: server.status().namespaces[0].groups[0].racks)
    answer, fd = ask_for_a_slab(server, question)
    assert isinstance(answer, m.SlabSent)
    assert not os.get_inheritable(fd)
    os.close(fd)
    for entry in Path(f"/proc/{server.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while we look
            target = str(entry.readlink())
            info = (Path(f"/proc/{server.pid}/fdinfo") / entry.name).read_text()
            flags = next(line.split()[1] for line in info.splitlines() if line.startswith("flags"))
            ours = target.startswith(("/dev/shm", "socket:", "anon_inode:[pidfd]"))
            assert not ours or int(flags, 8) & os.O_CLOEXEC, target


def test_nobody_else_can_open_what_the_server_keeps(server, engine):
    engine().store(1)
    modes = {path.stat().st_mode & 0o777 for path in server.folder.rglob("*") if path.is_dir()}
    assert modes == {0o700}
    assert server.folder.stat().st_mode & 0o777 == 0o700
    files = [path for path in server.folder.rglob("*") if path.suffix in (".slab", ".table")]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert server.socket.stat().st_mode & 0o777 == 0o600
