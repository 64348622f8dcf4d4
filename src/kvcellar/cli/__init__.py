"""The command line. Thin: parses, calls, prints."""

from kvcellar.cli.main import main

__all__ = ["main"]
