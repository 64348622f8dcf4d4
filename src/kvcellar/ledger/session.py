"""Session: one engine, as the ledger sees it: which of its ranks live, what they hold, what they did.

The owner of every lease. Ranks are members while their process is known to be alive, whether or not they have
a connection just now. Knows nothing of sockets: the server says who joined and who died.
"""

from collections import Counter

from kvcellar.identity import NamespaceId
from kvcellar.ledger.lease import Lease, LeaseId

# The scheduler side is a member too, but holds no share of its own: it acts for ranks until they are told.
SCHEDULER = -1


class Session:
    __slots__ = ("counts", "held_bytes", "leases", "members", "name", "namespaces")

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: set[int] = set()
        self.namespaces: set[NamespaceId] = set()
        self.leases: dict[LeaseId, Lease] = {}
        self.held_bytes = 0  # pinned or being written, each stripe once per lease
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Session {self.name}: members {sorted(self.members)}, {len(self.leases)} leases>"
