"""Do the books balance? For tests, and for whoever doubts.

Counts everything again from the leases and compares it with what sessions, stripes and shelves say.
"""

from kvcellar.ledger.lease import bits
from kvcellar.ledger.ledger import Ledger


def audit(ledger: Ledger) -> None:
    """Raises AssertionError at the first thing that does not add up."""
    pins = ledger.own.held.copy()
    for session in ledger.sessions.values():
        held = 0
        for lease in session.leases.values():
            assert not lease.is_over, "a lease that nobody holds was kept"
            for bit in bits(lease.held()):
                stripe = lease.stripes[bit]
                assert stripe is not None, "a share of nothing"
                assert stripe.ready != lease.writing, (
                    "a reader of what is being written, or a writer of what is read"
                )
                held += lease.room.shelves[lease.groups[bit // lease.chunks]].stripe_bytes
                pins[stripe] += not lease.writing
        assert held == session.held_bytes, f"{session} holds {held}, says {session.held_bytes}"
    for room in ledger.rooms.values():
        for shelf in room.shelves:
            shelf.check(pins)
