"""The tiers behind one server: opened, used for write-back and prefetch, reported and closed together.

A server without tiers has none of this, and pays nothing for it.
"""

import asyncio
from collections.abc import Callable, Sequence

from kvcellar.arena import Arena
from kvcellar.ledger import Ledger
from kvcellar.server.fetch import Fetches
from kvcellar.server.members import Members
from kvcellar.server.objects import Objects
from kvcellar.server.prefetch import Prefetch
from kvcellar.server.steward import Steward
from kvcellar.server.writeback import Outbox, WriteBack
from kvcellar.tiers.admission import WriteReused
from kvcellar.tiers.registry import TierSpec
from kvcellar.tiers.tier import Tier
from kvcellar.wire.report import TierReport

# An engine that has not opened by then may still come; the server does not wait for it.
_START_S = 2.0


class Tiers:
    def __init__(
        self, specs: Sequence[TierSpec], ledger: Ledger, arena: Arena, members: Members, steward: Steward
    ) -> None:
        self._tiers = [Tier(spec.label, spec.open) for spec in specs]
        objects = Objects(arena, self._forget)
        self._writeback = WriteBack(ledger, objects, self._tiers, [spec.write_filter() for spec in specs])
        fetches = Fetches(ledger, objects, steward, self._writeback, self._tiers)
        self.prefetch = Prefetch(ledger, members, self._tiers, fetches)
        steward.unmap = objects.forget
        ledger.published = self._writeback.published
        if any(spec.write_filter is WriteReused for spec in specs):  # nobody else wants to know
            ledger.used = self._writeback.used

    async def start(self) -> None:
        """Raises StartupError for settings that cannot work."""
        await asyncio.gather(*(tier.start(_START_S) for tier in self._tiers))

    async def drain(self, is_over: Callable[[], bool]) -> None:
        """Write back what is queued, unless it is over before."""
        await self._writeback.drain(is_over)

    def _forget(self, memory: memoryview) -> None:
        for tier in self._tiers:
            tier.forget(memory)

    def close(self) -> None:
        self.prefetch.close()
        for tier in self._tiers:
            tier.close()

    @property
    def is_idle(self) -> bool:
        return all(tier.is_idle for tier in self._tiers)

    def reports(self) -> list[TierReport]:
        return [_report(outbox) for outbox in self._writeback.outboxes]


def _report(outbox: Outbox) -> TierReport:
    tier = outbox.tier
    state, reason = tier.state
    usage, stats = tier.usage, tier.stats
    return TierReport(
        label=tier.label,
        state=state,
        reason=reason,
        objects=usage.objects,
        used_bytes=usage.used_bytes,
        capacity_bytes=usage.capacity_bytes,
        read_bytes=stats.reads.bytes,
        written_bytes=stats.writes.bytes,
        read_rate=stats.reads.rate,
        write_rate=stats.writes.rate,
        queued=len(outbox.waiting) + outbox.running,
        counts=dict(stats.counts),
        dropped=dict(outbox.dropped),
    )
