"""How to keep trying to reach a server: again and again, ever more slowly, until told to stop."""

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvcellar.errors import CellarError, Rejected

log = logging.getLogger(__name__)

_FIRST_S, _LONGEST_S = 0.02, 1.0
_REJECTED_S = 5.0  # the server does not want us; only a restart of one side will change that


def keep_trying(
    path: Path,
    attempt: Callable[[], None],
    stopped: threading.Event,
    *,
    level: int = logging.WARNING,
    told: str = "",
    made: float = -math.inf,
) -> bool:
    """Call `attempt` until it succeeds (True) or `stopped` is set (False). New trouble is logged once; `told`
    is not new.

    `made`: when it last succeeded, on the monotonic clock. What did not last is not tried again at once: two
    that take a name from each other would do nothing else.
    """
    if time.monotonic() - made < _LONGEST_S:
        stopped.wait(_LONGEST_S * random.uniform(0.5, 1.0))
    delay = _FIRST_S
    while not stopped.is_set():
        try:
            attempt()
        except CellarError as error:
            if str(error) != told:
                told = str(error)
                log.log(level, "KVCellar: no cache for now (%s): %s", path, error)
            pause = _REJECTED_S if isinstance(error, Rejected) else delay * random.uniform(0.5, 1.0)
            stopped.wait(pause)
            delay = min(2 * delay, _LONGEST_S)
        else:
            if told:
                log.log(level, "KVCellar: the cache is back (%s)", path)
            return True
    return False
