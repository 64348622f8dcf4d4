"""What a LoRA adapter is, by its bytes.

vLLM's block hashes cover an adapter's name, and in newer versions its path; two engines may have different
adapters under one name, and one engine may load the path again when its files have changed. So a digest of
the adapter's files is mixed into the chunk keys. Where it is not certain that the engine computes with those
very bytes there is no digest, and requests go without the cache: files that cannot be read, or have changed
since the adapter was first used, and adapters that are loaded anew for each request.
"""

import hashlib
from pathlib import Path
from typing import Any

import xxhash

from kvcellar.identity import KEY_BYTES, ChunkKey

_READ_BYTES = 4 << 20

_Stamp = tuple[tuple[str, int, int, int], ...]  # of each file: name, inode, size, time of change


class Adapters:
    """Digests of adapters as they were when first seen."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], tuple[_Stamp, bytes]] = {}

    def digest(self, lora_request: Any) -> bytes | None:
        """Empty without an adapter; None when it cannot be told."""
        if lora_request is None:
            return b""
        if getattr(lora_request, "load_inplace", False):
            return None
        folder, adapter = Path(lora_request.lora_path), (lora_request.lora_int_id, lora_request.lora_path)
        try:
            stamp = _stamp(folder)
            if adapter not in self._seen:
                self._seen[adapter] = stamp, _digest_of_files(folder)
        except OSError:
            return None
        known, digest = self._seen[adapter]
        return digest if stamp == known else None


def with_adapter(key: bytes, digest: bytes) -> ChunkKey:
    if not digest:
        return ChunkKey(key)
    return ChunkKey(hashlib.blake2b(key + digest, digest_size=KEY_BYTES).digest())


def _stamp(folder: Path) -> _Stamp:
    files = [(path.name, path.stat()) for path in _files(folder)]
    return tuple((name, about.st_ino, about.st_size, about.st_mtime_ns) for name, about in files)


def _digest_of_files(folder: Path) -> bytes:
    total = xxhash.xxh3_128()
    for path in _files(folder):
        total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                total.update(data)
    return total.digest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())
