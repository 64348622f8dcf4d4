"""Lookup: what is found, in which namespace, and exactly which stripes it pins."""

import pytest
from msgspec import structs

from kvcellar.errors import BadRequest, UnknownNamespace
from kvcellar.identity import ParallelStrategy
from kvcellar.ledger import NO_LEASE, SCHEDULER
from kvcellar.ledger.ledger import MAX_NAMESPACES
from kvcellar.slab import NO_PLACE
from tests.support import Engine, full_group, keys, namespace, window_group

TP2 = namespace(parallel=ParallelStrategy(tp=2))
HYBRID = namespace(groups=(full_group(), window_group(2)))
A, B, C, D = keys(4)


# -- identity ------------------------------------------------------------------------------------------------


def test_lookup_in_a_namespace_that_nobody_registered_is_a_clean_miss_with_a_reason(one):
    stranger = namespace(model="other")
    missed = one.ledger.lookup(one.session, stranger.id, [A])
    assert missed == (NO_LEASE, 0, [], "unknown_namespace")


def test_engine_finds_nothing_in_a_namespace_that_only_another_registered(ledger, one):
    one.store([A])
    other = Engine(ledger, namespace(model="other"), "other")
    missed = ledger.lookup(other.session, one.namespace.id, [A])
    assert missed == (NO_LEASE, 0, [], "unknown_namespace")
    with pytest.raises(UnknownNamespace):
        ledger.reserve(other.session, one.namespace.id, [B], None)


def test_reserve_in_a_namespace_that_nobody_registered_is_refused(one):
    with pytest.raises(UnknownNamespace):
        one.ledger.reserve(one.session, namespace(model="other").id, [A], None)


def test_same_name_with_another_kv_dtype_shares_nothing(ledger, one):
    other = Engine(ledger, namespace(kv_dtype="fp8"), "other")
    one.store([A])
    assert (other.hit([A]), other.reserve([A]).places) == (0, [[0]])


def test_a_session_has_few_namespaces_and_a_refused_one_leaves_nothing(ledger, one):
    """Each has its share of memory: who had many would take that of others."""
    many = [namespace(weights_generation=number) for number in range(1, MAX_NAMESPACES + 1)]
    for spec in many[:-1]:
        ledger.register(one.session, 0, spec)
    with pytest.raises(BadRequest, match="8 namespaces at most"):
        ledger.register(one.session, 0, many[-1])
    assert many[-1].id not in ledger.rooms
    ledger.register(one.session, 0, many[0])
    ledger.register(one.session, SCHEDULER, many[-1])
    assert one.session.namespaces == {many[-1].id}


def test_namespace_is_shared_by_all_who_register_it_and_its_data_outlives_them(ledger):
    first, second = Engine(ledger, TP2, "first"), Engine(ledger, TP2, "second")
    assert first.room is second.room
    first.store([A])
    first.leave()
    assert second.hit([A]) == 1
    second.leave()
    assert Engine(ledger, TP2, "third").hit([A]) == 1


# -- hits ----------------------------------------------------------------------------------------------------


def test_lookup_stops_at_the_first_gap(one):
    one.store([A, B, D])
    assert one.lookup([A, B, C, D]).chunks == 2
    assert one.pins([A, B, D]) == [1, 1, 0]


def test_lookup_of_nothing_or_of_unknown_keys_opens_no_lease(one):
    one.store([A])
    assert one.lookup([]) == (NO_LEASE, 0, [], "")
    assert one.lookup([B, A]) == (NO_LEASE, 0, [], "")
    assert not one.session.leases


def test_lookups_and_stores_are_counted_in_chunks_and_shares(ledger):
    mla = Engine(ledger, namespace(parallel=ParallelStrategy(tp=2, mla=True)))
    mla.store([A, B])
    mla.lookup([A, B, C])
    mla.lookup([C])
    assert mla.session.counts == {
        "stores": 1,
        "write_shares": 1,
        "reserved": 2,
        "committed": 2,
        "lookups": 2,
        "hits": 1,
        "read_shares": 2,
        "asked_chunks": 4,
        "hit_chunks": 2,
    }


def present(engine: Engine, group: int, row: str) -> None:
    """Store exactly the chunks that `row` names with a 1."""
    for key, there in zip([A, B, C, D], row, strict=True):
        if there == "1":
            engine.store([key], groups=[group])


@pytest.mark.parametrize(
    ("full", "other", "window", "hit", "pinned"),
    [
        ("1111", "0011", 2, 4, ("1111", "0011")),
        ("1111", "0001", 2, 0, ("0000", "0000")),
        ("1111", "0001", 1, 4, ("1111", "0001")),
        ("1110", "1111", 2, 3, ("1110", "0110")),
        ("1111", "1010", 1, 3, ("1110", "0010")),
        ("1101", "1111", None, 2, ("1100", "1100")),
    ],
)
def test_hit_and_pins_follow_the_window_of_each_group(ledger, full, other, window, hit, pinned):
    second = window_group(window) if window else full_group()
    engine = Engine(ledger, namespace(groups=(full_group(), second)))
    for group, row in enumerate((full, other)):
        present(engine, group, row)
    read = engine.lookup([A, B, C, D])
    assert read.chunks == hit
    for group, row in enumerate(pinned):
        assert "".join(str(max(n, 0)) for n in engine.pins([A, B, C, D], group)) == row
        places = read.places[group] if hit else []
        assert [place != NO_PLACE for place in places] == [bit == "1" for bit in row[:hit]]
    if hit:
        assert engine.release(read) == sum(map(int, "".join(pinned)))


def test_recurrent_group_needs_only_its_newest_chunk(ledger):
    recurrent = structs.replace(full_group(), kind="recurrent")
    engine = Engine(ledger, namespace(groups=(full_group(), recurrent)))
    present(engine, 0, "1111")
    present(engine, 1, "0010")
    assert engine.lookup([A, B, C, D]).chunks == 3
    assert (engine.pins([A, B, C, D], 0), engine.pins([C], 1)) == ([1, 1, 1, 0], [1])


def test_chunk_whose_second_group_is_still_being_written_is_not_found(ledger):
    engine = Engine(ledger, HYBRID)
    engine.store([A], groups=[0])
    write = engine.reserve([A], groups=[1])
    assert engine.hit([A]) == 0
    engine.commit(write)
    assert engine.hit([A]) == 1


def test_reserve_without_groups_fills_in_what_a_group_lacks(ledger):
    engine = Engine(ledger, HYBRID)
    engine.store([A], groups=[1])
    assert engine.store([A]).places == [[0], [NO_PLACE]]
    assert engine.hit([A]) == 1


def test_two_groups_of_equal_spec_keep_their_stripes_apart(ledger):
    engine = Engine(ledger, namespace(groups=(full_group(), full_group())))
    engine.store([A], groups=[0])
    assert (engine.pins([A], 0), engine.pins([A], 1), engine.hit([A])) == ([0], [-1], 0)
