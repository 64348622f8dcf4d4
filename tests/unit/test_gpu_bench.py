"""The parts of the GPU benches that need no GPU: what is run where, what is kept, what is drawn."""

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from bench.gpu import plot, ttft
from bench.gpu.engine import Answer
from bench.gpu.prove import add, parts_of
from bench.gpu.report import print_report
from bench.gpu.scale import FULL
from bench.gpu.shapes import CONFIGS, stored_bytes
from bench.gpu.tokens import flip_everywhere, turned
from bench.gpu.turns import in_turn, refuse_too_many
from kvcellar.slab import HEADER_MAGIC, Slab, SlabShape


def test_every_mode_gets_the_parts_that_make_sense_in_the_order_that_they_need():
    asked = ["flip", "tokens", "ttft", "interference"]
    assert parts_of(asked, "mla", "kvcellar") == ["interference", "tokens", "flip"]
    assert parts_of(asked, "hybrid", "kvcellar") == ["interference", "tokens"]
    assert parts_of(asked, "mla", "offload") == ["interference"]
    assert parts_of(["tokens", "ttft"], "mla", "lmcache") == []


def test_what_other_engines_found_out_stays_and_an_error_goes_when_it_is_mended(tmp_path):
    out = tmp_path / "prove.json"
    add(out, {"model": "mla", "mode": "kvcellar", "rows": [1], "error": "no end"})
    add(out, {"model": "mla", "mode": "offload", "rows": [2]})
    add(out, {"model": "mla", "mode": "kvcellar", "tokens": {"ok": True}})
    assert json.loads(out.read_text()) == [
        {"model": "mla", "mode": "offload", "rows": [2]},
        {"model": "mla", "mode": "kvcellar", "rows": [1], "tokens": {"ok": True}},
    ]


def test_an_error_of_ttft_outlives_the_other_parts_and_they_outlive_it(tmp_path):
    out = tmp_path / "prove.json"
    mla = {"model": "mla", "mode": "offload"}
    add(out, mla | {"errors": {"ttft": "ended with 1"}})
    add(out, mla | {"errors": {"interference": "took too long"}})
    (both,) = add(out, mla | {"errors": {"ttft": "no end"}})
    assert both["errors"] == {"interference": "took too long", "ttft": "no end"}
    (one,) = add(out, mla | {"rows": [1]})
    assert one["errors"] == {"interference": "took too long"}
    assert add(out, mla | {"interference": {}}) == [mla | {"rows": [1], "interference": {}}]


def test_every_mode_comes_first_and_last_as_often_as_the_others():
    orders = [in_turn("abc", number) for number in range(6)]
    assert orders == [list("abc"), list("bca"), list("cab")] * 2
    assert in_turn([], 1) == []


def test_what_is_compared_is_compared_within_a_round():
    """The host is half as fast in the second round: medians of each figure by itself would be far off."""
    rounds = [
        {"cold": 110.0 * slow, "warm": 32.0 * slow + 5, "kept": 20.0 * slow, "cached": 2000, "same": True}
        for slow in (1, 2, 1)
    ]
    alone = [{"cold": 100.0}, {"cold": 200.0}]
    found = ttft.row(rounds, alone, bus_ms=5.0)
    assert found["of_recompute"] == pytest.approx(1.1)
    assert found["over"] == 12.0
    assert found["of_floor"] == pytest.approx(37 / 25)
    assert (found["cold"], found["warm"], found["kept"], found["floor"]) == (110.0, 37.0, 20.0, 25.0)
    assert found["cached"] == [2000] * 3
    assert found["same"]


def test_a_row_says_nothing_of_what_was_not_measured():
    assert ttft.row([{"cold": 3.0}], [], bus_ms=5.0) == {"cold": 3.0, "times": {"cold": [3.0]}}
    loaded = {"cold": 3.0, "warm": 2.0, "kept": 1.0, "cached": 9, "same": True}
    assert not {"floor", "over", "of_floor", "of_recompute"} & set(ttft.row([loaded], [], bus_ms=None))


