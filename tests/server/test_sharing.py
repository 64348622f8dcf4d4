"""Engines share what they stored, byte for byte, and nobody is given bytes that are wrong."""

import itertools
import os

import pytest

from kvcellar.client import WorkerClient
from kvcellar.errors import Unavailable
from kvcellar.slab import NO_PLACE, SlabShape, rack_of, slot_of
from tests.server.engine import eventually


def test_a_process_reads_what_another_stored(server, child):
    writer, reader = child(session="a"), child(session="b")
    writer.call("store", 8)
    hit = reader.call("lookup", 8)
    assert hit.chunks == 8
    assert reader.call("read", hit) == []
    reader.call("release", hit)
    assert server.leases() == 0
    counts = server.session("b").counts
    assert [counts[name] for name in ("lookups", "asked_chunks", "hit_chunks")] == [1, 8, 8]


def test_a_prefix_is_shared_as_far_as_it_is_there(server, engine):
    writer, reader = engine(session="a"), engine(session="b")
    writer.store(5)
    hit = reader.lookup(8)
    assert hit.chunks == 5
    assert reader.read(hit) == []
    assert reader.lookup(8, seed=1).chunks == 0


def test_nothing_is_found_before_its_commit(server, engine):
    writer, reader = engine(session="a"), engine(session="b")
    grant = writer.reserve(4)
    writer.write(grant)
    assert reader.hit(4) == 0
    writer.commit(grant)
    assert reader.hit(4) == 4


def test_two_engines_that_compute_the_same_store_it_once(server, engine):
    first, second = engine(session="a"), engine(session="b")
    grant = first.reserve(4)
    assert second.reserve(4).lease == 0  # somebody is on it
    first.write(grant)
    first.commit(grant)
    assert second.reserve(4).lease == 0  # it is there
    assert second.reserve(6).places[0][:4].tolist() == [NO_PLACE] * 4


def test_a_longer_prompt_stores_only_what_is_new(server, engine):
    one = engine()
    one.store(4)
    grant = one.store(6)
    assert (grant.places[0] != NO_PLACE).tolist() == [False] * 4 + [True] * 2
    assert one.read(one.lookup(6)) == []


def test_engines_of_other_namespaces_do_not_meet(server, engine):
    engine("one", session="a").store(4)
    assert engine("other", session="b").hit(4) == 0


# -- several ranks


def test_mla_on_two_ranks_stores_one_object_per_chunk_and_both_read_it(server, engine):
    mla = engine("mla")
    mla.store(4)
    [group] = server.status().namespaces[0].groups
    assert (group.stripes, group.slot_bytes, mla.writers) == (4, [4096], [0])
    hit = mla.lookup(4)
    assert server.session().held_bytes == 4 * 4096
    assert [mla.read(hit, rank) for rank in (0, 1)] == [[], []]
    mla.release(hit, 0)
    assert server.leases() == 1  # rank 1 has its share still
    mla.release(hit, 1)
    assert server.leases() == 0


def test_four_engines_of_two_ranks_are_two_readers_per_lookup(server, engine):
    engines = [engine("mla", session=name) for name in "abcd"]
    engines[0].store(2)
    hit = engines[3].lookup(2)
    engines[3].release(hit, 0)
    engines[3].release(hit, 1)
    assert server.leases() == 0


def test_heads_on_two_ranks_store_an_object_each(server, engine):
    heads = engine("tp2")
    grant = heads.reserve(4)
    heads.write(grant)
    heads.workers[0].commit(grant.lease, 0, 4)
    heads.flush()
    assert heads.hit(4) == 0  # one shard is missing
    heads.workers[1].commit(grant.lease, 0, 4)
    heads.flush()
    hit = heads.lookup(4)
    assert [heads.read(hit, rank) for rank in (0, 1)] == [[], []]
    assert server.status().namespaces[0].groups[0].slot_bytes == [4096, 4096]


def test_one_rank_that_aborts_aborts_the_chunk(server, engine):
    heads = engine("tp2")
    grant = heads.reserve(4)
    heads.workers[0].commit(grant.lease, 0, 4)
    heads.workers[1].commit(grant.lease, 0, 2)
    heads.workers[1].abort(grant.lease, 2, 4)
    heads.flush()
    assert heads.hit(4) == 2
    assert server.status().namespaces[0].groups[0].left_by == {"aborted": 2}


