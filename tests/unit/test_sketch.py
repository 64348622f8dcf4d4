"""The sketch: never says of what is there that it is not; and engines cannot harm it."""

import mmap
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import Corrupt
from kvcellar.identity import ChunkKey
from kvcellar.sketch import SKETCH_BYTES, OwnSketch, Sketch
from tests.support import keys


@pytest.fixture
def own():
    sketch = OwnSketch()
    yield sketch
    sketch.close()


def key_of(counter: int, tail: int = 0) -> ChunkKey:
    """One that has this counter, and what else."""
    return ChunkKey(counter.to_bytes(4, "little") + tail.to_bytes(12, "little"))


def test_engines_see_what_the_server_counts(own):
    theirs = Sketch(own.descriptor)
    here, not_here = keys(2)
    own.add(here)
    assert theirs.may_have(here)
    assert not theirs.may_have(not_here)
    own.drop(here)
    assert not theirs.may_have(here)


def test_a_key_is_there_until_it_was_dropped_as_often_as_it_was_added(own):
    """The chunk of one namespace and of another, or of two groups."""
    [key] = keys(1)
    own.add(key)
    own.add(key)
    own.drop(key)
    assert own.may_have(key)
    own.drop(key)
    assert not own.may_have(key)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 2))))
def test_nothing_that_is_there_is_denied_and_nothing_else_is_claimed_for_good(steps):
    own, there = OwnSketch(), list[ChunkKey]()
    for comes, counter, tail in steps:
        key = key_of(counter, tail)
        if comes:
            own.add(key)
            there.append(key)
        elif key in there:
            own.drop(key)
            there.remove(key)
    counters = {key[:4] for key in there}
    for counter in range(4):
        assert own.may_have(key_of(counter)) == (key_of(counter)[:4] in counters)
    own.close()


def test_a_counter_that_was_full_once_stays(own):
    """How many more there were is not known any longer."""
    for tail in range(300):
        own.add(key_of(7, tail))
    for tail in range(300):
        own.drop(key_of(7, tail))
    assert own.may_have(key_of(7))
    assert not own.may_have(key_of(8))


def test_engines_can_neither_write_to_it_nor_cut_it_short(own):
    with pytest.raises(PermissionError):
        mmap.mmap(own.descriptor, SKETCH_BYTES, access=mmap.ACCESS_WRITE)
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(own.descriptor, 0)
    again = os.open(f"/proc/self/fd/{own.descriptor}", os.O_RDWR)  # who has the server's rights
    with pytest.raises(PermissionError):
        os.ftruncate(again, 0)
    os.close(again)


def test_what_is_no_sketch_is_not_mapped(tmp_path):
    with open(tmp_path / "short", "w+b") as file, pytest.raises(Corrupt):
        Sketch(file.fileno())
