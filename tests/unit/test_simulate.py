"""The simulator against plain models of caches, and what it makes of good and bad traces."""

import itertools
import json
import sys
from collections import OrderedDict
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.answers import CHUNK_TOKENS, AlsoOrphans, make_traffic
from bench.answers import replay as replay_answers
from kvcellar.cli import bench
from kvcellar.cli import main as cli
from kvcellar.errors import BadRequest
from kvcellar.ledger import Ledger
from kvcellar.ledger.policy import POLICIES, DefaultPolicy, LeastRecentlyUsed
from kvcellar.simulate import BLOCK_TOKENS, FILTERS, KINDS, encode, make_requests, make_trace, read_trace
from kvcellar.simulate.replay import Cellar, ceiling, replay
from kvcellar.simulate.trace import EXAMPLE, Prompt, Request, Trace
from kvcellar.tiers.admission import WriteEverything, WriteReused

BLOCK = 512 * 131072


def trace_of(*prompts, tokens=4):
    """Prompts of full blocks, one after the other."""
    return make_trace(
        "test", [Request(n, tokens * len(ids), list(ids)) for n, ids in enumerate(prompts)], tokens
    )


def hits(cellar, trace):
    return [cellar.serve(prompt.keys) for prompt in trace.prompts]


def in_memory(blocks, policy=DefaultPolicy):
    return Cellar(blocks, 0, policy, WriteEverything())


PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=40)


# -- replaying


def test_a_hit_is_the_longest_prefix_that_was_seen():
    trace = trace_of([1, 2, 3], [1, 2, 4], [2, 3], [1, 2, 4, 5])
    assert hits(in_memory(100), trace) == [0, 2, 0, 3]


@settings(deadline=None)
@given(prompts=PROMPTS)
def test_a_memory_for_everything_reaches_the_ceiling(prompts):
    trace = trace_of(*prompts)
    for policy in POLICIES.values():
        assert replay(trace, in_memory(200, policy)).hit_rate == ceiling(trace)


def test_the_default_learns_how_much_newcomers_deserve():
    """First requests that come back once, a while later; then four long prompts again and again, beside
    others that never come back.
    """
    cellar, other = in_memory(400), itertools.count(1000)
    once = [[next(other)] for _ in range(2000)]
    again = [hits(cellar, trace_of(once[n], once[n - 90]))[1] for n in range(90, 2000)]
    assert sum(again[-100:]) > 90  # it finds the least that will do
    prompts = [[100 * number + block for block in range(75)] for number in range(4)]
    found = []
    for turn in range(80):
        found += hits(cellar, trace_of(prompts[turn % 4], *([next(other)] for _ in range(20))))[:1]
    assert found[-20:] == [75] * 20


@settings(deadline=None)
@given(prompts=st.lists(st.integers(0, 9), max_size=60))
def test_lru_is_lru(prompts):
    """Prompts of one block have no parents, so an ordered dict tells what to expect."""
    order, expected = OrderedDict[int, None](), list[int]()
    for block in prompts:
        expected.append(int(block in order))
        order[block] = None
        order.move_to_end(block)
        if len(order) > 4:
            order.popitem(last=False)
    assert hits(in_memory(4, LeastRecentlyUsed), trace_of(*([block] for block in prompts))) == expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("write", FILTERS)
@settings(deadline=None)
@given(prompts=PROMPTS)
def test_memory_and_disk_keep_their_size_and_their_books(policy, write, prompts):
    write_filter = WriteReused(window=20) if write == "reused" else FILTERS[write]()  # the full one is 16 MiB
    cellar = Cellar(3, 6, POLICIES[policy], write_filter)
    for prompt in trace_of(*prompts).prompts:
        assert cellar.serve(prompt.keys) <= len(prompt.keys)
        for store, slots in ((cellar.memory, 3), (cellar.disk, 6)):
            assert len(store.shelf) <= slots
            store.shelf.check({})


def test_what_fell_out_of_memory_comes_back_from_disk():
    cellar = Cellar(2, 100, DefaultPolicy, WriteEverything())
    score = replay(trace_of([1, 2], [3, 4], [1, 2]), cellar)
    assert (score.memory_hits, score.disk_hits, score.written_blocks) == (0, 8, 4)


