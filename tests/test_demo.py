"""The demo shows what it says, and leaves nothing behind."""

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "demo" / "sharing.py"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvcellar-test-", dir="/dev/shm") as name:
        yield Path(name)


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(DEMO), "--fast", "--folder", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def processes_of(folder: Path) -> list[str]:
    """The server and the engines: each has a path in the folder on its command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text(errors="replace")
        except OSError:
            continue  # it has just ended
        if str(folder) in command:
            found.append(command)
    return found


def test_engines_share_and_no_byte_is_wrong(folder):
    with start(folder) as demo:
        output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 0, output
    assert re.search(r"wrong bytes\s+│\s+0 │\s+0 │", output), output
    assert "NOT TRUE" not in output
    assert not list(folder.iterdir())
    assert not processes_of(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_nothing_behind(folder, number):
    with start(folder) as demo:
        assert demo.stdout is not None
        while "Engine A is asked" not in (line := demo.stdout.readline()):
            assert line, "it ended early"
        demo.send_signal(number)
        demo.communicate(timeout=20)
    assert demo.returncode == 128 + number
    assert not list(folder.iterdir())
    assert not processes_of(folder)


def test_unusable_folder_is_one_sentence(folder):
    with start(folder / "missing") as demo:
        output, _ = demo.communicate(timeout=20)
    assert demo.returncode == 1
    assert len(output.splitlines()) == 1
    assert "--folder" in output
