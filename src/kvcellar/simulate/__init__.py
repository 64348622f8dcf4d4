"""Simulate: replay traces against the server's own eviction and write policies, without KV."""

from kvcellar.ledger import POLICIES
from kvcellar.simulate.compare import Question, compare
from kvcellar.simulate.plot import draw
from kvcellar.simulate.table import simulate_table
from kvcellar.simulate.trace import Trace, encode, make_trace, read_trace
from kvcellar.simulate.workloads import BLOCK_TOKENS, KINDS, make_requests, make_talks
from kvcellar.tiers.admission import FILTERS

__all__ = [
    "BLOCK_TOKENS",
    "FILTERS",
    "KINDS",
    "POLICIES",
    "Question",
    "Trace",
    "compare",
    "draw",
    "encode",
    "make_requests",
    "make_talks",
    "make_trace",
    "read_trace",
    "simulate_table",
]
