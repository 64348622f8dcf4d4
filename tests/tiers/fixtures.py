"""Real storage engines as fixtures, started once for all tests that can share them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcellar.tiers.redis import RedisEngine, open_redis
from tools import backends


@pytest.fixture(scope="session")
def needs_backends() -> None:
    if reason := backends.missing():
        pytest.skip(reason)
    backends.install()


@pytest.fixture
def opened() -> Iterator[Callable[..., RedisEngine]]:
    """opened(url, ttl="5"): closed at the end."""
    made: list[RedisEngine] = []

    def open_one(url: str, **options: str) -> RedisEngine:
        made.append(open_redis(url, options))
        return made[-1]

    yield open_one
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def valkey(needs_backends: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[backends.Valkey]:
    with backends.Valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def start_valkey(needs_backends: None, tmp_path: Path) -> Iterator[Callable[..., backends.Valkey]]:
    """One that the test may break: start_valkey("--requirepass", "x")."""
    made: list[backends.Valkey] = []

    def start(*arguments: str) -> backends.Valkey:
        made.append(backends.Valkey(tmp_path / f"valkey{len(made)}", *arguments))
        return made[-1].start()

    yield start
    for server in made:
        server.kill()


@pytest.fixture(scope="module")
def cluster(
    needs_backends: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[backends.ValkeyCluster]:
    with backends.ValkeyCluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture(scope="session")
def seaweedfs(needs_backends: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[backends.SeaweedFS]:
    with backends.SeaweedFS(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server
