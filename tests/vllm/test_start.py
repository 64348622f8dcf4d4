"""Engines that start with something wrong: one clear line and no cache, or, where it is required, no engine.

All engines are started once, by two programs side by side; each test looks at what became of one.
"""

import contextlib
import itertools
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvcellar.wire.messages import PROTOCOL_VERSION
from tests.server.engine import eventually
from tests.vllm.harness import make_job, prompts_around_borders, start_engines, vllm_python

pytestmark = pytest.mark.timeout(900)

PROMPT = prompts_around_borders(128, 128, seed=40)[3]
DRAFTS = "speculative decoding by 'draft_model', whose drafts have KV of their own, is not supported yet"
NEWER = """
import kvcellar.wire.messages as m
m.PROTOCOL_VERSION = 99
from kvcellar.cli import main
main()
"""


class Wrong(NamedTuple):
    """Something is wrong with the socket, or with the engine: the engine computes, or refuses if told to."""

    line: str  # what is said, with {path} for the socket's
    more: dict[str, Any] = {}  # noqa: RUF012 - for the job; never changed


WRONG = {
    "nothing": Wrong("no server on {path}: No such file or directory"),
    "a file": Wrong("no server on {path}: Connection refused"),
    "a web server": Wrong("no kvcellar server answers on {path}: the server sent nonsense: a frame of"),
    "silence": Wrong("no kvcellar server answers on {path}: no answer in time"),
    "a closed door": Wrong("no kvcellar server answers on {path}: the server closed the connection"),
    "not ours": Wrong("no server on {path}: Permission denied", more={"unprivileged": True}),
    "another version": Wrong(
        f"this server speaks protocol 99, not {PROTOCOL_VERSION}; install the same kvcellar on both sides"
    ),
    "drafts": Wrong(DRAFTS),
}

# Never accepted, required or not: {extra config: the sentence}.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown option": (
        {"lookup_timeout": 50},
        "kv_connector_extra_config: unknown 'lookup_timeout'; known are lookup_timeout_ms, require,",
    ),
    "timeout": ({"lookup_timeout_ms": 0}, "lookup_timeout_ms: got 0, expected milliseconds from 1 to 10000"),
    "require": ({"require": "yes"}, "require: got 'yes', expected true or false"),
    "socket": ({"socket": 7}, "socket: got 7, expected text"),
    "no such home": (
        {"socket": "~no such user/s"},
        "socket: got '~no such user/s', expected a path; that user has no home",
    ),
}


def listener(path: Path, talk: Callable[[socket.socket], None]) -> socket.socket:
    """Somebody else's server."""
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(path))
    door.listen()

    def serve() -> None:
        kept = []
        with contextlib.suppress(OSError):  # closed: the test is over
            while True:
                kept.append(door.accept()[0])
                talk(kept[-1])

    threading.Thread(target=serve, daemon=True).start()
    return door


def close_the_door(sock: socket.socket) -> None:
    sock.recv(1 << 16)
    sock.close()


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("sockets")
    paths = {name: folder / f"{number}" for number, name in enumerate(WRONG)}
    paths["a file"].write_text("hello")
    doors = [
        listener(paths["a web server"], lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")),
        listener(paths["silence"], lambda sock: None),
        listener(paths["a closed door"], close_the_door),
        listener(paths["not ours"], lambda sock: None),
    ]
    paths["not ours"].chmod(0)
    where = ["--socket", str(paths["another version"]), "--folder", str(folder / "memory")]
    with (folder / "log").open("wb") as log:
        newer = subprocess.Popen([sys.executable, "-c", NEWER, "serve", *where], stdout=log, stderr=log)
    eventually(paths["another version"].exists)
    yield paths
    newer.terminate()
    newer.wait(10)
    for door in doors:
        door.close()


class Started(NamedTuple):
    answer: dict[str, Any]
    log: Path

    def lines(self) -> list[str]:
        """What kvcellar had to say; vLLM itself prints the connector's name."""
        words = re.compile("KVCellar: |no cache|cache is back|KVCellar is required")
        return [line for line in self.log.read_text(errors="replace").splitlines() if words.search(line)]


@pytest.fixture(scope="module")
def started(
    sockets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, bool], Started]:
    python, logs = vllm_python(), tmp_path_factory.mktemp("logs")
    plain = make_job("gqa", python)
    drafts = {"model": plain["model"], "method": "draft_model", "num_speculative_tokens": 2}
    jobs = {("without", False): plain}
    for name, wrong in WRONG.items():
        options: dict[str, Any] = {"speculative_config": drafts} if name == "drafts" else {}
        for require in (False, True):
            extra = {"socket": str(sockets[name]), "require": require}
            jobs[name, require] = make_job("gqa", python, connector=extra, **options) | wrong.more
    for name, (extra, _) in REFUSED.items():
        jobs[name, False] = make_job("gqa", python, connector=extra)
    jobs["role", False] = make_job("gqa", python, connector={}) | {"role": "kv_consumer"}
    paths = [logs / str(number) for number in range(len(jobs))]
    told = [
        job | {"log": str(path), "prompt": PROMPT} for job, path in zip(jobs.values(), paths, strict=True)
    ]
    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(start_engines, (told[0::2], told[1::2]), (logs / "even", logs / "odd"))
        even, odd = halves
    answers = [answer for pair in itertools.zip_longest(even, odd) for answer in pair if answer is not None]
    return {key: Started(answer, path) for key, answer, path in zip(jobs, answers, paths, strict=True)}


@pytest.mark.parametrize("name", WRONG)
def test_an_engine_says_what_is_wrong_in_one_line_and_computes(
    name: str, started: dict[tuple[str, bool], Started], sockets: dict[str, Path]
) -> None:
    engine = started[name, False]
    assert engine.answer["tokens"] == started["without", False].answer["tokens"]
    [line] = engine.lines()
    assert WRONG[name].line.format(path=sockets[name]) in line


@pytest.mark.parametrize("name", WRONG)
def test_an_engine_that_requires_the_cache_refuses_with_the_same_words(
    name: str, started: dict[tuple[str, bool], Started], sockets: dict[str, Path]
) -> None:
    sentence = "KVCellar is required, and " + WRONG[name].line.format(path=sockets[name])
    assert started[name, True].answer["refused"].startswith(f"StartupError: {sentence}")


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_are_wrong_are_refused(name: str, started: dict[tuple[str, bool], Started]) -> None:
    assert REFUSED[name][1] in started[name, False].answer["refused"]


def test_a_role_that_is_not_both_is_refused(started: dict[tuple[str, bool], Started]) -> None:
    assert "kv_role: got 'kv_consumer', expected 'kv_both'" in started["role", False].answer["refused"]
