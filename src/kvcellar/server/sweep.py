"""Sweep: frees what a clear, or the end of grace, has left behind, a part in each turn of the loop, so that
engines are answered in between.
"""

import asyncio

from kvcellar.ledger import Ledger


async def sweep(ledger: Ledger) -> None:
    while ledger.sweep():
        await asyncio.sleep(0)
