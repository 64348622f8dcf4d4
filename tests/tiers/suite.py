"""What every engine on the network must do. A test module inherits these and brings an `engine` fixture."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcellar.tiers import Engine
from tests.tiers.memory import Arena, same

MIB = 1 << 20
SIZES = [1, 1000, 4096, MIB, 4 * MIB, 4 * MIB + 1, 9 * MIB + 12345, 32 * MIB]


class EngineSuite:
    @pytest.mark.parametrize("size", SIZES)
    def test_what_is_written_is_read_again_byte_for_byte(self, engine: Engine, arena: Arena, size: int):
        source, target = arena.value(size), arena.buffer(size)
        engine.write(f"ns/{size}", source)
        assert engine.read(f"ns/{size}", target)
        assert same(source, target)

    def test_what_was_never_written_is_a_miss(self, engine: Engine, arena: Arena):
        assert not engine.read("ns/nothing", arena.buffer(1000))
        assert not engine.read("ns/nothing", arena.buffer(9 * MIB))
        assert engine.exist(["ns/nothing", "other/nothing"]) == [False, False]

    @pytest.mark.parametrize("size", [1000, 9 * MIB])
    @pytest.mark.parametrize("wanted", [10, 999, 1001, 9 * MIB - 1, 9 * MIB + 1, 12 * MIB])
    def test_another_size_is_a_miss(self, engine: Engine, arena: Arena, size: int, wanted: int):
        engine.write("ns/sized", arena.value(size))
        assert not engine.read("ns/sized", arena.buffer(wanted))
        target = arena.buffer(size)
        assert engine.read("ns/sized", target)  # and nothing was broken by asking
        assert same(arena.value(size), target)

    def test_writing_twice_leaves_one_value(self, engine: Engine, arena: Arena):
        for _ in range(2):
            engine.write("ns/twice", arena.value(5000))
        target = arena.buffer(5000)
        assert engine.read("ns/twice", target)
        assert same(arena.value(5000), target)
        assert [name for name, _ in engine.list()].count("ns/twice") == 1

    def test_exist_answers_in_the_order_of_the_names(self, engine: Engine, arena: Arena):
        there = [f"ns/{number}" for number in range(0, 40, 2)]
        for name in there:
            engine.write(name, arena.value(100))
        asked = [f"ns/{number}" for number in range(40)]
        assert engine.exist(asked) == [name in there for name in asked]
        assert engine.exist([]) == []

    @pytest.mark.parametrize("size", [1000, 9 * MIB])
    def test_deleted_is_gone_and_deleting_again_is_no_error(self, engine: Engine, arena: Arena, size: int):
        engine.write("ns/doomed", arena.value(size))
        engine.write("ns/kept", arena.value(size))
        for _ in range(2):
            engine.delete(["ns/doomed", "ns/never-there"])
            assert engine.exist(["ns/doomed", "ns/kept"]) == [False, True]
            assert not engine.read("ns/doomed", arena.buffer(size))
        engine.delete([])

    def test_list_knows_every_name_and_its_bytes(self, engine: Engine, arena: Arena):
        sizes = {f"{number:032x}/{number:032x}-0-0": 100 + number for number in range(30)}
        sizes["ns/large"] = 9 * MIB
        for name, size in sizes.items():
            engine.write(name, arena.value(size))
        assert dict(engine.list()) == {name: size + 64 for name, size in sizes.items()}

    def test_threads_do_not_mix_values(self, engine: Engine, arena: Arena):
        size = 5 * MIB
        sources = [arena.value(size, seed) for seed in range(4)]
        targets = [arena.buffer(size) for _ in range(4)]

        def work(number: int) -> bool:
            for round_ in range(4):
                engine.write(f"ns/{number}/{round_}", sources[number])
                assert engine.exist([f"ns/{number}/{round_}"]) == [True]
                assert engine.read(f"ns/{number}/{round_}", targets[number])
                assert same(sources[number], targets[number])
            return True

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(4)))
