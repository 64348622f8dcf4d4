"""What the weights in a folder are, by samples of their bytes, in nearly all of which other weights differ;
and the code that came with them.

A folder may get other weights under the same path, and a relative path names another in another place. All
bytes would take as long as loading the model. Paths and times are not in it, so hosts with copies share.
Knows nothing of vLLM.
"""

import errno
import functools
import hashlib
import os
from pathlib import Path

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CODE = ".py"  # which the model brings along (--trust-remote-code); all of it, being short
_SAMPLES, _BYTES = 128, 4096  # of each file: one or more of every matrix of a large model


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
        files += sorted(f for f in path.iterdir() if f.suffix == _CODE)
    total = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        total.update(f"{file.name}\0{size}\0".encode())
        step = max(_BYTES, size // _SAMPLES)
        with file.open("rb") as data:
            for start in range(0, size, step):
                total.update(os.pread(data.fileno(), _BYTES, start))
    return total.hexdigest()


@functools.cache
def only_commit(name: str, cache: str) -> str:
    """Of a model that was got from the hub by this name. Empty unless the cache has one commit of it: then
    what the engine has read is of that one.
    """
    snapshots = Path(cache) / f"models--{name.replace('/', '--')}" / "snapshots"
    found = [commit.name for commit in snapshots.iterdir()] if snapshots.is_dir() else []
    return found[0] if len(found) == 1 else ""
