"""What a bench says while it runs: lines that its parent passes on, with the time since it started."""

import time

MARK = "@"
_STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"{MARK} {time.monotonic() - _STARTED:6.1f} s  {text}", flush=True)
