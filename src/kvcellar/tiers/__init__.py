"""Tiers: colder places that hold objects by name, behind the memory of the server."""

from kvcellar.tiers.engine import Buffer, Engine, EngineError, object_name

__all__ = ["Buffer", "Engine", "EngineError", "object_name"]
