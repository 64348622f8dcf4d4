"""`kvcellar bench tiers`: what it promises to print. No figure is judged here."""

from kvcellar.bench.tiers import run_tiers, tiers_table


def test_every_promised_figure_is_there_and_nothing_stays(tmp_path):
    result = run_tiers(folder=tmp_path, tiers=("memory://",), quick=True)
    disk, memory = result["speed"].values()
    assert set(disk) == set(memory) == {"4_mib", "32_mib"}
    assert {"write", "read", "raw_write", "raw_read", "write_of_raw", "read_of_raw"} == set(disk["4_mib"])
    assert len(result["lookup"]) == 3
    assert result["index"]["objects"] == 50_000
    assert tiers_table(result).row_count == 15
    assert list(tmp_path.iterdir()) == []
