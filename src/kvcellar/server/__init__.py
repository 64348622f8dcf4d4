"""The daemon: one event loop around the ledger, the arena and the wire."""

from kvcellar.server.server import Server

__all__ = ["Server"]
