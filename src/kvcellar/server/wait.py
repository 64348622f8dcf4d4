"""A wait: one lookup that tiers may have more for, or a request that is expected to ask. Knows nothing of how
that is brought up.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcellar.identity import ChunkKey
from kvcellar.ledger import Granted, Shelf, Stripe
from kvcellar.server.members import Member
from kvcellar.server.objects import Goods
from kvcellar.tiers.tier import Tier

if TYPE_CHECKING:
    from kvcellar.server.fetch import Fetch


class Wait:
    """Holds pins on all it will be granted."""

    def __init__(
        self,
        ticket: int,
        member: Member,
        goods: Goods,
        keys: Sequence[ChunkKey],
        granted: Granted,
        deadline: float,
        *,
        expected: bool = False,
    ) -> None:
        self.ticket = ticket
        self.member = member
        self.goods = goods
        self.keys = keys
        self.granted = granted  # what memory had
        self.deadline = deadline  # on the monotonic clock
        self.expected = expected
        self.holds: list[tuple[Shelf, Stripe]] = []
        self.promised = 0  # bytes that the engine will hold more by it
        self.fetches: set[Fetch] = set()
        self.silent: set[Tier] = set()  # did not answer in time
        self.task: asyncio.Task[None] | None = None
        self.abandoned = False

    @property
    def had(self) -> int:
        return self.granted.chunks

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()
