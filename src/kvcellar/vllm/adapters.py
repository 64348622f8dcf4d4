"""What a LoRA adapter is, by its bytes.

vLLM's block hashes cover an adapter's name, and in newer versions its path; two engines may have different
adapters under one name, one engine may load the path again when its files have changed, and engines may apply
one adapter to other modules. So a digest of the adapter's files, and of the settings that say what is made of
them, is mixed into the chunk keys. Where it is not certain that the engine computes with those
very bytes there is no digest, and requests go without the cache: files that cannot be read, or have changed
since the adapter was first used, that are elsewhere, and adapters that are loaded anew for each request.

The engine waits while they are read, so what trainers leave beside them, often many times as large, is not.
"""

import errno
import hashlib
from pathlib import Path
from typing import Any

import xxhash

from kvcellar.identity import KEY_BYTES, ChunkKey
from kvcellar.vllm.settings import digest, of_adapters

_READ_BYTES = 4 << 20
# vLLM 0.26 and 0.32 read the first, and one of the second: .safetensors, .bin or .pt. Versions before read
# new_embeddings beside them; those, and shards, count as well.
_CONFIG, _WEIGHTS, _READ = "adapter_config.json", "adapter_model.", ("adapter_", "new_embeddings")

_Stamp = tuple[tuple[str, int, int, int], ...]  # of each file: name, inode, size, time of change


class Adapters:
    """Digests of adapters as they were when first seen. `config`: vLLM's LoRAConfig."""

    def __init__(self, config: Any) -> None:
        self._settings = digest(of_adapters(config))
        self._seen: dict[tuple[int, str, bool], tuple[_Stamp, bytes]] = {}

    def digest(self, lora_request: Any) -> bytes | None:
        """Empty without an adapter; None when it cannot be told."""
        if lora_request is None:
            return b""
        if getattr(lora_request, "load_inplace", False):
            return None
        if getattr(lora_request, "tensorizer_config_dict", None):  # of vLLM 0.26: it names another folder
            return None
        # Of which vLLM is told how weights of experts are to be read.
        folder, fused = Path(lora_request.lora_path), getattr(lora_request, "is_3d_lora_weight", False)
        adapter = (lora_request.lora_int_id, lora_request.lora_path, fused)
        try:
            stamp = _stamp(folder)
            if adapter not in self._seen:
                how = self._settings + (" fused" if fused else "")
                self._seen[adapter] = stamp, _digest_of_files(folder, how)
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


def _digest_of_files(folder: Path, how: str) -> bytes:
    """`how`: they are read and applied."""
    total = xxhash.xxh3_128(f"{how}\0".encode())
    for path in _files(folder):
        total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                total.update(data)
    return total.digest()


def _files(folder: Path) -> list[Path]:
    """Those that vLLM reads; without some of them it would not load the adapter."""
    found = sorted(path for path in folder.iterdir() if path.name.startswith(_READ) and path.is_file())
    names = [path.name for path in found]
    if _CONFIG not in names or not any(name.startswith(_WEIGHTS) for name in names):
        raise FileNotFoundError(errno.ENOENT, "no adapter there", str(folder))
    return found
