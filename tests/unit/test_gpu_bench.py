"""The parts of the GPU benches that need no GPU: what is run where, what is kept, what is drawn."""

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from bench.gpu import interference, plot, rounds, ttft
from bench.gpu.engine import Answer
from bench.gpu.job import LIMITS
from bench.gpu.prove import add, parts_in_turns, parts_of
from bench.gpu.report import print_report
from bench.gpu.scale import FULL
from bench.gpu.shapes import CONFIGS, stored_bytes
from bench.gpu.tokens import DRAWN, TOKENS, flip_everywhere, turned
from bench.gpu.turns import in_turn, refuse_too_many
from kvcellar.slab import HEADER_MAGIC, OBJECT_HEADER, Slab, SlabShape


def test_every_mode_gets_the_parts_that_make_sense_in_the_order_that_they_need():
    asked = ["flip", "tokens", "ttft", "interference"]
    assert parts_of(asked, "mla", "kvcellar") == ["tokens", "flip"]
    assert parts_of(asked, "hybrid", "kvcellar") == ["tokens"]
    assert parts_of(asked, "mla", "offload") == []
    assert parts_in_turns(asked) == ["interference", "ttft"]
    assert parts_in_turns(["tokens", "pair"]) == []


def test_what_other_engines_found_out_stays_and_an_error_goes_when_it_is_mended(tmp_path):
    out = tmp_path / "prove.json"
    add(out, {"model": "mla", "mode": "kvcellar", "rows": [{"tokens": 1}], "error": "no end"})
    add(out, {"model": "mla", "mode": "offload", "rows": [{"tokens": 2}]})
    add(out, {"model": "mla", "mode": "kvcellar", "tokens": {"ok": True}})
    assert json.loads(out.read_text()) == [
        {"model": "mla", "mode": "offload", "rows": [{"tokens": 2}]},
        {"model": "mla", "mode": "kvcellar", "rows": [{"tokens": 1}], "tokens": {"ok": True}},
    ]


def test_an_error_of_a_part_that_takes_turns_outlives_the_other_parts_and_they_outlive_it(tmp_path):
    out = tmp_path / "prove.json"
    mla = {"model": "mla", "mode": "kvcellar"}
    add(out, mla | {"errors": {"ttft": "ended with 1", "interference": "ended with 1"}})
    add(out, mla | {"errors": {"flip": "took too long"}})
    (all_three,) = add(out, mla | {"errors": {"ttft": "no end"}})
    assert all_three["errors"] == {"interference": "ended with 1", "flip": "took too long", "ttft": "no end"}
    (two,) = add(out, mla | {"rows": [{"tokens": 1}]})
    assert two["errors"] == {"interference": "ended with 1", "flip": "took too long"}
    (one,) = add(out, mla | {"tokens": {"ok": True}})
    assert one["errors"] == {"interference": "ended with 1"}
    (none,) = add(out, mla | {"interference": {}})
    assert none == mla | {"rows": [{"tokens": 1}], "tokens": {"ok": True}, "interference": {}}


@pytest.mark.parametrize("key", ["rows", "cold"])
def test_a_length_that_is_measured_again_replaces_that_length_only(key, tmp_path):
    out = tmp_path / "prove.json"
    mla = {"model": "mla", "mode": "kvcellar"}
    add(out, mla | {key: [{"tokens": 2, "cold": 1.0}, {"tokens": 8, "cold": 2.0}]})
    (both,) = add(out, mla | {key: [{"tokens": 2, "cold": 3.0}]})
    assert both[key] == [{"tokens": 2, "cold": 3.0}, {"tokens": 8, "cold": 2.0}]


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
    assert found["over_recompute"] == 15.0
    assert found["over"] == 12.0
    assert found["of_floor"] == pytest.approx(37 / 25)
    assert (found["cold"], found["warm"], found["kept"], found["floor"]) == (110.0, 37.0, 20.0, 25.0)
    assert found["cached"] == [2000] * 3
    assert found["same"]


def test_how_sure_a_difference_is_comes_from_its_middle_half():
    """Of 100 rounds one took a second; the others are spread over 4 ms."""
    alone = [{"cold": 50.0}] * 100
    rounds = [{"cold": 51.0 + number % 5} for number in range(99)] + [{"cold": 1000.0}]
    found = ttft.row(rounds, alone, bus_ms=None)
    assert found["over_recompute"] == 3.0
    assert 0.2 < found["give_or_take"] < 0.6


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


