"""The ledger: index, leases and eviction. Synchronous, in memory; its only I/O is the tables it is given."""

from kvcellar.ledger.audit import audit
from kvcellar.ledger.lease import Lease, LeaseId
from kvcellar.ledger.ledger import NO_LEASE, Granted, Ledger
from kvcellar.ledger.room import Room
from kvcellar.ledger.session import SCHEDULER, Session
from kvcellar.ledger.shelf import Shelf, Table
from kvcellar.ledger.stripe import Stripe

__all__ = [
    "NO_LEASE",
    "SCHEDULER",
    "Granted",
    "Lease",
    "LeaseId",
    "Ledger",
    "Room",
    "Session",
    "Shelf",
    "Stripe",
    "Table",
    "audit",
]
