"""What every storage engine must do. A module of tests for one engine is a subclass with a fixture:

    class TestMine(EngineConformance):
        @pytest.fixture
        def make(self): return lambda: MyEngine(...)      # each call opens the same store again

Nothing here knows which engine it is talking to.
"""

import mmap
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvcellar.slab import PAGE
from kvcellar.tiers.engine import Buffer, Engine, EngineError

MIB = 1 << 20
SIZES = [1, 63, 4095, 4096, 4097, MIB - 1, 3 * MIB + 17, 9 * MIB]


def buffer(size: int, seed: int | None = None) -> Buffer:
    """Views as a slab gives them: page-aligned. Filled from the seed, or with 0xEE."""
    pages = -(-size // PAGE) * PAGE
    memory = memoryview(mmap.mmap(-1, PAGE + pages))
    made = Buffer(memory[:64], memory[PAGE : PAGE + pages], size)
    if seed is None:
        memory[:] = b"\xee" * len(memory)
    else:
        made.header[:] = np.random.default_rng(seed).integers(0, 256, 64, np.uint8).tobytes()
        made.payload[:] = np.random.default_rng(seed + 1).integers(0, 256, size, np.uint8).tobytes()
    return made


def same(one: Buffer, other: Buffer) -> bool:
    return one.header == other.header and one.payload == other.payload


def name_of(number: int) -> str:
    """Shaped like a real one: namespace/key-group-shard."""
    return f"{number % 3:032x}/{number:032x}-{number % 5}-{number % 8}"


class EngineConformance:
    @pytest.fixture
    def make(self) -> Callable[[], Engine]:
        raise NotImplementedError("a subclass says how to open its engine")

    @pytest.fixture
    def engine(self, make: Callable[[], Engine]) -> Iterator[Engine]:
        engine = make()
        yield engine
        engine.close()

    @pytest.mark.parametrize("size", SIZES)
    def test_what_was_written_is_read(self, engine, size):
        written, read = buffer(size, seed=size), buffer(size)
        engine.write(name_of(1), written)
        assert engine.read(name_of(1), read)
        assert same(written, read)

    def test_what_was_never_written_is_not_there(self, engine):
        assert not engine.read(name_of(1), buffer(100))
        assert engine.exist([name_of(1), name_of(2)]) == [False, False]

    def test_exist_answers_in_the_order_of_the_question(self, engine):
        for number in (2, 5):
            engine.write(name_of(number), buffer(10, seed=number))
        assert engine.exist([name_of(n) for n in (5, 1, 2, 9, 5)]) == [True, False, True, False, True]
        assert engine.exist([]) == []

    @pytest.mark.parametrize("asked", [1, 4999, 5001, 3 * MIB])
    def test_another_size_is_a_miss(self, engine, asked):
        engine.write(name_of(1), buffer(5000, seed=1))
        assert not engine.read(name_of(1), buffer(asked))
        read = buffer(5000)
        assert engine.read(name_of(1), read)
        assert same(read, buffer(5000, seed=1))

    def test_the_same_name_may_be_written_again(self, engine):
        for _ in range(3):
            engine.write(name_of(1), buffer(5000, seed=1))
        read = buffer(5000)
        assert engine.read(name_of(1), read)
        assert same(read, buffer(5000, seed=1))

    def test_what_was_deleted_is_gone(self, engine):
        for number in range(4):
            engine.write(name_of(number), buffer(5000, seed=number))
        engine.delete([name_of(1), name_of(2), name_of(77)])
        engine.delete([])
        assert engine.exist([name_of(n) for n in range(4)]) == [True, False, False, True]
        assert not engine.read(name_of(1), buffer(5000))
        engine.write(name_of(1), buffer(5000, seed=1))
        read = buffer(5000)
        assert engine.read(name_of(1), read)
        assert same(read, buffer(5000, seed=1))

    def test_names_that_differ_in_one_place_are_different(self, engine):
        names = ["a0/b0-0-0", "a0/b0-0-1", "a0/b0-1-0", "a0/b1-0-0", "a1/b0-0-0"]
        for number, name in enumerate(names):
            engine.write(name, buffer(64, seed=number))
        for number, name in enumerate(names):
            read = buffer(64)
            assert engine.read(name, read)
            assert same(read, buffer(64, seed=number))

    def test_threads_at_once_get_what_is_theirs(self, engine):
        def work(thread: int) -> None:
            for turn in range(12):
                number, size = thread * 100 + turn % 4, 4096 * (1 + thread) + turn % 4
                written, read = buffer(size, seed=number), buffer(size)
                engine.write(name_of(number), written)
                assert engine.exist([name_of(number)]) == [True]
                assert engine.read(name_of(number), read)
                assert same(written, read)
                if turn % 3 == 2:
                    engine.delete([name_of(number)])

        run_threads(work, 6)

    def test_threads_that_write_and_delete_one_name_never_read_a_mixture(self, engine):
        written = buffer(200_000, seed=1)

        def work(thread: int) -> None:
            for _ in range(30):
                if thread == 0:
                    engine.delete([name_of(1)])
                elif thread == 1:
                    engine.write(name_of(1), written)
                else:
                    read = buffer(200_000)
                    assert not engine.read(name_of(1), read) or same(written, read)

        run_threads(work, 4)

    def test_after_close_everything_is_an_engine_error(self, make):
        engine = make()
        engine.write(name_of(1), buffer(10, seed=1))
        engine.close()
        engine.close()
        for ask in (
            lambda: engine.write(name_of(2), buffer(10, seed=2)),
            lambda: engine.read(name_of(1), buffer(10)),
            lambda: engine.exist([name_of(1)]),
            lambda: engine.delete([name_of(1)]),
        ):
            with pytest.raises(EngineError):
                ask()


def run_threads(work: Callable[[int], None], count: int) -> None:
    """Run work(0), work(1), ... at once; the first failure is raised here."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - it is raised again below
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a call did not return"
    if failures:
        raise failures[0]