def test_rounds_of_several_runs_are_compared_one_by_one():
    def run(**loads: list[float]) -> list[dict]:
        each = {"cold": 50.0, "kept": 20.0, "cached": 9, "same": True}
        taken = {mode: [each | {"warm": warm} for warm in times] for mode, times in loads.items()}
        rows = {mode: ttft.row(its, [], bus_ms=5.0) | {"tokens": 10} for mode, its in taken.items()}
        return [{"model": "mla", "mode": mode, "rows": [row]} for mode, row in rows.items()]

    slower = run(kvcellar=[60.0, 30.0], offload=[65.0, 29.0], lmcache=[70.0])
    nothing_to_compare = [entry | {"model": "llama8b"} for entry in run(offload=[1.0])]
    found = rounds.gather([run(kvcellar=[30.0], offload=[33.0]), slower, nothing_to_compare])
    ahead = {"offload": [-3.0, -5.0, 1.0], "lmcache": [-10.0]}
    assert found == {("mla", 10): (ahead, [1.2, 2.4, 1.2], [5.0, 35.0, 5.0], [])}
    assert rounds.line(("mla", 10), found["mla", 10]).split("  ")[-1] == "of floor 1.200, over 5.0 ms"


def test_what_storing_cost_is_taken_from_all_rounds_of_all_parts():
    def row(*cold: float) -> dict:
        return {"tokens": 10} | ttft.row([{"cold": ms} for ms in cold], [], bus_ms=None)

    alone = {"model": "mla", "mode": "recompute", "rows": [row(50.0, 60.0)], "cold": [row(40.0)]}
    ours = {"model": "mla", "mode": "kvcellar", "rows": [row(51.0, 60.0)], "cold": [row(43.0, 99.0)]}
    found = rounds.gather([[alone, ours], [ours]])
    assert found["mla", 10].stored == [1.0, 0.0, 3.0]
    assert rounds.line(("mla", 10), found["mla", 10]).split("  ")[-1] == "storing 1.0 ms, 3 rounds"


def beside(slow: float, **spells: float) -> dict[str, dict]:
    """Neighbours, on a host that is so much slower: tokens per second of each."""
    found = {}
    for name, rate in spells.items():
        steps = {"gap_ms": 16.0 * slow, "gap_p99_ms": 30.0 * slow, "gap_max_ms": 40.0 * slow}
        counts = {"asked": 0, "answered": [], "preempted": 0, "loaded": 0}
        found[name] = {"tokens_per_s": rate / slow} | counts | steps
    if "loads" in spells:
        found["loads"] |= {"asked": 2, "answered": [(0.3, 47_984), (0.5 * slow, 48_000)], "loaded": 96_000}
    return found


def test_decoding_beside_loads_is_compared_with_decoding_alone_just_before():
    rounds = [beside(1, alone=2000, loads=1200), beside(2, alone=2000, loads=1400, stores=500)]
    found = interference.summary(rounds)
    assert found["alone"]["tokens_per_s"] == 1500
    assert found["loads"]["of_alone"] == pytest.approx(0.65)
    assert found["stores"]["of_alone"] == pytest.approx(0.25)
    assert (found["loads"]["gap_ms"], found["loads"]["gap_max_ms"]) == (24.0, 80.0)
    assert (found["loads"]["asked"], found["loads"]["answered"]) == (4, 4)
    assert (found["loads"]["answered_ms"], found["loads"]["cached"]) == (400.0, 47_984)
    assert found["loads"]["loaded"] == 48_000
    assert "asked" not in found["alone"]
    assert found["pairs"] == rounds


def test_the_table_of_interference_says_what_was_preempted_or_not_answered(capsys):
    troubled = beside(1, alone=2000, loads=1200, stores=500)
    troubled["loads"] |= {"preempted": 3, "asked": 4}
    rounds = {"recompute": beside(1, alone=2000, stores=500), "kvcellar": troubled}
    entries = [
        {"model": "llama8b", "mode": mode, "interference": interference.summary([one])}
        for mode, one in rounds.items()
    ]
    assert print_report(entries)
    without, with_loads = (line.split() for line in capsys.readouterr().out.splitlines()[1:3])
    assert without == ["llama8b", "recompute", "2000", "500", "0.250", "40", "40"]
    assert with_loads[:7] == ["llama8b", "kvcellar", "2000", "1200", "0.600", "500", "0.250"]
    assert with_loads[7:12] == ["40", "40", "40", "400", "24000"]
    assert with_loads[12:] == ["2", "NOT", "ANSWERED", "3", "PREEMPTED"]


