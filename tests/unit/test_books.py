"""The books of a disk: what goes, and how much of it, when a file system gives no more. No files."""

from collections.abc import Container
from itertools import pairwise

import pytest

from kvcellar.errors import EngineError
from kvcellar.identity import ChunkKey
from kvcellar.ledger.stripe import Stripe
from kvcellar.slab import Place, place_of
from kvcellar.tiers.books import Books, GiveUp, Grow
from kvcellar.tiers.crate import CrateShape
from tests.support import keys

MIB = 1 << 20
SMALL, LARGE = 128 << 10, 256 << 10


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Disk:
    """Does what the books say, on a file system that may be full."""

    def __init__(self, capacity: int = 64 * MIB) -> None:
        self.clock = Clock()
        self.books = Books(capacity, self.clock)
        self.refuses: dict[str, bool] = {}
        self.keeps_files = False
        self.given_up = 0
        self._names = iter(keys(100_000))

    def places(self) -> set[Place]:
        return {stripe.place for stripe in self.books.index.values()}

    def write(self, slot_bytes: int, bad: Container[Place] = ()) -> bool:
        """False: the disk would not take it there."""
        while True:
            step = self.books.take(slot_bytes)
            if isinstance(step, Grow):
                if self.refuses and not self.books.not_grown(step, "refused", **self.refuses):
                    raise EngineError("refused")
                if not self.refuses:
                    self.books.grown(step)
            elif isinstance(step, GiveUp):
                self.given_up += 1
                if self.keeps_files:
                    self.books.not_removed(step, "refused")
                else:
                    self.books.removed(step)
            else:
                assert step is not None
                if step in bad:
                    self.books.leave(step)
                    return False
                stripe = Stripe(ChunkKey(next(self._names)), step)
                self.books.index[stripe.key] = stripe
                self.books.publish(stripe)
                return True

    def try_writes(self, count: int, slot_bytes: int) -> int:
        """How many succeed."""
        done = 0
        for _ in range(count):
            try:
                self.write(slot_bytes)
            except EngineError:
                continue
            done += 1
        return done


@pytest.fixture
def disk():
    """Full of small objects."""
    disk = Disk()
    while not disk.books.used + MIB > disk.books.capacity:
        disk.write(SMALL)
    return disk


def test_after_one_refusal_no_more_goes_than_without_one(disk):
    disk.refuses = {"is_full": True}
    assert disk.try_writes(1, LARGE) == 0
    disk.refuses = {}
    assert disk.try_writes(3, LARGE) == 3, "what one crate gives is used at once"
    assert disk.given_up == 1
    disk.books.check()


def test_a_file_system_that_stays_full_costs_one_crate_in_a_while(disk):
    """Others take what is given up."""
    disk.refuses = {"is_full": True}
    assert disk.try_writes(50, LARGE) == 0
    assert disk.given_up == 1
    disk.clock.now += 5.0
    assert disk.try_writes(50, LARGE) == 0
    assert disk.given_up == 2
    disk.books.check()


def test_where_space_is_not_what_is_missing_nothing_goes(disk):
    """The folder may not be written to, or there are too many open files."""
    disk.refuses = {"is_full": False}
    assert disk.try_writes(50, LARGE) == 0
    assert disk.given_up == 0
    disk.refuses = {}
    disk.clock.now += 5.0
    assert disk.try_writes(3, LARGE) == 3


def test_while_one_crate_is_given_up_no_other_goes(disk):
    """Several threads write at once, and one crate is room for all of them."""
    while not isinstance(step := disk.books.take(LARGE), GiveUp):
        if isinstance(step, Grow):  # of what is left
            disk.books.grown(step)
    assert disk.books.take(LARGE) is None
    disk.books.removed(step)
    assert isinstance(disk.books.take(LARGE), Grow)


def test_a_crate_that_cannot_be_removed_holds_what_it_held(disk):
    """Nor is the next one tried at once."""
    held = {key: stripe.place for key, stripe in disk.books.index.items()}
    disk.keeps_files = True
    for tried in (1, 2):
        assert disk.try_writes(50, LARGE) == 50, "in what was left"
        assert disk.given_up == tried
        assert held.items() <= {key: stripe.place for key, stripe in disk.books.index.items()}.items()
        disk.books.check()
        disk.clock.now += 5.0
    disk.keeps_files = False
    assert disk.try_writes(50, LARGE) == 50
    assert disk.books.refusal == ""
    disk.books.check()


def test_a_file_system_that_gives_again_is_used_as_before(disk):
    disk.refuses = {"is_full": True}
    disk.try_writes(5, LARGE)
    disk.refuses = {}
    disk.clock.now += 5.0
    assert disk.try_writes(100, LARGE) == 100
    assert disk.books.refusal == ""
    disk.books.check()


def test_a_bad_region_costs_the_slots_there_and_nothing_else(disk):
    """However many they are, as long as others can be written between them."""
    bad = {place_of(number, slot) for number in range(20) for slot in range(6)}
    tried = [disk.write(SMALL, bad) for _ in range(1000)].count(False)
    disk.books.check()
    assert tried == len(bad), "once each"
    assert not bad & disk.places()


def test_what_was_bad_is_tried_again_after_a_while(disk):
    """It may have been the space behind it that was missing. Never two in a row: others shall be written."""
    bad = {place_of(number, 0) for number in range(20)}
    while disk.write(SMALL, bad) or len(bad & disk.places()) > 0:
        pass
    disk.clock.now += 3600.0
    done = [disk.write(SMALL, bad) for _ in range(200)]
    assert done.count(False) == len(bad)
    assert not any(not one and not other for one, other in pairwise(done))
    disk.clock.now += 3600.0
    assert disk.try_writes(1000, SMALL) == 1000
    assert bad <= disk.places()
    disk.books.check()


def test_slots_of_which_the_disk_says_nothing_are_not_used_at_once(disk):
    books = Books(64 * MIB, disk.clock)
    shape = CrateShape(SMALL, 8)
    books.adopt(0, shape)
    books.scanned(0, kept=set(), unread={2, 3})
    books.check()
    assert {books.take(SMALL) for _ in range(6)} == {place_of(0, slot) for slot in (0, 1, 4, 5, 6, 7)}
    assert isinstance(books.take(SMALL), Grow)


def test_of_bad_slots_a_few_are_left_and_of_a_bad_disk_no_more(disk):
    """A disk that fails for hours, and then works again, still has nearly all of its slots."""
    disk.try_writes(50, SMALL)
    had = len(disk.books.index)
    for _ in range(1000):
        place = disk.books.take(SMALL)
        assert isinstance(place, int)
        disk.books.leave(place)
    disk.books.check()
    assert len(disk.books.index) >= had * 63 // 64 - 1
    assert disk.try_writes(100, SMALL) == 100
