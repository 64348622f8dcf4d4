"""Room: one namespace and its shelves, one per group."""

from kvcellar.identity import ChunkKey, Namespace, stripe_bytes, window_chunks
from kvcellar.ledger.shelf import Shelf
from kvcellar.sketch import OwnSketch


class Room:
    def __init__(self, namespace: Namespace, sketch: OwnSketch | None = None) -> None:
        self.namespace = namespace
        self.shelves = [
            Shelf(stripe_bytes(namespace, group), sketch=sketch) for group in range(len(namespace.groups))
        ]
        self.windows = [window_chunks(group, namespace.chunk_tokens) for group in namespace.groups]
        self.has_windows = any(window is not None for window in self.windows)
        self.chunk_bytes = sum(shelf.stripe_bytes for shelf in self.shelves)

    def chunks_within(self, size: int, most: int) -> int:
        """The longest hit, up to `most` chunks, that holds no more than so many bytes: of a window it holds
        the end only.
        """
        chunks, left, each = 0, max(0, size), self.chunk_bytes
        ends = [(w, s.stripe_bytes) for w, s in zip(self.windows, self.shelves, strict=True) if w is not None]
        for window, stripe in sorted(ends):
            grows = min(window, most) - chunks  # until this group has all that it needs
            if grows * each > left:
                break
            chunks, left, each = chunks + grows, left - grows * each, each - stripe
        return min(most, chunks + left // each) if each else most

    def lacks(self, key: ChunkKey) -> bool:
        """Whether a group that needs every chunk of a hit has lost this one, and nobody is writing it."""
        rows = zip(self.shelves, self.windows, strict=True)
        return any(window is None and shelf.get(key) is None for shelf, window in rows)

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
