"""The disk engine as a state machine: whatever happens in whatever order, what is read is what was written,
capacity holds, and the books balance. Restarts and torn files are among what happens.
"""

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcellar.tiers.disk import DiskEngine
from kvcellar.tiers.engine import EngineError
from tests.server.engine import eventually
from tests.tiers.conformance import MIB, buffer, name_of, same

NUMBERS = st.integers(0, 40)
SIZES = [1, 4096, 30_000, 90_000, 400_000]


def size_of(number: int) -> int:
    """The same name always means the same value."""
    return SIZES[number % len(SIZES)]


class DiskMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvcellar-disk-machine-"))
        self.capacity = 0
        self.engine: DiskEngine | None = None
        self.written: set[int] = set()  # and not deleted; some may have been evicted

    @initialize(capacity=st.sampled_from([MIB, 2 * MIB]))
    def open(self, capacity: int) -> None:
        self.capacity = capacity
        self.engine = DiskEngine(self.folder, capacity)
        eventually(lambda: self.engine is not None and not self.engine.usage().scanning)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=8))
    def write(self, numbers: list[int]) -> None:
        assert self.engine is not None
        for number in numbers:
            try:
                self.engine.write(name_of(number), buffer(size_of(number), seed=number))
            except EngineError as error:
                if "no room" not in str(error):
                    raise
                continue
            assert self.reads(number), "what was just written is there"
            self.written.add(number)

    @rule(number=NUMBERS)
    def read(self, number: int) -> None:
        assert not self.reads(number) or number in self.written

    def reads(self, number: int) -> bool:
        assert self.engine is not None
        target = buffer(size_of(number))
        if not self.engine.read(name_of(number), target):
            return False
        assert same(target, buffer(size_of(number), seed=number))
        return True

    @rule(numbers=st.lists(NUMBERS, max_size=5))
    def delete(self, numbers: list[int]) -> None:
        assert self.engine is not None
        self.engine.delete([name_of(number) for number in numbers])
        self.written -= set(numbers)
        assert not any(self.reads(number) for number in numbers)

    @rule(capacity=st.sampled_from([MIB, 2 * MIB, 4 * MIB]))
    def restart(self, capacity: int) -> None:
        assert self.engine is not None
        known = self.known()
        shrinks = capacity < self.capacity
        self.engine.close()
        self.open(capacity)
        again = self.known()
        assert again == known or (shrinks and again < known)

    def known(self) -> set[int]:
        assert self.engine is not None
        return {number for number in range(41) if self.engine.exist([name_of(number)]) == [True]}

    @precondition(lambda self: any(self.folder.glob("crate-*")))
    @rule(data=st.data())
    def tear(self, data: st.DataObject) -> None:
        """Stop, cut one file short, start."""
        assert self.engine is not None
        self.engine.close()
        path = data.draw(st.sampled_from(sorted(self.folder.glob("crate-*"))))
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        self.open(self.capacity)

    @invariant()
    def books_balance(self) -> None:
        if self.engine is not None:
            self.engine.check()
            files = sum(path.stat().st_size for path in self.folder.iterdir())
            assert files <= self.capacity

    def teardown(self) -> None:
        if self.engine is not None:
            self.engine.close()
        shutil.rmtree(self.folder)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
