"""Ghost: which keys were seen lately, in some 16 bytes each instead of the 150 of a dict.

A table of fingerprints, each with its turn: a key is known if it is among the last `window` that were added.
A newer key takes the cell of an older one, so up to two in five are forgotten early; a new key is taken for
a known one once in four billion times. Who uses it must not mind either.
"""

from array import array

from kvcellar.identity import ChunkKey

_MARK = 0xFFFF_FFFF << 32
_TURN = 0xFFFF_FFFF


class Ghost:
    def __init__(self, window: int) -> None:
        self.window = window
        self._turn = 0
        self._cells = array("Q")
        self._mask = 0
        self.resize(window)

    def resize(self, window: int) -> None:
        """Know the last `window` keys from now on. A table that has to grow forgets what it knew."""
        self.window = window
        if window > len(self._cells):
            size = 1 << (2 * window - 1).bit_length()
            self._cells = array("Q", bytes(8 * size))
            self._mask = size - 1

    def __contains__(self, key: ChunkKey) -> bool:
        number = int.from_bytes(key[:8], "little")
        cell = self._cells[number & self._mask]
        # An empty cell is 0, and turns start at 1. They wrap after 2**32 keys, which mistakes a few.
        return (cell ^ number) & _MARK == 0 and (self._turn - cell) & _TURN < self.window and cell != 0

    def add(self, key: ChunkKey) -> None:
        self._turn = (self._turn + 1) & _TURN
        number = int.from_bytes(key[:8], "little")
        self._cells[number & self._mask] = (number & _MARK) | self._turn
