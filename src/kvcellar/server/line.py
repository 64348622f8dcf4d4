"""The line of requests that still wait in their engines' queues, one for each namespace.

In the order of arrival, one at a time, each has what it needs brought up, and holds it until its engine asks
for it. All of them together hold a part of the namespace's memory and no more: whoever does not fit waits
until somebody before him is gone, so a long queue pins no more than a short one, and always for those who are
next. Knows nothing of tiers.
"""

import asyncio

from kvcellar.ledger import Room

# Of the places of a namespace's smallest shelf: what is left is for those who run.
_PART = 4


class Line:
    def __init__(self, room: Room) -> None:
        self.turn = asyncio.Lock()  # given in the order of asking
        self.held = 0  # chunks
        self._room = room
        self._left = asyncio.Event()

    @property
    def limit(self) -> int:
        """Chunks. Memory grows, and shrinks, so it is not always the same."""
        return min(shelf.slots for shelf in self._room.shelves) // _PART

    async def take(self, chunks: int) -> int:
        """By whoever has the turn: how many of these may be held, when those before leave enough of them. It
        is less only where not even an empty line would have room for all.
        """
        while self.held and self.held + chunks > self.limit:
            self._left.clear()
            await self._left.wait()
        taken = min(chunks, self.limit)
        self.held += taken
        return taken

    def leave(self, chunks: int) -> None:
        self.held -= chunks
        self._left.set()