def test_a_prefix_may_be_half_in_memory_and_half_on_disk():
    cellar = Cellar(3, 100, DefaultPolicy, WriteEverything())
    score = replay(trace_of([1, 2, 3], [4], [1, 2, 3]), cellar)
    assert (score.memory_hits, score.disk_hits) == (8, 4)


def test_a_disk_that_is_written_on_reuse_holds_nothing_that_was_seen_once():
    cellar = Cellar(2, 100, DefaultPolicy, WriteReused())
    hits(cellar, trace_of([1, 2], [1, 2], [3, 4], [5, 6]))
    assert len(cellar.disk.shelf) == 2
    assert hits(cellar, trace_of([1, 2])) == [2]


def test_a_prompt_larger_than_memory_keeps_its_beginning():
    assert hits(in_memory(2), trace_of([1, 2, 3], [1, 2, 3])) == [0, 2]


# -- traces


def test_only_full_blocks_are_cached():
    request = Request(0, 1100, [1, 2, 3])
    trace = make_trace("test", [request, request], 512)
    assert [len(prompt.keys) for prompt in trace.prompts] == [2, 2]
    assert ceiling(trace) == 1024 / 2200


def test_an_id_counts_with_all_before_it():
    one, other = trace_of([1, 7], [2, 7]).prompts
    assert one.keys[1] != other.keys[1]


def test_requests_are_replayed_in_order_of_time():
    late, early = Request(9.5, 4, [1]), Request(2, 8, [2, 3])
    assert [prompt.tokens for prompt in make_trace("test", [late, early], 4).prompts] == [8, 4]


def test_the_example_is_a_good_trace(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{EXAMPLE}\n\n{EXAMPLE}\n")
    assert read_trace(file, 512).tokens == 2200


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "truncated"),
        ("\xff", "malformed"),
        ("[]", "Expected `object`"),
        ('{"more": ' + "[" * 100_000, "recursion"),
        ('{"timestamp": 0, "input_length": 5}', "`hash_ids`"),
        ('{"timestamp": -1, "input_length": 5, "hash_ids": []}', "$.timestamp"),
        ('{"timestamp": 0, "input_length": "5", "hash_ids": []}', "$.input_length"),
        ('{"timestamp": 0, "input_length": 600, "hash_ids": ["a"]}', "$.hash_ids[0]"),
        ('{"timestamp": 0, "input_length": 600, "hash_ids": []}', "0 hash_ids for an input_length of 600"),
        ('{"timestamp": 0, "input_length": 600, "hash_ids": [1, 2, 3]}', "blocks of 512 tokens make it 2"),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected(tmp_path, line, words):
    file = tmp_path / "trace.jsonl"
    file.write_bytes(f"{EXAMPLE}\n".encode() + line.encode("latin-1"))
    with pytest.raises(BadRequest) as refusal:
        read_trace(file, 512)
    assert f"{file}, line 2: " in str(refusal.value)
    assert words in str(refusal.value)


@pytest.mark.parametrize("kind", KINDS)
def test_made_up_traffic_is_a_good_trace_and_the_same_for_the_same_seed(kind, tmp_path):
    requests = make_requests(kind, 3)
    assert requests == make_requests(kind, 3) != make_requests(kind, 4)
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(encode, requests)))
    assert read_trace(file, BLOCK_TOKENS) == make_trace(file.name, requests, BLOCK_TOKENS)
    assert 0.3 < ceiling(read_trace(file, BLOCK_TOKENS)) < 0.95


# -- the commands


