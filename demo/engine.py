"""A simulated LLM engine: everything of one that a KV cache server sees, and no model.

It has paged KV memory with the shape of a small GQA model, keeps nothing from one prompt to the next, and
"computes" KV at a stated speed. The KV of a block is a hash of all tokens up to its end, so whatever comes
back from the cache can be compared with the truth, byte by byte. Without a server it simply computes.

Reads Prompts on stdin and writes Events on stdout, one JSON object a line; leaves at end of file.
"""

import argparse
import contextlib
import hashlib
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from kvcellar.client import Grant, SchedulerClient, WorkerClient
from kvcellar.errors import Unavailable
from kvcellar.identity import (
    BlockHash,
    ChunkKey,
    CopyPlan,
    Group,
    Layer,
    Namespace,
    ParallelStrategy,
    make_plan,
)
from kvcellar.slab import NO_PLACE, Bytes
from kvcellar.transfer import CHECKSUMS, HostTransfer

# The shape of Qwen2.5-0.5B with an 8-bit cache: 6 KiB a token. A container may have only 64 MiB of /dev/shm.
LAYERS, KV_HEADS, HEAD_DIM = 24, 2, 64
BLOCK_TOKENS, CHUNK_TOKENS = 16, 128
BLOCK_BYTES = 2 * KV_HEADS * HEAD_DIM * BLOCK_TOKENS  # K and V of one layer
BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS
CHUNK_BYTES = BLOCKS_PER_CHUNK * LAYERS * BLOCK_BYTES
NUM_BLOCKS = 256

_ATTACH_S, _SERVER_S = 10.0, 2.0


class Part(msgspec.Struct, frozen=True):
    name: str  # stands for the text
    tokens: int


class Prompt(msgspec.Struct, frozen=True):
    """Without parts it is only a question: tell me when you are attached to a server."""

    parts: tuple[Part, ...]
    store_pause_s: float = 0.0  # rest after each chunk while storing: time to be killed in

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


class Ready(msgspec.Struct, frozen=True, tag=True):
    pass


class Progress(msgspec.Struct, frozen=True, tag=True):
    reused: int  # tokens
    computed: int


class Storing(msgspec.Struct, frozen=True, tag=True):
    copied: int  # chunks; none is committed yet
    chunks: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    tokens: int
    reused: int
    first_token_s: float
    checked_bytes: int  # loaded from the cache and compared with the truth
    wrong_bytes: int
    refused_chunks: int  # found, but not what their checksum says


Event = Ready | Progress | Storing | Answer


def demo_namespace() -> Namespace:
    layers = tuple(Layer(f"layers.{number}", BLOCK_BYTES) for number in range(LAYERS))
    return Namespace(
        engine="simulated/1",
        model="demo-0.5b",
        weights="none",
        kv_dtype="fp8",
        kv_layout="hash",
        groups=(Group(BLOCK_TOKENS, layers),),
        parallel=ParallelStrategy(),
        chunk_tokens=CHUNK_TOKENS,
        block_hash=BlockHash("blake2b-128", BLOCK_TOKENS, ""),
        checksum=CHECKSUMS[0],
    )


def block_hashes(prompt: Prompt) -> list[bytes]:
    """One hash per block, each over everything before it too."""
    tokens = b"".join(hashlib.shake_128(part.name.encode()).digest(4 * part.tokens) for part in prompt.parts)
    chain, hashes = b"", []
    for at in range(0, len(tokens), 4 * BLOCK_TOKENS):
        chain = hashlib.blake2b(chain + tokens[at : at + 4 * BLOCK_TOKENS], digest_size=16).digest()
        hashes.append(chain)
    return hashes


def true_kv(block_hash: bytes) -> Bytes:
    """What a block holds, layer by layer."""
    data = hashlib.shake_128(block_hash).digest(LAYERS * BLOCK_BYTES)
    return np.frombuffer(data, np.uint8).reshape(LAYERS, BLOCK_BYTES)


def tell(event: Event) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


