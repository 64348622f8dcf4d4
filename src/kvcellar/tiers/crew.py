"""A crew: a fixed number of threads that work off blocking calls, the urgent ones first.

Not a ThreadPoolExecutor: that one waits for its threads when the process ends, and a thread that is stuck in
a dead disk or network never ends. These are daemons: a stuck one costs the crew a hand, and nobody waits.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Crew:
    def __init__(self, name: str, hands: int) -> None:
        self._urgent: deque[Callable[[], None]] = deque()
        self._rest: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        for number in range(hands):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    @property
    def backlog(self) -> int:
        return len(self._urgent) + len(self._rest)

    def submit(self, call: Callable[[], None], *, urgent: bool) -> None:
        """`call` must not raise."""
        with self._wake:
            (self._urgent if urgent else self._rest).append(call)
            self._wake.notify()

    def withdraw(self, call: Callable[[], None]) -> bool:
        """True: no thread has taken it, and none will."""
        with self._wake:
            for queue in (self._urgent, self._rest):
                with suppress(ValueError):
                    queue.remove(call)
                    return True
        return False

    def close(self) -> None:
        """What is queued is still worked off; then the threads end. Waits for nothing."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._urgent or self._rest):
                    if self._closed:
                        return
                    self._wake.wait()
                call = (self._urgent or self._rest).popleft()
            call()
            del call  # or it would keep its buffers until the next one comes
