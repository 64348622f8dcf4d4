"""Two engines share one cache; then one engine is killed, and then the server.

Starts a server and two simulated engines (demo/engine.py) as processes of their own, asks them about the same
documents, and compares every byte that comes out of the cache with the truth. Exit code 1 if a byte is wrong
or anything else is not as told. Leaves no process and no file behind, also after Ctrl-C.
"""

import argparse
import io
import math
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

from engine import Answer, Part, Prompt
from processes import DemoError, EngineProcess, Server, check_room, wait_until
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvcellar.errors import CellarError

MEMORY = 48 << 20  # fits the 64 MiB of /dev/shm that a container has
TOKENS_PER_S, FAST_TOKENS_PER_S = 1_000, 20_000
SYSTEM, DOCUMENT, QUESTION = 512, 1024, 80  # tokens
SHARED = SYSTEM + DOCUMENT
BAR = 40  # characters, for one prompt

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def about(document: str, question: int = 1, store_pause_s: float = 0.0) -> Prompt:
    """A prompt of three parts; the first two are shared by whoever asks about the same document."""
    parts = (
        Part("system prompt", SYSTEM),
        Part(document, DOCUMENT),
        Part(f"{document}, question {question}", QUESTION),
    )
    return Prompt(parts, store_pause_s)


class Show:
    """What the person sees, and the record of what happened. Plain lines where there is no terminal."""

    def __init__(self, console: Console, server: Server, *, fast: bool) -> None:
        self.console = console
        self.server = server
        self.engines: dict[str, EngineProcess] = {}
        self.answers: dict[str, list[Answer]] = {}
        self.failed = 0
        self.pause_s = 0.1 if fast else 1.0
        self._acts = 0

    def act(self, title: str) -> None:
        self._acts += 1
        self.console.print(f"\n[bold]{self._acts}. {title}[/]")
        if self._acts > 1:
            time.sleep(self.pause_s)

    def expect(self, condition: bool, sentence: str) -> None:
        self.failed += not condition
        mark = "[green]✔[/]" if condition else "[red]✘ NOT TRUE:[/]"
        self.console.print(f"   {mark} {sentence}")

    def ask(self, name: str, prompt: Prompt) -> Answer:
        self.engines[name].ask(prompt)
        return self.hear(name, prompt)

    def hear(self, name: str, prompt: Prompt) -> Answer:
        answer = self.engines[name].answer()
        self.answers.setdefault(name, []).append(answer)
        reused, seconds = f"{answer.reused:5,} of {answer.tokens:,}", f"{answer.first_token_s:.2f} s"
        what = f"{prompt.parts[2].name:<21} {reused} tokens reused, first token after [cyan]{seconds}[/]"
        self.console.print(f"   [bold]{name}[/]  {what}", soft_wrap=True)
        if self.server.status is not None:
            self.server.look()
        return answer

    def view(self) -> Group:
        """The live part, drawn several times a second; asks nobody anything."""
        status, table = self.server.status, Table.grid(padding=(0, 2))
        held = f"{status.memory_used >> 20} of {status.memory_limit >> 20} MiB in use" if status else "gone"
        table.add_row("server", Text(held, "" if status else "red"))
        for name, engine in list(self.engines.items()):
            doing, reused, computed = engine.doing
            green, yellow = (round(tokens * BAR / (SHARED + QUESTION)) for tokens in (reused, computed))
            rest = ("·" * (BAR - green - yellow), "dim")
            bar = Text.assemble(("█" * green, "green"), ("█" * yellow, "yellow"), rest)
            table.add_row(f"engine {name}", bar, Text(doing, "red" if doing == "killed" else ""))
        legend = Text.assemble(("\n█", "green"), " from the cache  ", ("█", "yellow"), " computed")
        return Group(legend, table)


# -- the story -----------------------------------------------------------------------------------------------


def first_time(show: Show) -> None:
    show.act("Engine A is asked about three documents nobody has seen before")
    cold = show.ask("A", about("manual"))
    others = [show.ask("A", about(document)) for document in ("contract", "minutes")]
    again = show.ask("A", about("manual", 2))
    show.expect(cold.reused == 0, "the first prompt had to be computed from end to end")
    show.expect(all(a.reused == SYSTEM for a in others), "the others found the system prompt they share")
    show.expect(again.reused == SHARED, "a second question about a document computes only the question")


def second_engine(show: Show) -> None:
    show.act("Engine B, another process, is asked about the same documents")
    answers = [show.ask("B", about(document, 3)) for document in ("manual", "contract", "minutes")]
    show.expect(all(a.reused == SHARED for a in answers), "B computed nothing that A had computed")


