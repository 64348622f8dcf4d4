"""Where tables are shown."""

from typing import Any

from rich.console import Console


def new_console(**options: Any) -> Console:
    console = Console(**options)
    if not console.width:  # COLUMNS=0, as some terminals say that do not know: rich would show nothing
        console.width = 80
    return console
