"""Identity is geometry: equal namespaces share, and any difference keeps them apart."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvcellar.errors import BadRequest
from kvcellar.identity import (
    ID_BYTES,
    BlockHash,
    Group,
    Layer,
    Namespace,
    ParallelStrategy,
    decode_namespace,
    default_chunk_tokens,
)

# Two stages, and a layer to spare in the first: every field but pp can change on its own.
FIRST, SECOND, LAST = Layer("layers.0", 4096, 0), Layer("layers.1", 4096, 0), Layer("layers.2", 2048, 1)
FULL = Group(16, (FIRST, SECOND, LAST))
SLIDING = Group(32, (FIRST, SECOND, LAST), kind="sliding", window_tokens=1024)
NAMESPACE = Namespace(
    engine="vllm/1",
    model="tiny",
    weights="sha256:ab",
    kv_dtype="bfloat16",
    kv_layout="NHD",
    groups=(FULL, SLIDING),
    parallel=ParallelStrategy(tp=4, pp=2),
    chunk_tokens=256,
    block_hash=BlockHash("sha256_cbor", 16, "00ff"),
    checksum="linear64",
    quantization="fp8",
    draft_model="eagle",
    weights_generation=3,
    tenant="acme",
)
GOLDEN_ID = "deb10063359239f7f7eebd9287a6ff89"


def with_(**changes: Any) -> Namespace:
    return structs.replace(NAMESPACE, **changes)


def with_full(**changes: Any) -> Namespace:
    return with_(groups=(structs.replace(FULL, **changes), SLIDING))


def with_sliding(**changes: Any) -> Namespace:
    return with_(groups=(FULL, structs.replace(SLIDING, **changes)))


def with_layer(**changes: Any) -> Namespace:
    return with_full(layers=(structs.replace(FIRST, **changes), SECOND, LAST))


def with_parallel(**changes: Any) -> Namespace:
    return with_(parallel=structs.replace(NAMESPACE.parallel, **changes))


def with_hash(**changes: Any) -> Namespace:
    return with_(block_hash=structs.replace(NAMESPACE.block_hash, **changes))


ONE_STAGE = tuple(structs.replace(group, layers=(FIRST, SECOND)) for group in (FULL, SLIDING))
CHANGED = {
    "Namespace.engine": with_(engine="other"),
    "Namespace.model": with_(model="other"),
    "Namespace.weights": with_(weights="other"),
    "Namespace.kv_dtype": with_(kv_dtype="other"),
    "Namespace.kv_layout": with_(kv_layout="HND"),
    "Namespace.groups": with_(groups=(SLIDING, FULL)),
    "Namespace.parallel": with_(parallel=ParallelStrategy(tp=1, pp=2)),
    "Namespace.chunk_tokens": with_(chunk_tokens=512),
    "Namespace.block_hash": with_(block_hash=BlockHash("xxhash", 32, "")),
    "Namespace.checksum": with_(checksum="other"),
    "Namespace.quantization": with_(quantization="other"),
    "Namespace.draft_model": with_(draft_model="other"),
    "Namespace.weights_generation": with_(weights_generation=4),
    "Namespace.tenant": with_(tenant="other"),
    "Group.block_tokens": with_full(block_tokens=32),
    "Group.layers": with_full(layers=(SECOND, FIRST, LAST)),
    "Group.kind": with_full(kind="recurrent"),
    "Group.window_tokens": with_sliding(window_tokens=2048),
    "Layer.name": with_layer(name="other"),
    "Layer.block_bytes": with_layer(block_bytes=8192),
    "Layer.stage": with_layer(stage=1),
    "ParallelStrategy.tp": with_parallel(tp=8),
    "ParallelStrategy.pp": with_(parallel=ParallelStrategy(tp=4, pp=1), groups=ONE_STAGE),
    "ParallelStrategy.dcp": with_parallel(dcp=2),
    "ParallelStrategy.mla": with_parallel(mla=True),
    "BlockHash.algorithm": with_hash(algorithm="other"),
    "BlockHash.block_tokens": with_hash(block_tokens=32),
    "BlockHash.seed": with_hash(seed="other"),
}


def fields_of(record: msgspec.Struct) -> Iterator[str]:
    for field in structs.fields(record):
        yield f"{type(record).__name__}.{field.name}"
        value = getattr(record, field.name)
        for part in value if isinstance(value, tuple) else [value]:
            if isinstance(part, msgspec.Struct):
                yield from fields_of(part)


def test_the_table_of_changes_covers_every_field():
    assert set(CHANGED) == set(fields_of(NAMESPACE))


@pytest.mark.parametrize("field", CHANGED)
def test_changing_one_field_changes_the_id(field):
    assert CHANGED[field].id != NAMESPACE.id


def test_no_two_changes_meet():
    assert len({changed.id for changed in CHANGED.values()}) == len(CHANGED)


@pytest.mark.parametrize("field", CHANGED)
def test_encoding_loses_nothing(field):
    assert decode_namespace(CHANGED[field].encoded) == CHANGED[field]


def test_id_is_128_bits():
    assert len(NAMESPACE.id) == ID_BYTES == 16


def test_id_never_changes_between_processes_and_releases():
    # If this fails, every cache that is on disk somewhere is lost. Do that on purpose or not at all.
    assert NAMESPACE.id.hex() == GOLDEN_ID


def test_equal_namespaces_built_apart_encode_to_equal_bytes():
    rebuilt = msgspec.convert(msgspec.to_builtins(NAMESPACE), Namespace)
    assert rebuilt is not NAMESPACE
    assert rebuilt.encoded == NAMESPACE.encoded


def test_another_spelling_of_the_same_namespace_has_the_same_id():
    plain = with_(quantization="", draft_model="", weights_generation=0, tenant="")
    without_defaults = msgspec.msgpack.encode(msgspec.to_builtins(plain)[:10])
    assert without_defaults != plain.encoded
    assert decode_namespace(without_defaults).id == plain.id


def test_same_name_but_another_kv_dtype_is_another_namespace():
    assert with_(kv_dtype="fp8_e4m3").id != NAMESPACE.id


def test_same_name_but_another_head_layout_is_another_namespace():
    half_the_heads = [structs.replace(layer, block_bytes=layer.block_bytes // 2) for layer in FULL.layers]
    assert with_full(layers=tuple(half_the_heads)).id != NAMESPACE.id
    assert with_(kv_layout="HND").id != NAMESPACE.id  # as many bytes, in another order


def test_two_groups_of_equal_spec_stay_separate():
    twins = with_(groups=(FULL, FULL))
    assert decode_namespace(twins.encoded).groups == (FULL, FULL)
    assert len({twins.id, with_(groups=(FULL,)).id, with_(groups=(FULL, FULL, FULL)).id}) == 3


def test_a_namespace_cannot_change():
    with pytest.raises(AttributeError, match="immutable"):
        NAMESPACE.model = "other"  # type: ignore[misc]


# -- what a peer may send


def wire(path: str, value: Any) -> bytes:
    """The encoded namespace with one value replaced or added, unchecked: wire("groups.0.block_tokens", 0)."""
    whole = by_name(NAMESPACE)
    *parents, last = path.split(".")
    at = whole
    for part in parents:
        at = at[int(part)] if part.isdigit() else at[part]
    at[last] = value
    return msgspec.msgpack.encode(as_arrays(whole))


def by_name(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {field: by_name(getattr(value, field)) for field in value.__struct_fields__}
    return [by_name(part) for part in value] if isinstance(value, tuple) else value


def as_arrays(value: Any) -> Any:
    parts = value.values() if isinstance(value, dict) else value
    return [as_arrays(part) for part in parts] if isinstance(value, dict | list) else value


LAYER = ["layers.0", 4096, 0]
TWO_LAYERS = [LAYER, ["layers.2", 2048, 1]]
GROUP = [16, TWO_LAYERS, "full", None]


def test_an_unchanged_value_is_accepted():
    assert wire("model", "tiny") == NAMESPACE.encoded


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("engine", [None, 7, b"vllm", "x" * 4097]),
        ("groups", [None, [], [GROUP] * 65]),
        ("groups.0.block_tokens", [None, 0, -16, (1 << 24) + 1]),
        ("groups.0.layers", [None, [], TWO_LAYERS + [LAYER] * 4095]),
        ("groups.0.kind", [None, "", "FULL", "cross"]),
        ("groups.1.window_tokens", [0, -1, (1 << 24) + 1]),
        ("groups.0.layers.0.name", [None, "x" * 4097]),
        ("groups.0.layers.0.block_bytes", [None, 0, -1, (1 << 30) + 1]),
        ("groups.0.layers.0.stage", [None, -1, 2, 1024]),
        ("parallel.tp", [0, -1, 513, 1025]),  # 513: with pp=2 a world of 1026
        ("parallel.pp", [0, -1, 257, 1025]),
        ("parallel.dcp", [0, -1, 5, 1025]),
        ("parallel.mla", [None, 1, "yes"]),
        ("chunk_tokens", [None, 0, -256, (1 << 24) + 256, 1 << 63, 256.0, "256", True]),
        ("block_hash.block_tokens", [0, -16, (1 << 24) + 1]),
        ("block_hash.seed", [None, "x" * 4097]),
        ("weights_generation", [None, -1, 1 << 32, 1.5]),
    ],
)
def test_a_value_out_of_range_is_refused(path, values):
    for value in values:
        with pytest.raises(BadRequest, match="not a namespace"):
            decode_namespace(wire(path, value))


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("engine", ["", "x" * 4096, "\u6a21\u578b"]),
        ("groups", [[GROUP], [GROUP] * 64]),
        ("groups.0.block_tokens", [1, 256]),
        ("groups.0.layers", [TWO_LAYERS, TWO_LAYERS + [LAYER] * 4094]),
        ("groups.0.kind", ["full", "mla", "recurrent"]),
        ("groups.1.window_tokens", [1, 1 << 24]),
        ("groups.0.layers.0.block_bytes", [1, 1 << 30]),
        ("parallel.tp", [1, 512]),
        ("parallel.dcp", [1, 4]),
        ("chunk_tokens", [32, 1 << 24]),
        ("weights_generation", [0, (1 << 32) - 1]),
    ],
)
def test_a_value_at_the_edge_of_its_range_is_accepted(path, values):
    for value in values:
        assert decode_namespace(wire(path, value)).encoded == wire(path, value)


@pytest.mark.parametrize("record", ["", "groups.0.", "groups.0.layers.0.", "parallel.", "block_hash."])
def test_a_field_from_the_future_is_refused(record):
    with pytest.raises(BadRequest, match="not a namespace: Expected `array` of at most length"):
        decode_namespace(wire(record + "surprise", 1))


JUNK = {
    "nothing": b"",
    "nil": b"\xc0",
    "text": b"GET / HTTP/1.1\r\n",
    "a map": msgspec.msgpack.encode({"engine": "vllm/1"}),
    "an empty array": b"\x90",
    "a required field missing": msgspec.msgpack.encode(as_arrays(by_name(NAMESPACE))[:9]),
    "a byte too many": NAMESPACE.encoded + b"\x00",
    "arrays in arrays": b"\x91" * 100_000,
    "an array of four billion": b"\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("encoded", JUNK.values(), ids=JUNK)
def test_junk_is_refused(encoded):
    with pytest.raises(BadRequest, match="not a namespace"):
        decode_namespace(encoded)


def test_every_truncation_is_refused():
    encoded = NAMESPACE.encoded
    for length in range(len(encoded)):
        with pytest.raises(BadRequest):
            decode_namespace(encoded[:length])


def test_text_that_is_not_utf8_is_refused():
    with pytest.raises(BadRequest):
        decode_namespace(NAMESPACE.encoded.replace(b"tiny", b"\xff\xff\xff\xff"))


@settings(deadline=None)
@given(st.binary(max_size=64), st.integers(0, 200))
def test_a_damaged_encoding_is_refused_or_still_a_namespace(damage, place):
    encoded = bytearray(NAMESPACE.encoded)
    encoded[place : place + len(damage)] = damage
    with suppress(BadRequest):
        assert isinstance(decode_namespace(bytes(encoded)), Namespace)


# -- rules between fields


@pytest.mark.parametrize("chunk_tokens", [16, 48, 100, 257])
def test_a_chunk_must_be_a_multiple_of_every_groups_block(chunk_tokens):
    with pytest.raises(BadRequest, match=f"chunk_tokens={chunk_tokens} .*group [01]"):
        with_(chunk_tokens=chunk_tokens)


def test_a_chunk_of_256_fits_blocks_of_256_64_64_4_and_8():
    groups = tuple(structs.replace(FULL, block_tokens=tokens) for tokens in (256, 64, 64, 4, 8))
    assert with_(groups=groups).chunk_tokens == 256
    with pytest.raises(BadRequest, match=r"chunk_tokens=128 .*group 0.* 256"):
        with_(groups=groups, chunk_tokens=128)


@pytest.mark.parametrize(
    ("kind", "window_tokens"), [("sliding", None), ("full", 1024), ("mla", 1024), ("recurrent", 1024)]
)
def test_a_group_has_a_window_exactly_when_it_slides(kind, window_tokens):
    with pytest.raises(BadRequest, match=f"a {kind} group with window_tokens={window_tokens}"):
        Group(16, (FIRST,), kind, window_tokens)


def test_a_layer_is_in_a_stage_that_exists():
    with pytest.raises(BadRequest, match="group 0 has a layer in stage 1 of 1"):
        with_parallel(pp=1)


def test_every_stage_has_a_layer_of_every_group():
    with pytest.raises(BadRequest, match="group 1 has layers in 1 of 2 pipeline stages"):
        with_sliding(layers=(FIRST, SECOND))


@pytest.mark.parametrize(
    ("block_tokens", "chunk_tokens"),
    [
        ([16], 128),
        ([128], 128),
        ([1], 128),
        ([256], 256),
        ([48], 144),
        ([16, 48], 144),
        ([256, 64, 64, 4, 8], 256),
        ([96, 64], 192),
        ([64, 48], 192),
        ([96, 128], 384),
        ([16, 1056], 1056),
        ([784], 784),
    ],
)
def test_default_chunk_is_the_smallest_common_multiple_from_128_on(block_tokens, chunk_tokens):
    assert default_chunk_tokens(block_tokens) == chunk_tokens
