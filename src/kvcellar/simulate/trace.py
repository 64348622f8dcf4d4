"""Traces: who asked for which prompt, one JSON object a line. The format is described in docs/policies.md.

Reads and checks them, and turns block ids into chunk keys. Knows nothing of caches.
"""

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from kvcellar.errors import BadRequest
from kvcellar.identity import ChunkKey

EXAMPLE = '{"timestamp": 0, "input_length": 1100, "output_length": 80, "hash_ids": [7, 8, 9]}'

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Request(msgspec.Struct):
    """One line. Only the order of timestamps counts, and nothing is made of the output."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]  # milliseconds
    input_length: _Count  # tokens
    hash_ids: list[int]  # one per block of the input; the last block need not be full
    output_length: _Count = 0  # tokens


class Prompt(NamedTuple):
    tokens: int
    keys: list[ChunkKey]  # of its full blocks: engines cache no others


class Trace(NamedTuple):
    name: str
    block_tokens: int
    prompts: list[Prompt]

    @property
    def tokens(self) -> int:
        return sum(prompt.tokens for prompt in self.prompts)

    @property
    def blocks(self) -> int:
        return sum(len(prompt.keys) for prompt in self.prompts)


def encode(request: Request) -> str:
    """As a line of a trace."""
    return msgspec.json.encode(request).decode()


def read_trace(path: Path, block_tokens: int) -> Trace:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadRequest(f"cannot read the trace {path}: {error.strerror}") from error
    requests = [
        _parse(line, f"{path}, line {number}", block_tokens)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not requests:
        raise BadRequest(f"{path} holds no requests; each line should read like {EXAMPLE}")
    name = os.fsencode(path.name).decode(errors="replace")  # it will be printed and drawn
    return make_trace(name, requests, block_tokens)


def make_trace(name: str, requests: Iterable[Request], block_tokens: int) -> Trace:
    in_order = sorted(requests, key=lambda request: request.timestamp)
    return Trace(name, block_tokens, [_prompt(request, block_tokens) for request in in_order])


def _parse(line: bytes, where: str, block_tokens: int) -> Request:
    try:
        request = msgspec.json.decode(line, type=Request)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"{where}: {error}; a line should read like {EXAMPLE}") from error
    full, some = divmod(request.input_length, block_tokens)
    if len(request.hash_ids) not in (full, full + bool(some)):
        raise BadRequest(
            f"{where}: {len(request.hash_ids)} hash_ids for an input_length of {request.input_length};"
            f" blocks of {block_tokens} tokens make it {full + bool(some)} (--block-tokens sets another size)"
        )
    return request


def _prompt(request: Request, block_tokens: int) -> Prompt:
    """An id counts with all before it, so traces may name blocks by content or by prefix alike."""
    keys: list[ChunkKey] = []
    key = b""
    for block in request.hash_ids[: request.input_length // block_tokens]:
        key = ChunkKey(blake2b(key + str(block).encode(), digest_size=16).digest())
        keys.append(key)
    return Prompt(request.input_length, keys)
