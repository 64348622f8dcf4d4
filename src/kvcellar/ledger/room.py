"""Room: one namespace and its shelves, one per group."""

from kvcellar.identity import Namespace, stripe_bytes, window_chunks
from kvcellar.ledger.shelf import Shelf


class Room:
    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.shelves = [Shelf(stripe_bytes(namespace, group)) for group in range(len(namespace.groups))]
        self.windows = [window_chunks(group, namespace.chunk_tokens) for group in namespace.groups]
        self.has_windows = any(window is not None for window in self.windows)
        self.chunk_bytes = sum(shelf.stripe_bytes for shelf in self.shelves)

    @property
    def pinned(self) -> bool:
        """By an operator: nothing of it is evicted."""
        return self.shelves[0].pinned

    def set_pinned(self, pinned: bool) -> None:
        for shelf in self.shelves:
            shelf.pinned = pinned

    def set_guarded(self, guarded: bool) -> None:
        for shelf in self.shelves:
            shelf.set_guarded(guarded)