def kill_engine(show: Show) -> None:
    show.act("Engine A reads a report, and is killed (kill -9) while it stores it")
    server, victim = show.server, show.engines["A"]
    chunks = server.chunks()
    victim.ask(about("report", store_pause_s=show.pause_s / 4))
    storing = victim.wait_storing()
    show.engines["B"].ask(about("contract", 4))
    victim.kill()
    beside = show.hear("B", about("contract", 4))
    show.expect(
        beside.reused == SHARED,
        f"A died at chunk {storing.copied + 1} of {storing.chunks}; B noticed nothing",
    )
    gone = wait_until(lambda: not server.knows("A") and server.is_idle())
    show.expect(gone and server.chunks() == chunks, "whatever A held or had half written is free again")
    first, second = show.ask("B", about("report", 2)), show.ask("B", about("report", 3))
    show.expect(first.reused == SYSTEM, "nobody finds the half of the report: B computes it")
    show.expect(second.reused == SHARED, "and now it is there")


def kill_server(show: Show) -> None:
    show.act("The server is killed (kill -9), and started again")
    server = show.server
    chunks = server.chunks()
    server.kill()
    without = [show.ask("B", about(document, 5)) for document in ("manual", "report")]
    show.expect(all(a.reused == 0 for a in without), "without a server B computes, and answers all the same")
    server.start()
    show.expect(server.chunks() == chunks, f"the new server has all {chunks} chunks of the old one")
    show.engines["B"].wait_attached()
    answers = [show.ask("B", about(name, 6)) for name in ("manual", "contract", "minutes", "report")]
    show.expect(all(a.reused == SHARED for a in answers), "B found it by itself, and every document in it")
    show.expect(wait_until(server.is_idle), "nothing is held by anybody any more")


# -- the end -------------------------------------------------------------------------------------------------


def close(show: Show) -> int:
    """Print what it came to; returns the exit code."""
    sums = [summary(answers) for answers in show.answers.values()]
    table = Table(title="\nWhat came of it", title_justify="left")
    table.add_column("")
    for name in show.answers:
        table.add_column(f"engine {name}", justify="right")
    for measure in sums[0]:
        table.add_row(measure, *(one[measure] for one in sums))
    show.console.print(table)
    answers = [answer for several in show.answers.values() for answer in several]
    checked, wrong = sum(a.checked_bytes for a in answers), sum(a.wrong_bytes for a in answers)
    right = not wrong and not any(a.refused_chunks for a in answers)
    show.expect(right, f"{wrong} wrong bytes among the {checked:,} that came from the cache")
    share = sum(a.reused for a in answers) / sum(a.tokens for a in answers)
    show.console.print(
        "\nBefore an LLM engine can answer, it computes keys and values (KV) for all tokens of the prompt, "
        f"and then throws them away. KVCellar kept them in shared memory: {share:.0%} of all prompt tokens "
        "did not have to be computed, whichever engine had seen them first, although an engine and the "
        "server itself were killed on the way."
    )
    return 1 if show.failed else 0


def summary(answers: list[Answer]) -> dict[str, str]:
    tokens, reused = sum(a.tokens for a in answers), sum(a.reused for a in answers)
    cold = statistics.median([a.first_token_s for a in answers if not a.reused] or [math.nan])
    warm = statistics.median([a.first_token_s for a in answers if a.reused >= SHARED] or [math.nan])
    return {
        "prompts answered": f"{len(answers)}",
        "tokens in them": f"{tokens:,}",
        "  computed": f"{tokens - reused:,}",
        "  reused": f"{reused:,}",
        "first token, nothing reused": f"{cold:.2f} s",
        "first token, document reused": f"{warm:.2f} s",
        "speed-up": f"{cold / warm:.0f} x",
        "bytes from the cache, all checked": f"{sum(a.checked_bytes for a in answers):,}",
        "wrong bytes": f"{sum(a.wrong_bytes for a in answers)}",
    }


def run(folder: Path, console: Console, *, fast: bool) -> int:
    """The whole show, in a place of its own; at the end, whatever end, every process and file is gone."""
    check_room(folder, MEMORY)
    speed = FAST_TOKENS_PER_S if fast else TOKENS_PER_S
    with tempfile.TemporaryDirectory(prefix="kvcellar-demo-", dir=folder) as place, ExitStack() as cleanup:
        server = Server(Path(place), MEMORY)
        cleanup.callback(server.kill)
        show = Show(console, server, fast=fast)
        if console.is_terminal:
            cleanup.enter_context(
                Live(console=console, get_renderable=show.view, refresh_per_second=10, transient=True)
            )
        show.act(f"A server with {MEMORY >> 20} MiB of shared memory, and two engines")
        server.start()
        for name in ("A", "B"):
            show.engines[name] = EngineProcess(name, server, Path(place), speed)
            cleanup.callback(show.engines[name].kill)
        for engine in show.engines.values():
            engine.wait_attached()
        console.print(f"   The engines are simulated: they compute {speed:,} tokens per second.")
        for act in (first_time, second_engine, kill_engine, kill_server):
            act(show)
    return close(show)


def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    """Once: cleaning up is not interrupted."""
    for one in INTERRUPTS:
        signal.signal(one, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fast", action="store_true", help="a few seconds, for tests")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="a tmpfs [default: /dev/shm]")
    args = parser.parse_args()
    for one in INTERRUPTS:
        signal.signal(one, interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a tick shows a question mark
    console = Console(highlight=False)
    try:
        return run(args.folder, console, fast=args.fast)
    except (DemoError, CellarError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
