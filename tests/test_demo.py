"""The demo, with real vLLM engines, shows what it says, and leaves nothing behind however it ends."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.server.engine import eventually

DEMO = Path(__file__).parents[1] / "demo" / "sharing.py"
START = 300.0  # seconds that engines may take on a busy machine

# vLLM is installed on first use.
pytestmark = pytest.mark.timeout(1800)


class Process(NamedTuple):
    pid: int
    parent: int
    session: int


def living() -> list[Process]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _group, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it has just ended
        if state not in "ZX":
            found.append(Process(int(path.parent.name), int(parent), int(session)))
    return found


class Demo:
    """One run, with the folders that it may use."""

    def __init__(self, memory: Path, temporary: Path) -> None:
        self.memory = memory
        self.temporary = temporary
        self._sessions: set[int] = set()
        self._shared: set[Path] = set()
        self.process: subprocess.Popen[str]

    def start(self, *flags: str, **environment: str) -> "Demo":
        command = [sys.executable, str(DEMO), "--folder", str(self.memory), "--tokens", "512", *flags]
        surroundings = os.environ | environment | {"TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=surroundings
        )
        return self

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        while text not in (line := self.process.stdout.readline()):
            assert line, f"it ended before it said {text!r}"

    def processes(self) -> list[Process]:
        """All that it started: each program has a session of its own, to which its children belong."""
        now = living()
        mine = os.getsid(0)  # a child has it too, for a moment
        self._sessions |= {one.session for one in now if one.parent == self.process.pid} - {mine}
        return [one for one in now if one.session in self._sessions]

    def shared_files(self) -> set[Path]:
        """What its engines have mapped of /dev/shm for themselves."""
        for one in self.processes():
            try:
                maps = Path(f"/proc/{one.pid}/maps").read_text()
            except OSError:
                continue
            mapped = {Path(name) for name in re.findall(r" (/dev/shm/\S+)$", maps, re.M)}
            self._shared |= {path for path in mapped if not path.is_relative_to(self.memory)}
        return self._shared

    def end(self) -> str:
        """Returns what it said."""
        output, _ = self.process.communicate(timeout=START)
        return output

    def check_nothing_left(self) -> None:
        assert self.processes() == []
        assert [path for path in self._shared if path.exists()] == []
        assert list(self.memory.iterdir()) == []
        assert list(self.temporary.iterdir()) == []


@pytest.fixture
def demo() -> Iterator[Demo]:
    with (
        tempfile.TemporaryDirectory(prefix="kvcellar-test-", dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(prefix="kvcellar-test-") as temporary,
    ):
        one = Demo(Path(memory), Path(temporary))
        yield one
        for process in one.processes():
            os.kill(process.pid, signal.SIGKILL)
        one.process.kill()
        one.process.communicate()


def test_the_second_engine_computes_nothing_that_the_first_has_computed(demo: Demo) -> None:
    demo.start().read_until("Engine A is given")
    assert len(demo.shared_files()) > 0
    output = demo.end()
    assert demo.process.returncode == 0, output
    assert "NOT AS PROMISED" not in output
    outcome = output.splitlines()[-1]
    faster = r"Engine B answered in \d+\.\d\d s instead of \d+\.\d\d s: "
    whose = r"512 of 532 prompt tokens came from engine A's work\."
    assert re.match(f"{faster}{whose}$|{whose} The document was too short to gain by that", outcome)
    demo.check_nothing_left()


# In the middle of starting engines is the hardest: they have started processes and cannot end them yet.
@pytest.mark.parametrize(
    ("number", "when"), [(signal.SIGINT, Demo.shared_files), (signal.SIGTERM, Demo.processes)]
)
def test_an_interrupted_demo_leaves_nothing_behind(
    demo: Demo, number: int, when: Callable[[Demo], Collection[Any]]
) -> None:
    demo.start()
    eventually(lambda: when(demo), timeout=START)
    demo.process.send_signal(number)
    output = demo.end()
    assert demo.process.returncode == 128 + number, output
    assert "Traceback" not in output
    demo.check_nothing_left()


def test_a_failure_shows_the_end_of_the_log_and_keeps_it(demo: Demo) -> None:
    output = demo.start(VLLM_LOGGING_LEVEL="nonsense").end()
    assert demo.process.returncode == 1
    assert "demo: Engine A did not start." in output
    shown = re.search(r"^The end of (.+):$", output, re.M)
    assert shown, output
    assert output.rstrip().endswith(Path(shown[1]).read_text().rstrip().splitlines()[-1])
    assert demo.processes() == []
    assert list(demo.memory.iterdir()) == []


def test_an_unusable_folder_is_one_sentence(demo: Demo) -> None:
    output = demo.start("--folder", str(demo.memory / "missing")).end()
    assert demo.process.returncode == 1
    assert len(output.splitlines()) == 1
    assert "--folder" in output
    demo.check_nothing_left()
