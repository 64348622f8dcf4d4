"""The parts of the GPU benches that need no GPU: what is run where, what is kept, what is drawn."""

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from bench.gpu import plot
from bench.gpu.engine import Answer
from bench.gpu.prove import add, parts_of
from bench.gpu.tokens import flip_everywhere, turned
from kvcellar.slab import HEADER_MAGIC, Slab, SlabShape


def test_every_mode_gets_the_parts_that_make_sense_in_the_order_that_they_need():
    asked = ["flip", "tokens", "ttft", "interference"]
    assert parts_of(asked, "mla", "kvcellar") == ["interference", "ttft", "tokens", "flip"]
    assert parts_of(asked, "hybrid", "kvcellar") == ["interference", "ttft", "tokens"]
    assert parts_of(asked, "mla", "offload") == ["interference", "ttft"]
    assert parts_of(["tokens"], "mla", "lmcache") == []


def test_what_other_engines_found_out_stays_and_an_error_goes_when_it_is_mended(tmp_path):
    out = tmp_path / "prove.json"
    add(out, {"model": "mla", "mode": "kvcellar", "rows": [1], "error": "no end"})
    add(out, {"model": "mla", "mode": "offload", "rows": [2]})
    add(out, {"model": "mla", "mode": "kvcellar", "tokens": {"ok": True}})
    assert json.loads(out.read_text()) == [
        {"model": "mla", "mode": "offload", "rows": [2]},
        {"model": "mla", "mode": "kvcellar", "rows": [1], "tokens": {"ok": True}},
    ]


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