def test_the_table_has_the_modes_of_a_length_side_by_side_and_marks_the_fastest_load(capsys):
    entries = []
    for mode, warm in (("recompute", None), ("offload", 31.0), ("kvcellar", 30.0)):
        one = {"cold": 50.0} | ({"warm": warm, "kept": 20.0, "cached": 9, "same": True} if warm else {})
        rows = [{"tokens": tokens} | ttft.row([one], [{"cold": 50.0}], bus_ms=5.0) for tokens in (10, 20)]
        entries.append({"model": "mla", "mode": mode, "rows": rows})
    assert print_report(entries)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:7]]
    assert lines == [
        ["mla", tokens, *rest]
        for tokens in ("10", "20")
        for rest in (
            ["recompute", "50.0", "1.000"],
            ["offload", "50.0", "1.000", "31.0", "20.0", "25.0", "1.240", "6.0", "[9]"],
            ["kvcellar", "50.0", "1.000", "30.0*", "20.0", "25.0", "1.200", "5.0", "[9]"],
        )
    ]


@pytest.mark.parametrize(("model", "fit"), [("llama8b", 4), ("mla", 4), ("hybrid", 3)])
def test_engines_that_do_not_fit_the_gpu_together_are_refused(model, fit):
    each, h200 = FULL.turns_bytes(model), 139 << 30
    refuse_too_many(model, fit, each, h200)
    with pytest.raises(RuntimeError, match="modes at once"):
        refuse_too_many(model, h200 // each + 1, each, h200)


def test_the_cache_of_each_mode_holds_the_longest_prompt():
    for model in CONFIGS:
        least, wanted = FULL.turns_cache(model)
        assert stored_bytes(model, FULL.long) < least << 30 <= wanted << 30


def test_one_bit_of_every_object_is_flipped_and_nothing_else(tmp_path):
    shape = SlabShape(slots=100, slot_bytes=8192)
    path = tmp_path / "0.slab"
    path.write_bytes(bytes(shape.file_bytes))
    used = [0, 3, 99]
    with path.open("r+b") as file:
        slab = Slab(file.fileno(), shape)
    for slot in used:
        slab.headers[slot]["magic"], slab.headers[slot]["object_bytes"] = HEADER_MAGIC, 5000
    before = np.frombuffer(slab.memory, dtype=np.uint8).copy()
    assert flip_everywhere(tmp_path) == len(used)
    changed = np.unpackbits(np.frombuffer(slab.memory, dtype=np.uint8) ^ before)
    places = np.flatnonzero(changed) // 8 - shape.header_bytes
    assert (places // shape.slot_bytes).tolist() == used
    assert (places % shape.slot_bytes < 5000).all()


def answer(tokens: list[int], gaps: list[float]) -> Answer:
    return Answer(1.0, 0, tokens, [(-1.0, gap) for gap in gaps])


def test_a_difference_is_harmless_only_where_two_tokens_were_nearly_as_likely():
    assert not turned(answer([1, 2], [1, 1]), answer([1, 2], [1, 1]))
    assert turned(answer([1, 2, 3], [1, 0.01, 1]), answer([1, 9, 8], [1, 1, 1]))
    assert not turned(answer([1, 2, 3], [1, 1, 0.01]), answer([1, 9, 8], [1, 1, 1]))


def run(mode: str, cached: int = 2000) -> dict[str, object]:
    row = {"tokens": 2000, "cold": 50.0}
    more = {"warm": 30.0, "floor": 28.0 + cached / 1000, "cached": [2000, cached]}
    return {"model": "llama8b", "mode": mode, "rows": [row | (more if mode != "recompute" else {})]}


def test_the_figure_has_measured_loads_of_whole_prompts_only():
    entries = [run("recompute"), run("offload"), run("lmcache", cached=1000), run("kvcellar")]
    found = plot.figures(entries, "llama8b")
    assert found == {2000: {"recompute": 50.0, "offload": 30.0, "kvcellar": 30.0, "floor": 30.0}}
    figure = ET.fromstring(plot.draw(found, "llama8b", "here.json"))
    assert "here.json" in "".join(figure.itertext())
    assert "30 ms instead of 50 ms" in "".join(figure.itertext())


def test_a_figure_of_several_runs_is_refused():
    with pytest.raises(ValueError, match="lmcache"):
        plot.figures([run("recompute"), run("offload"), run("kvcellar")], "llama8b")
