"""What engines on the network must do beyond the rest, and how tests wait for one to come back."""

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcellar.tiers import Engine, EngineError
from tests.tiers.conformance import MIB, EngineConformance, buffer, name_of, same

NAME = name_of(1)


class RemoteConformance(EngineConformance):
    @pytest.mark.parametrize("size", [4 * MIB, 4 * MIB + 1, 32 * MIB, 32 * MIB + 5])
    def test_large_values(self, engine, size):
        written, read = buffer(size, seed=size), buffer(size)
        engine.write(NAME, written)
        assert engine.read(NAME, read)
        assert same(written, read)

    @pytest.mark.parametrize("size", [5000, 9 * MIB])
    def test_a_large_value_of_another_size_is_a_miss(self, engine, size):
        engine.write(NAME, buffer(size, seed=1))
        for wanted in (9 * MIB - 1, 9 * MIB + 1, 12 * MIB):
            assert not engine.read(NAME, buffer(wanted))
        assert engine.read(NAME, buffer(size))

    def test_many_names_at_once(self, engine):
        for number in range(0, 300, 7):
            engine.write(name_of(number), buffer(100, seed=number))
        assert engine.exist([name_of(n) for n in range(300)]) == [n % 7 == 0 for n in range(300)]
        engine.delete([name_of(number) for number in range(0, 300, 14)])
        assert engine.exist([name_of(n) for n in range(300)]) == [n % 14 == 7 for n in range(300)]

    def test_large_values_in_threads(self, engine):
        written = [buffer(5 * MIB, seed=number) for number in range(3)]

        def work(number: int) -> None:
            for _ in range(4):
                read = buffer(5 * MIB)
                engine.write(name_of(number), written[number])
                assert engine.read(name_of(number), read)
                assert same(written[number], read)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(3)))


def answers(engine: Engine) -> Callable[[], bool]:
    """For `eventually`."""

    def ask() -> bool:
        try:
            engine.exist([NAME])
        except EngineError:
            return False
        return True

    return ask


def every_call(engine: Engine) -> dict[str, Callable[[], object]]:
    return {
        "write": lambda: engine.write(NAME, buffer(1000, seed=1)),
        "write a large one": lambda: engine.write(name_of(2), buffer(9 * MIB, seed=1)),
        "read": lambda: engine.read(NAME, buffer(1000)),
        "exist": lambda: engine.exist([NAME, name_of(2)]),
        "delete": lambda: engine.delete([NAME]),
    }


def round_trip(engine: Engine, size: int, name: str = "", seed: int = 1) -> bool:
    """Under a fresh name unless one is given: a name whose write timed out may be taken for a while."""
    name = name or f"{secrets.token_hex(16)}/{secrets.token_hex(16)}-0-0"
    read = buffer(size)
    engine.write(name, buffer(size, seed=seed))
    return engine.read(name, read) and same(buffer(size, seed=seed), read)
