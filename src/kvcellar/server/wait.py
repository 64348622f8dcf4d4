"""Who waits for what from tiers. Holds it together, and knows nothing of how it is brought up.

A wait is one lookup that tiers may have more for, or a request that is expected to ask; a fetch is one stripe
on its way. Each wait has many fetches, and a fetch all the waits that want its stripe.
"""

import asyncio
import time
from collections.abc import Sequence

from kvcellar.identity import ChunkKey, NamespaceId
from kvcellar.ledger import Granted, Shelf, Stripe
from kvcellar.server.members import Member
from kvcellar.server.objects import Goods
from kvcellar.tiers.tier import Tier

# Which stripe it is: namespace, group, key. Equal keys of two namespaces or groups are different things.
At = tuple[NamespaceId, int, ChunkKey]


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


class Fetch:
    def __init__(self, goods: Goods, group: int, key: ChunkKey, parent: ChunkKey | None) -> None:
        self.goods = goods
        self.group = group
        self.key = key
        self.parent = parent
        self.waiting: set[Wait] = set()
        self.give_up = 0.0  # when the last of all that ever waited does: on the monotonic clock
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def at(self) -> At:
        return self.goods.namespace_id, self.group, self.key

    @property
    def is_here(self) -> bool:
        return self.done.done() and self.done.result()

    @property
    def shelf(self) -> Shelf:
        return self.goods.room.shelves[self.group]
