"""The in-memory engine passes the suite that all engines pass."""

import pytest

from kvcellar.tiers.memory import MemoryEngine
from tests.tiers.conformance import EngineConformance


class TestMemoryEngine(EngineConformance):
    @pytest.fixture
    def make(self):
        return MemoryEngine
