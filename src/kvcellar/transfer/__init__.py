"""Transfer: how KV gets from an engine's memory into slots and back, checked on the way."""

from kvcellar.transfer.checksum import CHECKSUMS, digest_maker
from kvcellar.transfer.host import HostTransfer
from kvcellar.transfer.mover import HostMover, Mover, NoMover, Rows
from kvcellar.transfer.slots import Stamp
from kvcellar.transfer.steps import block_memory

__all__ = [
    "CHECKSUMS",
    "HostMover",
    "HostTransfer",
    "Mover",
    "NoMover",
    "Rows",
    "Stamp",
    "block_memory",
    "digest_maker",
]