def test_a_window_group_needs_only_its_last_chunks(server, engine):
    hybrid = engine("hybrid", session="a")
    hybrid.store(6, groups=[0])
    assert hybrid.hit(6) == 0
    hybrid.store(6, groups=[1])
    hit = engine("hybrid", session="b").lookup(6)
    assert hit.chunks == 6
    assert (hit.places[0] != NO_PLACE).tolist() == [True] * 6
    assert (hit.places[1] != NO_PLACE).tolist() == [False] * 4 + [True] * 2
    assert hybrid.read(hybrid.lookup(6)) == []


# -- bad bytes


def flip_a_bit(server, namespace, hit, chunk):
    place = hit.places[0][chunk]
    path = server.folder / namespace.id.hex() / f"g0-r{rack_of(place)}-s0.slab"
    shapes = (SlabShape(slots, 4096) for slots in itertools.count(1))
    offset = (
        next(one for one in shapes if one.file_bytes == path.stat().st_size).header_bytes
        + slot_of(place) * 4096
        + 1000
    )
    descriptor = os.open(path, os.O_RDWR)
    os.pwrite(descriptor, bytes([os.pread(descriptor, 1, offset)[0] ^ 4]), offset)
    os.close(descriptor)


def test_a_flipped_bit_is_noticed_condemned_counted_and_not_found_again(server, engine):
    one = engine()
    one.store(4)
    hit = one.lookup(4)
    flip_a_bit(server, one.namespace, hit, 2)
    assert one.read(hit) == [(0, 2)]
    one.workers[0].condemn(hit.lease, 0, 2)
    one.release(hit)
    assert one.hit(4) == 2
    status = server.status()
    assert status.counts["corrupt"] == 1
    assert status.namespaces[0].groups[0].left_by == {"corrupt": 1}
    one.store(4)
    assert one.read(one.lookup(4)) == []


# -- giving back


def test_a_part_given_back_leaves_the_rest_pinned(server, engine):
    one = engine()
    one.store(4)
    hit = one.lookup(4)
    one.scheduler.release(hit.lease, 0, 2)  # the engine has these already
    one.scheduler.flush()
    assert one.hit(1) == 1  # also: the release has been answered
    assert server.session().held_bytes == 2 * 4096
    one.workers[0].release(hit.lease, 2, 4)
    one.flush()
    assert server.session().held_bytes == 0


def test_giving_back_twice_touches_nobody(server, engine):
    one, other = engine(session="a"), engine(session="b")
    one.store(4)
    mine, theirs = one.lookup(4), other.lookup(4)
    one.release(mine)
    one.release(mine)
    assert [server.session(name).leases for name in "ab"] == [0, 1]
    assert other.read(theirs) == []


def test_a_second_commit_changes_nothing(server, engine):
    one = engine()
    grant = one.store(4)
    one.commit(grant)
    assert server.session().counts["committed"] == 4
    assert one.read(one.lookup(4)) == []


def test_an_empty_prompt_is_a_miss_and_costs_nothing(server, engine):
    one = engine()
    assert one.lookup(0).chunks == 0
    assert one.reserve(0).lease == 0
    one.store(2)
    assert one.hit(2) == 2
    assert server.session().connected == [-1, 0]


def test_a_prompt_longer_than_a_lookup_may_be_is_cut(server, engine):
    one = engine()
    one.store(4)
    assert one.hit(70_000) == 4
    assert one.reserve(70_000, seed=1).chunks == 2048  # half of the memory: all that one engine may hold
    assert server.session().connected == [-1, 0]


def test_a_rank_copies_nothing_on_the_word_of_what_was_granted_before_it_attached(server, engine):
    """By attaching it gave up its share: somebody else may have the places by now."""
    one = engine(ranks=[])
    written = one.reserve(4)
    one.workers[0] = WorkerClient(server.socket, "engine", 0, one.namespace)
    one.ready()
    with pytest.raises(Unavailable, match="earlier connection"):
        one.write(written)
    one.store(4)
    assert one.hit(4) == 4


def test_what_an_engine_logs_of_its_server_names_us(server, engine, caplog):
    one = engine()
    server.kill()
    eventually(lambda: any(text.startswith("KVCellar: no cache for now (") for text in caplog.messages))
    server.start()
    one.ready()
    eventually(lambda: any(text.startswith("KVCellar: the cache is back (") for text in caplog.messages))
