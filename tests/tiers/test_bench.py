"""`kvcellar bench tiers`: what it promises to print. No figure is judged here."""

import asyncio

from kvcellar.bench import tiers
from kvcellar.bench.tiers import MIB, run_tiers, tiers_table


def test_every_promised_figure_is_there_and_nothing_stays(tmp_path):
    result = run_tiers(folder=tmp_path, tiers=("memory://",), quick=True)
    disk, memory = result["speed"].values()
    assert set(disk) == set(memory) == {"4_mib", "32_mib"}
    assert {"write", "read", "raw_write", "raw_read", "write_of_raw", "read_of_raw"} == set(disk["4_mib"])
    assert len(result["lookup"]) == 3
    assert result["index"]["objects"] == 50_000
    assert tiers_table(result).row_count == 15
    assert list(tmp_path.iterdir()) == []


def test_interrupted_it_removes_its_file_while_the_folder_is_there(tmp_path):
    url = f"disk://{tmp_path / 'disk'}?size={64 * MIB}"

    async def interrupt() -> None:
        endless = asyncio.create_task(tiers._speed(url, 4 * MIB, 16 * MIB, 1_000_000, tmp_path))
        while not (tmp_path / "raw").exists():
            assert not endless.done()
            await asyncio.sleep(0)
        endless.cancel()
        await asyncio.wait([endless])
        assert not (tmp_path / "raw").exists()

    asyncio.run(interrupt())
