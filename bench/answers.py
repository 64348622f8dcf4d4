"""How many prompt tokens a cache finds where answers are stored as they grow, beside what others ask for.

    .venv/bin/python -m bench.answers

`kvcellar simulate` replays prompts, one after the other; an engine also stores what it decodes, a few chunks
at a time, while others come and go. Here that is replayed in the server's own ledger: every answer takes its
time, and what it stores finds its beginning gone, or not. "also orphans" is the same with places granted to
chunks whose beginning is gone.

Knows nothing of bytes: memory is counted in chunks of 128 tokens with the KV of an 8B model.
"""

import argparse
import hashlib
import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from kvcellar.identity import ChunkKey
from kvcellar.ledger import Ledger
from kvcellar.ledger.room import Room
from kvcellar.simulate import KINDS, make_talks
from kvcellar.slab import NO_PLACE
from tests.support import Engine, namespace

CHUNK_TOKENS = 128
CHUNK_BYTES = CHUNK_TOKENS * 131_072
GB = 10**9
TOKEN_MS = 25  # of an answer
TOGETHER = 4  # chunks of an answer that are stored in one go, see vllm/stores.py


class AlsoOrphans(Ledger):
    def _is_lost(self, room: Room, key: ChunkKey) -> bool:  # noqa: ARG002
        return False


class Asked(NamedTuple):
    time: float
    tokens: int  # of the prompt
    chunks: int  # of these
    keys: list[ChunkKey]  # and of its answer


class Score(NamedTuple):
    found: float  # of prompt tokens, in %
    stored: int  # chunks


def make_traffic(kind: str, seed: int) -> list[Asked]:
    """In order of time. The beginning of a user's next prompt tells what the answer was; the last answer is
    read by nobody.
    """
    talks = make_talks(kind, seed, CHUNK_TOKENS)
    numbered = (zip(itertools.repeat(user), talk) for user, talk in enumerate(talks))
    by_user = defaultdict(list)
    for user, request in heapq.merge(*numbered, key=lambda one: one[1].timestamp):
        by_user[user].append(request)
    nobody = itertools.count(1 << 40)
    traffic = []
    for requests in by_user.values():
        for request, following in itertools.zip_longest(requests, requests[1:]):
            chunks = (request.input_length + request.output_length) // CHUNK_TOKENS
            ids = (following or request).hash_ids[:chunks]
            ids.extend(itertools.islice(nobody, chunks - len(ids)))
            prompt = request.input_length // CHUNK_TOKENS
            traffic.append(Asked(request.timestamp, request.input_length, prompt, make_keys(ids)))
    return sorted(traffic, key=lambda asked: asked.time)


def make_keys(ids: Sequence[int]) -> list[ChunkKey]:
    keys, key = [], b""
    for one in ids:
        key = hashlib.blake2b(key + str(one).encode(), digest_size=16).digest()
        keys.append(ChunkKey(key))
    return keys


def replay(traffic: list[Asked], ledger: Ledger, chunks: int) -> Score:
    engine = Engine(ledger, namespace(), slots=chunks)
    order = itertools.count()
    found = stored = 0
    growing: list[tuple[float, int, Asked, int]] = []

    def store(asked: Asked, first: int, stop: int, time: float) -> int:
        granted = engine.store(asked.keys[first:stop], asked.keys[first - 1] if first else None)
        grows = min(TOGETHER, len(asked.keys) - stop)
        if grows:
            done = time + grows * CHUNK_TOKENS * TOKEN_MS
            heapq.heappush(growing, (done, next(order), asked, stop))
        return sum(place != NO_PLACE for place in granted.places[0])

    for asked in traffic:
        while growing and growing[0][0] < asked.time:
            time, _, grown, first = heapq.heappop(growing)
            stored += store(grown, first, min(first + TOGETHER, len(grown.keys)), time)
        hit = engine.hit(asked.keys[: asked.chunks])
        found += hit * CHUNK_TOKENS
        stored += store(asked, hit, asked.chunks, asked.time)
    return Score(100 * found / sum(asked.tokens for asked in traffic), stored)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all if none")
    parser.add_argument("--memory", type=int, nargs="+", default=[3, 5, 10, 20, 30], metavar="GB")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"no such kind of traffic: {', '.join(sorted(unknown))}")
    print("prompt tokens found, in %, and thousands of chunks stored, with", *args.memory, "GB", flush=True)
    for kind, seed in itertools.product(args.kinds or KINDS, args.seeds):
        traffic = make_traffic(kind, seed)
        for label, ledger in (("", Ledger), ("also orphans", AlsoOrphans)):
            scores = [replay(traffic, ledger(1, 1 << 60), size * GB // CHUNK_BYTES) for size in args.memory]
            found = " ".join(f"{score.found:5.1f}" for score in scores)
            stored = " ".join(f"{score.stored / 1000:6.1f}" for score in scores)
            print(f"{kind:8} {seed:2}  {label:12}  {found}   {stored}", flush=True)


if __name__ == "__main__":
    main()
