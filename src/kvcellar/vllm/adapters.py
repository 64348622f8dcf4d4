"""What a LoRA adapter is, by its bytes.

vLLM's block hashes cover an adapter's name, and in newer versions its path; two engines may have different
adapters under one name. So a digest of the adapter's files is mixed into the chunk keys. An adapter whose
files cannot be read here has no digest, and its requests go without the cache.
"""

import hashlib
from pathlib import Path
from typing import Any

import xxhash

from kvcellar.identity import KEY_BYTES, ChunkKey

_READ_BYTES = 4 << 20


class Adapters:
    """Digests by path, made when an adapter is first seen."""

    def __init__(self) -> None:
        self._digests: dict[str, bytes | None] = {}

    def digest(self, lora_request: Any) -> bytes | None:
        """Empty without an adapter; None when it cannot be told."""
        if lora_request is None:
            return b""
        path = str(lora_request.lora_path)
        if path not in self._digests or getattr(lora_request, "load_inplace", False):
            self._digests[path] = _digest_of_folder(Path(path))
        return self._digests[path]


def with_adapter(key: bytes, digest: bytes) -> ChunkKey:
    if not digest:
        return ChunkKey(key)
    return ChunkKey(hashlib.blake2b(key + digest, digest_size=KEY_BYTES).digest())


def _digest_of_folder(folder: Path) -> bytes | None:
    total = xxhash.xxh3_128()
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        for path in files:
            total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while data := file.read(_READ_BYTES):
                    total.update(data)
    except OSError:
        return None
    return total.digest() if files else None
