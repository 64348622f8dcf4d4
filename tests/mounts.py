"""File systems of a size of their own, to be filled up."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(mounted: Path, size: str) -> Iterator[Path]:
    """Mounted on a new folder. The test is skipped for whoever may not mount."""
    mounted.mkdir()
    options = f"size={size},mode=700"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", mounted], capture_output=True)
    if done.returncode:
        pytest.skip("cannot mount a tmpfs")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "-l", mounted], check=True)
