"""Made-up traffic, the same for the same seed, to replay where there is no trace of one's own.

Every kind is a few numbers that somebody could argue about, written where they are used. Lengths are in
tokens and times in milliseconds. Each is an hour of one busy host, and gains from a cache of 5 to 100 GB with
the KV of an 8B model.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from random import Random

from kvcellar.simulate.trace import Request

BLOCK_TOKENS = 512

_SECOND = 1000.0
_HOUR = 3600 * _SECOND


class _Writer:
    """Gives every block of text an id of its own."""

    def __init__(self, rng: Random, block_tokens: int) -> None:
        self.rng = rng
        self.block_tokens = block_tokens
        self._ids = itertools.count()

    def text(self, tokens: int, after: "_Text | None" = None) -> "_Text":
        return _Text(self, after.tokens if after else 0, list(after.ids) if after else []).grow(tokens)

    def new_id(self) -> int:
        return next(self._ids)

    def about(self, median: float, spread: float = 0.6) -> int:
        """A length or a pause: log-normal, as both are in measured traffic."""
        return max(1, round(median * self.rng.lognormvariate(0, spread)))


class _Text:
    """A prompt that grows at its end; `ids` are those of its full blocks."""

    def __init__(self, writer: _Writer, tokens: int, ids: list[int]) -> None:
        self.tokens = tokens
        self.ids = ids
        self._writer = writer

    def grow(self, tokens: int) -> "_Text":
        self.tokens += tokens
        while len(self.ids) < self.tokens // self._writer.block_tokens:
            self.ids.append(self._writer.new_id())
        return self

    def request(self, time: float, output: int) -> Request:
        return Request(round(time), self.tokens, list(self.ids), output)


_Talk = Iterator[Request]  # requests of one user, in order of time; made up as they are asked for


def _arrivals(rng: Random, each: float) -> Iterator[float]:
    time = 0.0
    while (time := time + rng.expovariate(1 / each)) < _HOUR:
        yield time


def _conversation(writer: _Writer, start: float, system: _Text, turns: int) -> _Talk:
    """A user reads each answer, thinks, and asks on; some come back after a long while."""
    text, time = writer.text(0, system), start
    for _ in range(turns):
        text.grow(writer.about(250))
        answer = writer.about(300)
        yield text.request(time, answer)
        text.grow(answer)
        time += writer.about(60 * _SECOND, 1.2)


def _chat(writer: _Writer) -> Iterator[_Talk]:
    systems = [writer.text(writer.about(1000)) for _ in range(5)]
    for start in _arrivals(writer.rng, 4 * _SECOND):
        turns = 1 + int(writer.rng.expovariate(1 / 4))
        yield _conversation(writer, start, writer.rng.choice(systems), turns)


def _rag(writer: _Writer) -> Iterator[_Talk]:
    """Questions about one of 1,000 documents. A few are asked about much of the time (Zipf), and which those
    are changes over the hour.
    """
    system = writer.text(700)
    documents = [writer.text(writer.about(4000), system) for _ in range(1000)]
    weights = list(itertools.accumulate(1 / rank for rank in range(1, len(documents) + 1)))
    for start in _arrivals(writer.rng, 0.8 * _SECOND):
        if writer.rng.random() < 0.02:
            one, other = writer.rng.randrange(20), writer.rng.randrange(len(documents))
            documents[one], documents[other] = documents[other], documents[one]
        [document] = writer.rng.choices(documents, cum_weights=weights)
        yield iter([writer.text(writer.about(200), document).request(start, writer.about(150))])


def _task(writer: _Writer, start: float, system: _Text) -> _Talk:
    """An agent reads what its tools answered and calls the next, seconds later."""
    text, time = writer.text(writer.about(300), system), start
    for _ in range(2 + int(writer.rng.expovariate(1 / 10))):
        output = writer.about(150)
        yield text.request(time, output)
        text.grow(output + writer.about(700, 1.0))
        time += writer.about(8 * _SECOND)


def _agents(writer: _Writer) -> Iterator[_Talk]:
    systems = [writer.text(writer.about(8000)) for _ in range(12)]
    weights = [1 / rank for rank in range(1, len(systems) + 1)]
    for start in _arrivals(writer.rng, 9 * _SECOND):
        [system] = writer.rng.choices(systems, weights)
        yield _task(writer, start, system)


def _scan(writer: _Writer) -> Iterator[_Talk]:
    """Chat, with a batch job beside it that reads long documents once, in bursts."""
    yield from _chat(writer)
    for burst in _arrivals(writer.rng, 300 * _SECOND):
        for number in range(40):
            yield iter([writer.text(writer.about(12000)).request(burst + number * _SECOND, 200)])


def _few(writer: _Writer) -> Iterator[_Talk]:
    """Questions about three long documents all the time, beside requests that never come back."""
    documents = [writer.text(64_000) for _ in range(3)]
    for start in _arrivals(writer.rng, 10 * _SECOND):
        text = writer.text(writer.about(200), writer.rng.choice(documents))
        yield iter([text.request(start, writer.about(150))])
    for start in _arrivals(writer.rng, 0.6 * _SECOND):
        yield iter([writer.text(writer.about(1000)).request(start, writer.about(300))])


def _answers(writer: _Writer) -> Iterator[_Talk]:
    """Questions about four documents all the time, beside short ones that never come back, and whose answers
    are long.
    """
    documents = [writer.text(20_000) for _ in range(4)]
    for start in _arrivals(writer.rng, 8 * _SECOND):
        text = writer.text(writer.about(200), writer.rng.choice(documents))
        yield iter([text.request(start, writer.about(150))])
    for start in _arrivals(writer.rng, 1.5 * _SECOND):
        yield iter([writer.text(writer.about(400)).request(start, writer.about(800))])


KINDS: dict[str, Callable[[_Writer], Iterator[_Talk]]] = {
    "chat": _chat,
    "rag": _rag,
    "agents": _agents,
    "scan": _scan,
    "few": _few,
    "answers": _answers,
}


def make_talks(kind: str, seed: int, block_tokens: int = BLOCK_TOKENS) -> list[_Talk]:
    """One for each user. What a request was answered is in the user's next prompt, right behind its own."""
    return list(KINDS[kind](_Writer(Random(f"{kind} {seed}"), block_tokens)))


def make_requests(kind: str, seed: int) -> list[Request]:
    merged = heapq.merge(*make_talks(kind, seed), key=lambda request: request.timestamp)
    return [request for request in merged if request.timestamp < _HOUR]
