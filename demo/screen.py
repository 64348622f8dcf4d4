"""What the person sees: a line for each thing that happens, with the seconds since the start, and below
them, in a terminal, how long the present one has been going on.
"""

import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

_MARGIN = " " * 7


class Screen:
    def __init__(self, console: Console) -> None:
        self.failed = 0  # expectations
        self._console = console
        self._started = self._since = time.monotonic()

    def live(self) -> Live:
        return Live(console=self._console, get_renderable=self._view, refresh_per_second=8, transient=True)

    @property
    def is_terminal(self) -> bool:
        return self._console.is_terminal

    def phase(self, text: str) -> None:
        self._since = time.monotonic()
        self._print(Text(f"{self._since - self._started:4.0f} s "), Text(text, "bold"))

    def note(self, text: str, style: str = "") -> None:
        self._print(Text(_MARGIN), Text(text, style))

    def expect(self, condition: bool, text: str) -> None:
        self.failed += not condition
        mark = Text("✔ ", "green") if condition else Text("✘ NOT AS PROMISED: ", "red")
        self._print(Text(_MARGIN), mark, Text(text))

    def conclude(self, text: str) -> None:
        self._print()
        self._print(Text(text, "bold green"))

    def _view(self) -> Text:
        return Text(f"{_MARGIN}… {time.monotonic() - self._since:.0f} s", "dim")

    def _print(self, *parts: Text) -> None:
        self._console.print(Text.assemble(*parts), soft_wrap=True)


def short(path: Path) -> str:
    """As people write it."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
