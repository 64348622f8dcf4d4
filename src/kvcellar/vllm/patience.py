"""How long waiting for a tier pays: measured on one side by the tier, on the other by this engine's prefill.

Chunks from a tier take so long (the server says, once it has measured it); computing them takes their tokens
over the engine's prefill rate (measured here, step by step). Waiting pays while the first is clearly less
than the second. When in doubt it does not: the engine is taken to be as fast as it ever was lately, and a
tier that nobody has measured lately gets one short trial.

Pure: the clock is passed in, vLLM is not imported, and tickets are just numbers.
"""

from collections import deque
from collections.abc import Callable

# A tier must be so much faster than computing: what it brings must still be copied, and rates vary.
_PAYS = 0.8
# How much longer than expected it may take, and what asking costs at all.
_SLACK, _ASKING_S = 1.5, 0.02
# For a tier whose rate nobody knows: what may be lost to find out, of what computing takes. Reads that have
# begun by then are measured when they end, so it need not last until something has come; but asking takes its
# time, and for that it may be more, up to half.
_TRIAL_S, _TRIAL_SHARE, _ASKING_SHARE = 0.25, 0.04, 0.5
# What reading for a request in the queue may take at least: nobody waits for it yet.
_AHEAD_S = 1.0
# The server answers in time; this is for the answer's way.
_WAY_S = 0.05
# Tokens per second, until a step was measured: as fast as a large GPU with a small model, so waits are short.
_ASSUMED_RATE = 20_000.0
# Smaller steps are decoding, and say nothing of prefill.
_PREFILL_TOKENS = 128
# Steps that may be under way at once: more than an engine has, and a bound.
_AHEAD_STEPS = 64
_FADING = 0.05


class Patience:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rate = 0.0  # tokens per second; 0 until measured
        self._steps: deque[tuple[float, int]] = deque(maxlen=_AHEAD_STEPS)  # when each began, and its tokens
        self._lead_s = self._chunk_s = 0.0  # as the server said last
        self._until: dict[int, float] = {}  # by ticket

    # -- how fast the engine computes -------------------------------------------------------------------

    def step_begins(self, tokens: int) -> None:
        """One in which something is computed. The engine may begin another before it ends."""
        self._steps.append((self._clock(), tokens))

    def step_ends(self) -> None:
        """The one that began first."""
        if not self._steps:
            return
        began, tokens = self._steps.popleft()
        took = self._clock() - began
        if tokens < _PREFILL_TOKENS or took <= 0:
            return
        rate = tokens / took
        # Faster counts at once, slower only by and by: a slow step may have waited for something else.
        self._rate = max(rate, self._rate + _FADING * (rate - self._rate))

    def computing_s(self, tokens: int) -> float:
        return tokens / (self._rate or _ASSUMED_RATE)

    # -- how long to wait -------------------------------------------------------------------------------

    def told(self, lead_s: float, chunk_s: float) -> None:
        """What the server expects: until the first chunk, and for each; 0: it does not know."""
        self._lead_s, self._chunk_s = lead_s, chunk_s

    def worth(self, chunks: int, chunk_tokens: int) -> float:
        """Seconds that so many chunks are worth waiting for; 0: not at all."""
        if chunks <= 0:
            return 0.0
        computing = self.computing_s(chunks * chunk_tokens)
        if not self._chunk_s:
            asking = min(_ASKING_S, _ASKING_SHARE * computing)
            return max(asking, min(_TRIAL_S, _TRIAL_SHARE * computing))
        expected = self._lead_s + chunks * self._chunk_s
        if expected > _PAYS * computing:
            return 0.0
        return min(_SLACK * expected + _ASKING_S, computing)

    def ahead(self, chunks: int, chunk_tokens: int) -> float:
        """Seconds for which a tier may read so many chunks for a request that the engine has not got to. If
        computing takes less than that, others in the queue need the tier more.
        """
        return max(_AHEAD_S, self.computing_s(chunks * chunk_tokens))

    def begin(self, ticket: int, seconds: float) -> None:
        """The server was asked to answer within this time."""
        self._until[ticket] = self._clock() + seconds + _WAY_S if seconds else 0.0

    def lasts(self, ticket: int) -> bool:
        """Is it still worth waiting? A no is final."""
        if self._clock() < self._until.get(ticket, 0.0):
            return True
        self.forget(ticket)
        return False

    def forget(self, ticket: int) -> None:
        self._until.pop(ticket, None)
