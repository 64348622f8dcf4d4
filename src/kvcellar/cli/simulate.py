"""`kvcellar simulate` and `kvcellar trace`: which cache would have helped, before buying it."""

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcellar.config import parse_bytes
from kvcellar.errors import BadRequest

if TYPE_CHECKING:
    from kvcellar.simulate import Question, Trace

LLAMA_8B = 131072  # bytes: 32 layers, 8 KV heads, 128 numbers of 2 bytes, key and value

_MOST = 1 << 24


def simulate(
    trace: Annotated[Path, typer.Argument(help="Requests, one JSON object a line; /dev/stdin works too.")],
    memory: Annotated[str, typer.Option(help="Sizes of memory to try.")] = "5GB,10GB,30GB",
    disk: Annotated[str, typer.Option(help="Size of a disk below the memory, e.g. 100GB; 0: none.")] = "0",
    policy: Annotated[
        str, typer.Option(help="What to evict: s3-fifo,second-chance,lru or some of them. [default: all]")
    ] = "",
    write: Annotated[
        str, typer.Option(help="What to write to disk: everything,reused or one of them. [default: all]")
    ] = "",
    bytes_per_token: Annotated[
        int,
        typer.Option(min=1, max=_MOST, help="KV of one token; Llama 3 8B in bfloat16 has 131072."),
    ] = LLAMA_8B,
    block_tokens: Annotated[
        int, typer.Option(min=1, max=_MOST, help="Tokens of a block in the trace.")
    ] = 512,
    plot: Annotated[Path | None, typer.Option(help="Draw it as well, into this SVG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Replay a trace of requests: how many prompt tokens would a cache of this size have found?

    A line of the trace is one request: when, how long, and one id for each block of its prompt. Equal ids
    after equal ids are equal text, which need not be computed again. docs/policies.md says how to make a
    trace of your own traffic; `kvcellar trace` makes one up.

    \b
    kvcellar trace chat > chat.jsonl
    kvcellar simulate chat.jsonl                              memory of 5, 10 and 30 GB
    kvcellar simulate chat.jsonl --memory 10GB --disk 100GB   what a disk adds, and its wear
    kvcellar simulate chat.jsonl --memory 1GB,3GB,10GB,30GB,100GB --plot chat.svg

    Evictions are decided by the server's own code. Requests come one after the other and nothing takes time,
    so this is how much can be found at best, not how fast.
    """
    from kvcellar import simulate as library  # noqa: PLC0415 - numpy takes its time

    if plot and plot.suffix.lower() != ".svg":
        raise BadRequest(f"--plot {plot}: what is drawn is SVG; name a file that ends in .svg")
    question = library.Question(
        [_size("--memory", text) for text in memory.split(",")],
        _size("--disk", disk),
        _choices("--policy", policy, library.POLICIES),
        _choices("--write", write, library.FILTERS),
        bytes_per_token,
    )
    question.check(block_tokens)
    result = _compare(library.read_trace(trace, block_tokens), question)
    if plot:
        _save(plot, library.draw(result))
    if as_json:
        print(json.dumps(result, indent=2))
        return
    from kvcellar.cli.console import new_console  # noqa: PLC0415 - heavy

    new_console(markup=False, emoji=False).print(library.simulate_table(result))


def trace(
    kind: Annotated[str, typer.Argument(help="chat, rag, agents, scan, few or answers.")],
    seed: Annotated[int, typer.Option(help="Another number makes another trace.")] = 1,
) -> None:
    """Make up an hour of traffic of one busy host and print it, for `kvcellar simulate` to replay.

    \b
    chat     conversations of a few turns, with pauses of a minute or of an hour
    rag      questions about documents; a few documents are asked about most of the time
    agents   many quick steps after one of a dozen long system prompts
    scan     chat, with bursts of long documents that nobody asks for again
    few      three long documents that are asked about all the time, beside requests that never come back
    answers  four documents in use all the time, beside short questions with long answers
    """
    from kvcellar.simulate import KINDS, encode, make_requests  # noqa: PLC0415 - numpy takes its time

    if kind not in KINDS:
        raise BadRequest(f"{kind!r} is none of {', '.join(KINDS)}")
    try:
        for request in make_requests(kind, seed):
            print(encode(request))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough
        sys.stderr.close()


def _compare(trace: "Trace", question: "Question") -> dict[str, Any]:
    from rich.console import Console  # noqa: PLC0415 - heavy
    from rich.progress import Progress  # noqa: PLC0415 - likewise

    from kvcellar.simulate import compare  # noqa: PLC0415 - likewise

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("replaying", total=len(question.runs) * len(trace.prompts))
        return compare(trace, question, lambda: progress.advance(task))


def _size(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise BadRequest(f"{option} {text!r}: expected {error}") from None


def _choices(option: str, text: str, known: Collection[str]) -> list[str]:
    chosen = list(dict.fromkeys(text.split(","))) if text else list(known)
    for name in chosen:
        if name not in known:
            raise BadRequest(f"{option} {name!r} is none of {', '.join(known)}")
    return chosen


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"cannot write {path}: {error.strerror}") from error
