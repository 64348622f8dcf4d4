"""The usual clients that tiers are measured beside. No figure is judged here."""

import pytest

from kvcellar.bench.raw import raw_clients
from kvcellar.errors import CellarError
from tests.tiers.conformance import buffer


@pytest.mark.parametrize("client", ["raw", "socket"])
def test_a_redis_without_kvcellar_gives_a_figure_of_writing_and_one_of_reading(valkey, client):
    rates = raw_clients(valkey.url, [buffer(1 << 20), buffer(1 << 20)], 8)[client]
    assert next(rates) > 0
    assert next(rates) > 0
    rates.close()


def test_a_bare_socket_does_not_wait_for_ever_for_what_was_evicted(valkey, monkeypatch):
    monkeypatch.setattr("kvcellar.bench.raw._PATIENCE_S", 1)
    rates = raw_clients(valkey.url, [buffer(1 << 20)], 2)["socket"]
    next(rates)
    valkey.say("FLUSHALL")
    with pytest.raises(CellarError, match="did not get its value"):
        next(rates)
