"""What the connector's workers count, on its way to vLLM's log and its Prometheus endpoint."""

from collections import Counter
from typing import Any

from prometheus_client import Counter as PromCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# Every figure is a sum, over ranks and over time.
COUNTERS = {
    "loads": "Loads from the cache, one per request and rank.",
    "loads_failed": "Loads that failed and were computed instead.",
    "load_bytes": "Bytes loaded and verified.",
    "load_seconds": "Time spent loading.",
    "stores": "Stores into the cache, one per batch of chunks and rank.",
    "stores_dropped": "Stores that were given up.",
    "store_bytes": "Bytes stored.",
    "store_seconds": "Time spent storing.",
}


class CellarStats(KVConnectorStats):
    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return CellarStats(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class CellarMetrics(KVConnectorPromMetrics):
    """vllm:kvcellar_loads_total and so on, by engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: metric_types[PromCounter](f"vllm:kvcellar_{name}", text, labelnames)
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx]).inc(amount)
