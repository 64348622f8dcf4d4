"""Slabs: one mapped file, slots that start on pages and do not overlap."""

import os

import pytest

from kvcellar.errors import Corrupt
from kvcellar.slab import (
    MAX_RACKS,
    MAX_SLOTS_PER_RACK,
    NO_PLACE,
    OBJECT_HEADER,
    PAGE,
    Slab,
    SlabShape,
    place_of,
    rack_of,
    slot_of,
)


@pytest.fixture
def fd():
    fd = os.memfd_create("slab")
    yield fd
    os.close(fd)


@pytest.mark.parametrize(("rack", "slot"), [(0, 0), (3, 5), (MAX_RACKS - 1, MAX_SLOTS_PER_RACK - 1)])
def test_place_is_a_rack_and_a_slot_in_32_bits(rack, slot):
    place = place_of(rack, slot)
    assert (rack_of(place), slot_of(place)) == (rack, slot)
    assert place < NO_PLACE == (1 << 32) - 1


@pytest.mark.parametrize(("slots", "header_pages"), [(1, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_headers_of_all_slots_come_first_and_fill_whole_pages(slots, header_pages):
    shape = SlabShape(slots, 2 * PAGE)
    assert shape.header_bytes == header_pages * PAGE >= slots * OBJECT_HEADER.itemsize
    assert shape.file_bytes == (header_pages + 2 * slots) * PAGE


def test_slots_and_headers_do_not_overlap_and_every_mapping_sees_them(fd):
    shape = SlabShape(65, PAGE)
    os.ftruncate(fd, shape.file_bytes)
    slab, again = Slab(fd, shape), Slab(fd, shape)
    for number in range(65):
        slab.slot(number)[:] = number + 1
        slab.headers[number] = number
    assert [set(again.slot(number).tolist()) for number in range(65)] == [{n + 1} for n in range(65)]
    assert [set(again.headers[number].tolist()) for number in range(65)] == [{n} for n in range(65)]
    assert [slot_start(fd, shape, number) for number in (0, 64)] == [1, 65]


def slot_start(fd: int, shape: SlabShape, number: int) -> int:
    return os.pread(fd, 1, shape.header_bytes + number * shape.slot_bytes)[0]


@pytest.mark.parametrize("difference", [-PAGE, -1, 1])
def test_file_of_another_size_than_announced_is_refused_instead_of_mapped(fd, difference):
    shape = SlabShape(4, PAGE)
    os.ftruncate(fd, shape.file_bytes + difference)
    with pytest.raises(Corrupt):
        Slab(fd, shape)
