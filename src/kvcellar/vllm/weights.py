"""What the weights in a folder are, by samples of their bytes, in nearly all of which other weights differ;
and the code and the settings that came with them.

A folder may get other weights under the same path, and a relative path names another in another place. All
bytes would take as long as loading the model. Paths and times are not in it, so hosts with copies share.
Knows nothing of vLLM.
"""

import errno
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# What else decides KV: code that the model brings along (--trust-remote-code), and what is made of its images
# and videos. All of it, being short.
_BESIDE = (".py", ".json")
# But for what decides how text becomes tokens, which are hashed, how those of answers are drawn, and which
# file has which weights.
_NOT_KV = (
    "added_tokens.json",
    "chat_template*.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer*.json",
    "vocab.json",
    "*.index.json",
)
_SAMPLES, _BYTES = 128, 4096  # of each file: one or more of every matrix of a large model
# Scales, norms and biases, which may change with no matrix, count whole.
_SMALL = 16 << 10
_HEADER = 100_000_000  # bytes that a .safetensors file may begin with, by its format
_READ = 1 << 20

_Run = tuple[int, int]  # of bytes: from, to


@functools.cache
def weights_digest(model: str) -> str:
    """Empty if it is no folder or file: a name, with a revision. A folder has weights, or an OSError."""
    path = Path(model)
    if not path.exists():
        return ""
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in _SUFFIXES)
    if not files:
        raise FileNotFoundError(errno.ENOENT, "no weights there", model)
    if path.is_dir():
        files += sorted(f for f in path.iterdir() if _counts(f))
    total = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        total.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as data:
            for run in _merged(_runs(file, data.fileno(), size)):
                for start in range(*run, _READ):
                    total.update(os.pread(data.fileno(), min(_READ, run[1] - start), start))
    return total.hexdigest()


def _counts(file: Path) -> bool:
    return file.suffix in _BESIDE and not any(map(file.match, _NOT_KV)) and file.is_file()


def _runs(file: Path, descriptor: int, size: int) -> Iterator[_Run]:
    """What is read of a file."""
    for start in range(0, size, max(_BYTES, size // _SAMPLES)):
        yield start, min(start + _BYTES, size)
    if file.suffix == ".safetensors":
        yield from _small_tensors(descriptor, size)


def _small_tensors(descriptor: int, size: int) -> Iterator[_Run]:
    """And the header, which says what they are. None of a file that does not have the format: vLLM will have
    said so, or reads it by other means.
    """
    begin = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if begin > min(size, 8 + _HEADER):
        return
    try:
        header = json.loads(os.pread(descriptor, begin - 8, 8))
    except (ValueError, RecursionError):
        return
    yield 8, begin
    for tensor in header.values() if isinstance(header, dict) else ():
        match tensor:
            case {"data_offsets": [int(start), int(end)]}:
                if 0 <= start < end <= min(start + _SMALL, size - begin):
                    yield begin + start, begin + end


def _merged(runs: Iterable[_Run]) -> Iterator[_Run]:
    """In order, and each byte once, whatever a header says. Small tensors mostly follow each other: so many
    thousands of them are read at once.
    """
    last: _Run | None = None
    for start, end in sorted(runs):
        if last is not None and start <= last[1]:
            last = last[0], max(last[1], end)
            continue
        if last is not None:
            yield last
        last = start, end
    if last is not None:
        yield last


@functools.cache
def only_commit(name: str, cache: str) -> str:
    """Of a model that was got from the hub by this name. Empty unless the cache has one commit of it: then
    what the engine has read is of that one.
    """
    snapshots = Path(cache) / f"models--{name.replace('/', '--')}" / "snapshots"
    found = [commit.name for commit in snapshots.iterdir()] if snapshots.is_dir() else []
    return found[0] if len(found) == 1 else ""