class Engine:
    def __init__(self, socket: Path, name: str, tokens_per_s: float) -> None:
        session, namespace = f"{name}-{os.getpid()}", demo_namespace()
        self._speed = tokens_per_s
        self._kv = np.zeros((LAYERS, NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self._transfer = HostTransfer(namespace, 0, 0, list(self._kv))
        self._scheduler = SchedulerClient(socket, session, namespace, label=name)
        self._worker = WorkerClient(socket, session, 0, namespace, label=name)

    def wait_attached(self) -> bool:
        return self._scheduler.wait_connected(_ATTACH_S) and self._worker.wait_connected(_ATTACH_S)

    def close(self) -> None:
        self._scheduler.close()
        self._worker.close()

    def run(self, prompt: Prompt) -> Answer:
        """Load what the cache has, compute the rest, store what it had not."""
        hashes = block_hashes(prompt)
        # Any blocks in any order, full of something else: nothing can be right by accident.
        blocks = random.sample(range(NUM_BLOCKS), len(hashes))
        self._kv[:, blocks] ^= 0xFF
        last_blocks = range(BLOCKS_PER_CHUNK - 1, prompt.tokens // BLOCK_TOKENS, BLOCKS_PER_CHUNK)
        keys = [ChunkKey(hashes[number]) for number in last_blocks]
        table = [blocks[at : at + BLOCKS_PER_CHUNK] for at in range(0, len(blocks), BLOCKS_PER_CHUNK)]

        started = time.perf_counter()
        # The last token is always computed: its output is the first token of the answer.
        loaded, refused = self._load(keys[: (prompt.tokens - 1) // CHUNK_TOKENS], table)
        self._prefill(hashes, blocks, loaded * CHUNK_TOKENS, prompt.tokens)
        first_token_s = time.perf_counter() - started

        to_check = range(loaded * BLOCKS_PER_CHUNK)
        wrong = sum(int((self._kv[:, blocks[n]] != true_kv(hashes[n])).sum()) for n in to_check)
        self._store(keys, table, loaded, prompt.store_pause_s)
        reused, checked = loaded * CHUNK_TOKENS, loaded * CHUNK_BYTES
        return Answer(prompt.tokens, reused, first_token_s, checked, wrong, refused)

    def _load(self, keys: list[ChunkKey], table: list[list[int]]) -> tuple[int, int]:
        """Returns how many chunks the engine has now, and how many the transfer refused."""
        grant = self._scheduler.lookup(keys, _SERVER_S) if keys else None
        if grant is None or not grant.lease:
            return 0, 0
        plan = self._plan(grant, range(grant.chunks), table)
        try:
            with self._worker.copying(grant.lease) as slots:
                bad = self._transfer.load(plan, keys[: grant.chunks], slots)
            for row in bad:
                self._worker.condemn(grant.lease, 0, row)
        except Unavailable:  # the server is gone, or the slab is: compute
            return 0, 0
        finally:
            self._worker.release(grant.lease, 0, grant.chunks)
            self._scheduler.forget(grant.lease)
        return min(bad, default=grant.chunks), len(bad)

    def _prefill(self, hashes: list[bytes], blocks: list[int], first: int, tokens: int) -> None:
        """Make the KV of tokens [first, tokens), no faster than the stated speed."""
        started = time.perf_counter()
        for at in range(first, tokens, CHUNK_TOKENS):
            tell(Progress(reused=first, computed=at - first))
            stop = min(at + CHUNK_TOKENS, tokens)
            for number in range(at // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)):
                self._kv[:, blocks[number]] = true_kv(hashes[number])
            due = started + (stop - first) / self._speed
            time.sleep(max(0.0, due - time.perf_counter()))

    def _store(self, keys: list[ChunkKey], table: list[list[int]], first: int, pause_s: float) -> None:
        """Store chunks from `first` on. The answer is out by now, so trouble here costs nobody anything."""
        parent = keys[first - 1] if first else None
        keys, table = keys[first:], table[first:]
        grant = self._reserve(keys, parent) if keys else None
        if grant is None or not grant.lease:
            return
        wanted = [n for n in range(grant.chunks) if grant.places[0][n] != NO_PLACE]
        try:
            with self._worker.copying(grant.lease) as slots:
                for copied, chunk in enumerate(wanted):
                    tell(Storing(copied, len(wanted)))
                    time.sleep(pause_s)
                    self._transfer.store(self._plan(grant, [chunk], table), [keys[chunk]], slots)
            self._worker.commit(grant.lease, 0, grant.chunks)
        except Unavailable:
            self._worker.abort(grant.lease, 0, grant.chunks)
        self._worker.flush(_SERVER_S)
        self._scheduler.forget(grant.lease)

    def _reserve(self, keys: list[ChunkKey], parent: ChunkKey | None) -> Grant | None:
        tag = object()
        self._scheduler.reserve(tag, keys, parent)
        self._scheduler.flush()
        deadline = time.monotonic() + _SERVER_S
        while (left := deadline - time.monotonic()) > 0:
            for answered, grant in self._scheduler.collect(left):
                if answered is tag:
                    return grant
                if grant.lease:  # came too late for an earlier prompt
                    self._scheduler.abort(grant.lease, 0, grant.chunks)
        return None

    def _plan(self, grant: Grant, chunks: Sequence[int], table: list[list[int]]) -> CopyPlan:
        places = grant.places[0].tolist()
        return make_plan(0, [places[n] for n in chunks], [table[n] for n in chunks], self._transfer.layout)


def main() -> None:
    parser = argparse.ArgumentParser(description="A simulated engine; demo/sharing.py starts it.")
    for name, kind in (("socket", Path), ("name", str), ("tokens_per_s", float)):
        parser.add_argument(name, type=kind)
    engine = Engine(**vars(parser.parse_args()))
    for line in sys.stdin.buffer:
        prompt = msgspec.json.decode(line, type=Prompt)
        if prompt.parts:
            tell(engine.run(prompt))
        elif engine.wait_attached():
            tell(Ready())
    engine.close()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the demo is gone
        main()
