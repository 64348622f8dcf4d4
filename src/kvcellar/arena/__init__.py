"""The arena: shared memory on files. File work only; who may use a slot is the ledger's business."""

from kvcellar.arena.arena import Adopted, Arena, RackKey, available_bytes, default_limit, remove_folder
from kvcellar.arena.rack import Rack, RackSpec
from kvcellar.arena.table import StripeTable, TableId

__all__ = [
    "Adopted",
    "Arena",
    "Rack",
    "RackKey",
    "RackSpec",
    "StripeTable",
    "TableId",
    "available_bytes",
    "default_limit",
    "remove_folder",
]
