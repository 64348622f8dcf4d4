"""What the two sides of the connector tell each other, inside vLLM's own metadata.

Scheduler to workers: load and store jobs. Workers to scheduler: which stores are over, and which loads
failed.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvcellar.vllm.jobs import Job


@dataclass
class CellarMetadata(KVConnectorMetadata):
    namespace: bytes = b""  # encoded; empty while the scheduler has none
    loads: list[Job] = field(default_factory=list)
    stores: list[Job] = field(default_factory=list)
    idle: bool = False  # the step has no forward


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What ranks tell the scheduler side beyond what vLLM asks them."""

    stores: Counter[int] = field(default_factory=Counter)  # ranks that are done with a job, well or not
    failed: set[str] = field(default_factory=set)  # requests whose load failed
    idle: bool = False  # of a step without a forward

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.stores + other.stores, self.failed | other.failed, self.idle)


def this_host() -> str:
    """The same in every process and container of a host, until it boots again. Empty if it is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass
class TensorLayout(KVConnectorHandshakeMetadata):
    """The KV that one rank has: the layers of its pipeline stage, and how they lie in memory."""

    groups: list[dict[str, int]]  # by group: bytes of a block, by layer
    layers: dict[str, str] = field(default_factory=dict)  # what one block is made of
    problem: str = ""  # why this rank cannot take part
    host: str = field(default_factory=this_host)  # where this rank runs