def test_every_load_beside_others_is_whole_and_nobody_is_preempted_for_it():
    token, seconds = stored_bytes("llama8b", 1), FULL.seconds
    pool = FULL.in_turns["llama8b"]["kv_cache_memory_bytes"] // token
    # What vLLM keeps of a prompt is its beginning, until there is room for no more than two.
    assert pool < 2 * FULL.loaded
    # 8,000 tokens per second: a step reads all weights, which takes 4 ms. Each pair ends with some waiting.
    pairs = interference.SPELLS["loads"] * (seconds["alone"] + seconds["loads"] + 0.3)
    decoded = FULL.decoders * 130 + 8_000 * pairs
    assert FULL.long + decoded < pool
    # All that is stored in a round; the next one begins by asking for the prompts again.
    _, gib = FULL.cache_of("llama8b", beside=True)
    assert (interference.LOADED * FULL.loaded + decoded) * token < gib << 30


@pytest.mark.parametrize(("model", "fit"), [("llama8b", 4), ("mla", 4), ("hybrid", 3)])
def test_engines_that_do_not_fit_the_gpu_together_are_refused(model, fit):
    each, h200 = FULL.turns_bytes(model), 139 << 30
    refuse_too_many(model, fit, each, h200)
    with pytest.raises(RuntimeError, match="modes at once"):
        refuse_too_many(model, h200 // each + 1, each, h200)


def test_the_cache_of_each_mode_holds_the_longest_prompt():
    for model in CONFIGS:
        least, wanted = FULL.cache_of(model, beside=False)
        assert stored_bytes(model, FULL.long) < least << 30 <= wanted << 30


def test_one_bit_of_every_object_is_flipped_and_nothing_else(tmp_path):
    shape = SlabShape(slots=100, slot_bytes=8192)
    path = tmp_path / "0.slab"
    path.write_bytes(bytes(shape.file_bytes))
    used = [0, 3, 99]
    with path.open("r+b") as file:
        slab = Slab(file.fileno(), shape)
    headers = slab.headers.view(OBJECT_HEADER)
    for slot in used:
        headers[slot]["magic"], headers[slot]["object_bytes"] = HEADER_MAGIC, 5000
    before = np.frombuffer(slab.memory, dtype=np.uint8).copy()
    assert flip_everywhere(tmp_path) == len(used)
    changed = np.unpackbits(np.frombuffer(slab.memory, dtype=np.uint8) ^ before)
    places = np.flatnonzero(changed) // 8 - shape.header_bytes
    assert (places // shape.slot_bytes).tolist() == used
    assert (places % shape.slot_bytes < 5000).all()


def test_the_tokens_of_the_slowest_model_take_half_of_what_they_may():
    forward_s, prompts = 0.117, 20  # Gemma's, and prove.py's
    assert 2 * (DRAWN + 3) * prompts * TOKENS * forward_s < LIMITS["tokens"]


def answer(tokens: list[int], gaps: list[float]) -> Answer:
    return Answer(1.0, 0, tokens, [(-1.0, gap) for gap in gaps])


def test_a_difference_is_harmless_only_where_two_tokens_were_nearly_as_likely():
    assert not turned(answer([1, 2], [1, 1]), answer([1, 2], [1, 1]))
    assert turned(answer([1, 2, 3], [1, 0.01, 1]), answer([1, 9, 8], [1, 1, 1]))
    assert not turned(answer([1, 2, 3], [1, 1, 0.01]), answer([1, 9, 8], [1, 1, 1]))


def run(mode: str, cached: int = 2000) -> dict[str, object]:
    row = {"tokens": 2000, "cold": 50.0}
    more = {"warm": 30.0, "kept": 20.0, "floor": 28.0 + cached / 1000, "cached": [2000, cached]}
    more["times"] = {"kept": [20.0, 18.0, 25.0]}
    return {"model": "llama8b", "mode": mode, "rows": [row | (more if mode != "recompute" else {})]}


def test_the_figure_has_measured_loads_of_whole_prompts_only():
    entries = [run("recompute"), run("offload"), run("lmcache", cached=1000), run("kvcellar")]
    found = plot.figures(entries, "llama8b")
    assert found == {2000: {"recompute": 50.0, "offload": 30.0, "kvcellar": 30.0, "floor": 28.0}}
    figure = ET.fromstring(plot.draw(found, "llama8b", "here.json"))
    assert "here.json" in "".join(figure.itertext())
    assert "30 ms instead of 50 ms" in "".join(figure.itertext())


def test_a_figure_of_several_runs_is_refused():
    with pytest.raises(ValueError, match="lmcache"):
        plot.figures([run("recompute"), run("offload"), run("kvcellar")], "llama8b")
