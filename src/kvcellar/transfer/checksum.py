"""The checksums that may stand in Namespace.checksum.

A checksum is made where KV leaves an engine and checked where it comes back, over the object's bytes in
object order. It is fed in pieces, and where they are cut must not change the result: writer and reader cut
differently.
"""

from collections.abc import Callable
from typing import Any, Protocol

import xxhash

from kvcellar.errors import BadRequest
from kvcellar.transfer.sum64 import Sum64


class Digest(Protocol):
    """One object's checksum in the making; the shape of hashlib's and xxhash's own."""

    def update(self, data: Any, /) -> None:
        """Take the next bytes: any contiguous buffer or array."""

    def intdigest(self) -> int:
        """The sum of all bytes so far, below 2**64."""


_ALGORITHMS: dict[str, Callable[[], Digest]] = {"xxh3-64": xxhash.xxh3_64, "sum64": Sum64}

CHECKSUMS = tuple(_ALGORITHMS)


def digest_maker(name: str) -> Callable[[], Digest]:
    """What starts a digest of the named algorithm."""
    if name not in _ALGORITHMS:
        raise BadRequest(f"unknown checksum {name!r}; known: {', '.join(CHECKSUMS)}")
    return _ALGORITHMS[name]
