"""What a real engine says to the server: how often, and what never."""

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvcellar.wire import messages as m
from tests.server.conftest import ServerProcess
from tests.server.engine import eventually
from tests.vllm.harness import VllmEngine, prompts_around_borders
from tests.vllm.tap import Tap

pytestmark = pytest.mark.timeout(600)

CHUNK = 128
TOGETHER = 8


@pytest.fixture
def tap(stopped_server: ServerProcess, tmp_path: Path) -> Iterator[Tap]:
    server = stopped_server.start(memory="256MiB")
    with Tap(tmp_path / "tap", server.socket) as tap:
        yield tap


def operations(requests: list[m.Request]) -> Counter[str]:
    return Counter(type(op).__name__ for request in requests for op in request.ops)


def encodings(tokens: list[int]) -> Iterator[bytes]:
    """A run of token ids as a program might write it down."""
    yield b"".join(map(msgspec.msgpack.encode, tokens))
    for code in "HIQ":
        for order in "<>":
            yield struct.pack(f"{order}{len(tokens)}{code}", *tokens)
    for gap in (" ", ",", ", "):
        yield gap.join(map(str, tokens)).encode()


def test_what_an_engine_says(tap: Tap, tmp_path: Path) -> None:
    """One engine of four layers, one after the other: a miss, a hit, eight requests at once."""
    prompts = prompts_around_borders(128, CHUNK, seed=10)
    long = prompts[6]
    connector = {"socket": str(tap.path), "lookup_timeout_ms": 5000}
    with VllmEngine("gqa", tmp_path / "engine", connector=connector) as engine:
        engine.ready()
        tap.forget()
        engine.round([long], max_tokens=2)
        eventually(lambda: operations(tap.requests("worker"))["Commit"] == 1)
        assert operations(tap.requests("scheduler")) == {"Lookup": 1, "Reserve": 1}

        tap.forget()
        hit = engine.round([long], max_tokens=40)
        assert hit.cached[0] == len(long) // CHUNK * CHUNK
        eventually(lambda: tap.requests("worker"))
        # Whatever the layers, tokens and steps: one round trip, and the worker's word when it has read.
        assert operations(tap.requests("scheduler")) == {"Lookup": 1}
        assert operations(tap.requests("worker")) == {"Release": 1}

        tap.forget()
        crowd = [[n, *prompts[n % len(prompts)], *long] for n in range(TOGETHER)]
        answer = engine.round(crowd, max_tokens=CHUNK, together=True)
        said = tap.requests("scheduler")
        assert operations(said)["Lookup"] == TOGETHER
        rest = [request for request in said if not isinstance(request.ops[0], m.Lookup)]
        assert 0 < len(rest) <= answer.steps
        assert max(len(request.ops) for request in rest) > 1, "requests of one step were not sent together"
        assert operations(rest).keys() <= {"Reserve", "Release", "Abort"}

        wire = bytes(tap.raw)
        assert all(request.ops[0].keys in wire for request in said if isinstance(request.ops[0], m.Lookup))
        for tokens in crowd:
            for at in range(0, len(tokens) - 3, 3):
                assert not any(text in wire for text in encodings(tokens[at : at + 3]))