@pytest.fixture
def kvcellar(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvcellar", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli()
        return end.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def chat(tmp_path, kvcellar):
    code, lines, _ = kvcellar("trace", "chat", "--seed", 7)
    assert code == 0
    file = tmp_path / "chat.jsonl"
    file.write_text(lines)
    return file


def test_a_table_is_shown_where_the_width_is_unknown(kvcellar, chat, monkeypatch, capsys):
    shown = []
    for columns in ("80", "0"):
        monkeypatch.setenv("COLUMNS", columns)
        shown.append(kvcellar("simulate", chat, "--policy", "lru")[1])
        bench._show({}, as_json=False, table=lambda _: "a table")
        assert capsys.readouterr().out == "a table\n"
    assert shown[0] == shown[1] != ""


def test_simulate_shows_a_row_for_each_policy_and_a_column_for_each_size(kvcellar, chat):
    code, shown, _ = kvcellar("simulate", chat)
    assert code == 0
    assert "131,072 bytes of KV per token" in shown
    assert [shown.count(f"{size} GB  ") for size in (5, 10, 30)] == [1, 1, 1]
    assert all(f" {name} " in shown for name in POLICIES)


def test_simulate_tells_the_wear_of_a_disk(kvcellar, chat):
    code, text, _ = kvcellar("simulate", chat, "--memory", "5GB", "--disk", "100GB", "--json")
    runs = {(run["policy"], run["write"]): run for run in json.loads(text)["runs"]}
    assert code == 0
    assert len(runs) == len(POLICIES) * len(FILTERS)
    everything, reused = runs["s3-fifo", "everything"], runs["s3-fifo", "reused"]
    assert everything["disk_bytes_written"] > reused["disk_bytes_written"] > 0
    assert everything["disk_bytes_written"] % BLOCK == 0
    parts = everything["memory_hit_rate"] + everything["disk_hit_rate"]
    assert parts == pytest.approx(everything["hit_rate"])


def test_simulate_draws(kvcellar, chat, tmp_path):
    drawing = tmp_path / "plot.svg"
    code, _, _ = kvcellar("simulate", chat, "--memory", "1GB,10GB", "--disk", "20GB", "--plot", drawing)
    words = [node.text for node in ElementTree.parse(drawing).iter() if node.text]
    assert code == 0
    assert any(word.startswith("s3-fifo, everything") for word in words)


def test_any_name_of_a_trace_is_shown_and_drawn(kvcellar, tmp_path):
    odd = tmp_path / "[v1]:cat:\udcff"
    odd.write_text(EXAMPLE.replace("1100", "1536"))
    code, shown, _ = kvcellar("simulate", odd, "--plot", tmp_path / "odd.svg")
    assert code == 0
    assert shown.startswith("[v1]:cat:\ufffd: 1 requests")


def test_help_names_every_policy_filter_and_kind(kvcellar):
    _, shown, _ = kvcellar("simulate", "--help")
    assert all(name in shown for name in (*POLICIES, *FILTERS))
    _, shown, _ = kvcellar("trace", "--help")
    assert all(f"\n  {name} " in shown for name in KINDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "lru,fifo"], "--policy 'fifo' is none of s3-fifo"),
        (["--disk", "9GB", "--write", "none"], "--write 'none' is none of everything"),
        (["--memory", "5GB,many"], "--memory 'many': expected a size such as"),
        (["--memory", "5MB"], "5,000,000 bytes hold no block: one has 512 tokens and takes 67,108,864 bytes"),
        (["--plot", "/nowhere/x.svg"], "cannot write /nowhere/x.svg: No such file"),
    ],
)
def test_bad_options_are_refused_with_what_is_possible(kvcellar, chat, arguments, words):
    code, shown, errors = kvcellar("simulate", chat, "--memory", "5GB", *arguments)
    assert (code, shown) == (2, "")
    assert words in errors
    assert errors.count("\n") == 1


def test_bad_traces_are_refused_in_a_line(kvcellar, tmp_path):
    code, _, errors = kvcellar("simulate", tmp_path / "none.jsonl")
    assert (code, errors.count("\n")) == (2, 1)
    assert "cannot read the trace" in errors
    (tmp_path / "empty.jsonl").touch()
    code, _, errors = kvcellar("simulate", tmp_path / "empty.jsonl")
    assert code == 2
    assert "holds no requests" in errors
    code, _, errors = kvcellar("trace", "poems")
    assert code == 2
    assert "'poems' is none of chat, rag, agents, scan, few" in errors


# -- answers, as bench/answers.py replays them


def test_an_answer_is_found_by_the_prompt_that_goes_on_from_it():
    traffic = make_traffic("chat", 1)
    prompts = Trace(
        "chat", CHUNK_TOKENS, [Prompt(asked.tokens, asked.keys[: asked.chunks]) for asked in traffic]
    )
    assert replay_answers(traffic, Ledger(1, 1 << 60), 150_000).found > 100 * ceiling(prompts) + 5


def test_where_memory_is_short_some_answers_are_not_stored_to_their_end():
    traffic = make_traffic("answers", 1)[:800]
    all_of_them = replay_answers(traffic, AlsoOrphans(1, 1 << 60), 600)
    assert replay_answers(traffic, Ledger(1, 1 << 60), 600).stored < all_of_them.stored
