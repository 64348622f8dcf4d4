"""What several tests of one part begin with: a ledger that is audited at the end, an arena's folder."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from kvcellar.arena import Arena, Rack
from kvcellar.identity import Namespace
from kvcellar.ledger import Ledger, audit
from tests.mounts import tmpfs
from tests.support import Engine, namespace

MIB = 1 << 20


@pytest.fixture
def ledger():
    ledger = Ledger(epoch=7, hold_limit=1 << 40)
    yield ledger
    audit(ledger)


@pytest.fixture
def one(ledger):
    """An engine of a single rank."""
    return Engine(ledger, namespace())


@pytest.fixture
def shm():
    root = Path(tempfile.mkdtemp(prefix="kvcellar-test-", dir="/dev/shm"))
    yield root
    shutil.rmtree(root)


@pytest.fixture
def tiny_tmpfs(shm):
    """A tmpfs of 64 KiB."""
    with tmpfs(shm / "tiny", "64k") as mounted:
        yield mounted


@pytest.fixture
def folder(shm):
    return shm / "cellar"


@pytest.fixture
def serve(folder):
    """Start a server's arena in the folder; all are gone when the test is over."""
    started: list[Arena] = []

    def start(limit: int = 4 * MIB, where: Path = folder) -> Arena:
        started.append(Arena(where, limit))
        return started[-1]

    yield start
    for arena in started:
        with contextlib.suppress(OSError):
            kill(arena)


def kill(arena: Arena) -> None:
    """As kill -9 would: the kernel closes descriptors, nothing else is done."""
    for rack in arena.racks.values():
        rack.close()
    fd, arena._lock = arena._lock, -1
    os.close(fd)


def grow(arena: Arena, ns: Namespace | None = None, group: int = 0) -> Rack:
    ns = ns or namespace()
    spec = arena.plan(ns, group)
    assert spec is not None
    rack = arena.create(ns, spec)
    arena.finish(rack)
    return rack
