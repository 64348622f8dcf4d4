"""What a figure was measured on, and how a list of times becomes figures."""

import os
import platform
import sys
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release().partition("-")[0],  # not who built it
        "python": platform.python_version(),
        "bytecode_is_cached": not sys.dont_write_bytecode,  # or every start compiles all modules first
        "load_before": load(),
    }


def load() -> float:
    """Processes that ran or wanted to, over the last minute."""
    return round(os.getloadavg()[0], 2)


def available_memory() -> int:
    """Bytes that may still be used before the machine runs short: a tmpfs promises more than there is."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kib) << 10


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[int(len(times) * share)]


def summary(times: list[float]) -> dict[str, Any]:
    """From seconds to what all tables of times hold."""
    p50, p99 = (round(percentile(times, share) * 1e3, 4) for share in (0.5, 0.99))
    return {"p50_ms": p50, "p99_ms": p99, "samples": len(times)}
