"""The arena: shared memory on files. File work only; who may use a slot is the ledger's business."""

from kvcellar.arena.arena import Adopted, Arena, RackKey
from kvcellar.arena.folder import available_bytes, default_limit, remove_folder
from kvcellar.arena.rack import Rack, RackSpec

__all__ = [
    "Adopted",
    "Arena",
    "Rack",
    "RackKey",
    "RackSpec",
    "available_bytes",
    "default_limit",
    "remove_folder",
]
