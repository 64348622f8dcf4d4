"""Compare policies and write filters on one trace: which runs to make, and what is told of each.

A result is a plain dict, so that the table, the plot and --json show the same figures.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvcellar.errors import BadRequest
from kvcellar.ledger import POLICIES
from kvcellar.simulate.replay import Cellar, ceiling, replay
from kvcellar.simulate.trace import Trace
from kvcellar.tiers.admission import FILTERS, WriteEverything


class Run(NamedTuple):
    policy: str
    write: str  # "" without a disk
    memory: int


class Question(NamedTuple):
    memory: list[int]  # bytes
    disk: int  # bytes; 0: none
    policies: list[str]
    filters: list[str]  # of no effect without a disk
    bytes_per_token: int

    @property
    def runs(self) -> list[Run]:
        filters = self.filters if self.disk else [""]
        return [
            Run(policy, write, memory)
            for policy in self.policies
            for write in filters
            for memory in self.memory
        ]

    def check(self, block_tokens: int) -> None:
        block = self.bytes_per_token * block_tokens
        sizes = [*self.memory, self.disk] if self.disk else self.memory
        if small := [size for size in sizes if size < block]:
            raise BadRequest(
                f"{small[0]:,} bytes hold no block: one has {block_tokens} tokens and takes {block:,} bytes"
                " (--bytes-per-token)"
            )


def compare(
    trace: Trace, question: Question, on_request: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    block = question.bytes_per_token * trace.block_tokens
    return {
        "trace": trace.name,
        "requests": len(trace.prompts),
        "tokens": trace.tokens,
        "blocks": trace.blocks,
        "distinct_blocks": len({key for prompt in trace.prompts for key in prompt.keys}),
        "block_tokens": trace.block_tokens,
        "bytes_per_token": question.bytes_per_token,
        "disk_bytes": question.disk,
        "ceiling": ceiling(trace),
        "runs": [_measure(trace, run, question.disk, block, on_request) for run in question.runs],
    }


def _measure(trace: Trace, run: Run, disk: int, block: int, on_request: Callable[[], None]) -> dict[str, Any]:
    write_filter = FILTERS[run.write]() if run.write else WriteEverything()
    cellar = Cellar(run.memory // block, disk // block, POLICIES[run.policy], write_filter)
    score = replay(trace, cellar, on_request)
    return {
        "policy": run.policy,
        "write": run.write,
        "memory_bytes": run.memory,
        "hit_rate": score.hit_rate,
        "memory_hit_rate": score.memory_hits / max(1, score.asked),
        "disk_hit_rate": score.disk_hits / max(1, score.asked),
        "disk_bytes_written": score.written_blocks * block,
    }


def by_row(result: dict[str, Any]) -> dict[tuple[str, str], Sequence[dict[str, Any]]]:
    """The runs of each policy and write filter, in order of memory."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in result["runs"]:
        rows.setdefault((run["policy"], run["write"]), []).append(run)
    return dict(rows)
