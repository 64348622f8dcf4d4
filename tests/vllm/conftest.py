"""The server of tests/server, for tests with real engines."""

from tests.server.conftest import stopped_server

__all__ = ["stopped_server"]
