"""Tiers: colder places that hold objects by name, behind the memory of the server.

Here is what whoever adds a storage engine needs (docs/tiers.md); the server takes the rest from its modules.
"""

from kvcellar.tiers.engine import Buffer, Engine, EngineError

__all__ = ["Buffer", "Engine", "EngineError"]
