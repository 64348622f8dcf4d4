"""The ledger: index, leases and eviction. Synchronous, in memory; its only I/O is the tables it is given."""

from kvcellar.ledger.audit import audit
from kvcellar.ledger.lease import LeaseId
from kvcellar.ledger.ledger import NO_LEASE, Granted, Ledger
from kvcellar.ledger.policy import POLICIES, EvictionPolicy, SecondChance
from kvcellar.ledger.room import Room
from kvcellar.ledger.session import SCHEDULER, Session
from kvcellar.ledger.shelf import Shelf
from kvcellar.ledger.stripe import Stripe

__all__ = [
    "NO_LEASE",
    "POLICIES",
    "SCHEDULER",
    "EvictionPolicy",
    "Granted",
    "LeaseId",
    "Ledger",
    "Room",
    "SecondChance",
    "Session",
    "Shelf",
    "Stripe",
    "audit",
]
