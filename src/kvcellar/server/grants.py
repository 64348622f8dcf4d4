"""Places as they travel: a little-endian u32 each, by group."""

from array import array

from kvcellar.ledger import Granted


def pack_places(grant: Granted) -> tuple[bytes, ...]:
    return tuple(array("I", row).tobytes() for row in grant.places)
