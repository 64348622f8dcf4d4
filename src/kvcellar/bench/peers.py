"""Peers: other caches, driven through the same operations by scripts of the source checkout.

    tools/peer_NAME.sh FOLDER     installs the peer in a virtual environment; nothing if it is there
    bench/peers/NAME.py           run with that environment's python, prints one JSON object

The scripts are no part of the installed package: a peer can only be measured from a checkout.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import kvcellar
from kvcellar.bench.child import child
from kvcellar.errors import ConfigError, Unavailable

NAMES = ("lmcache",)
CACHE = Path("~/.cache/kvcellar")

# Figures of ours and of the peer that mean the same. A peer answers a lookup in several requests; the figure
# that waits for each of them without polling is its best, so that one is compared.
_SAME = {"lookup": "lookup_blocking", "store_bookkeeping": "store_bookkeeping"}
_LESS_IS_BETTER = ("ready_s", "roundtrip_p50_us", "roundtrip_p99_us")


def check_peer(name: str) -> None:
    """Before anything is measured: a wrong name or a missing script is the caller's mistake."""
    if name not in NAMES:
        raise ConfigError(f"--peer: got {name!r}, expected {' or '.join(NAMES)}")
    for path in (_installer(name), _driver(name)):
        if not path.is_file():
            raise ConfigError(f"--peer needs a source checkout of kvcellar: there is no {path}")


def run_peer(name: str, *, quick: bool) -> dict[str, Any]:
    """What the peer's driver measured; it is installed first if need be, which takes minutes."""
    folder = CACHE.expanduser() / f"{name}-venv"
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([str(_installer(name)), str(folder)], f"installing {name}", stdout=sys.stderr.fileno())
    command = [str(folder / "bin" / "python"), str(_driver(name)), *(["--quick"] if quick else [])]
    answer: dict[str, Any] = json.loads(_run(command, f"measuring {name}", stdout=subprocess.PIPE))
    return answer


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """How many times better we are, for every figure that both have."""
    found: dict[str, Any] = {key: _ratio(theirs[key], ours[key]) for key in _LESS_IS_BETTER}
    found["pipelined_per_s"] = _ratio(ours["pipelined_per_s"], theirs["pipelined_per_s"])
    for key, their_key in _SAME.items():
        found[key] = {
            case: _ratio(theirs[their_key][case]["p50_ms"], figures["p50_ms"])
            for case, figures in ours[key].items()
        }
    crowd, their_crowd = ours["concurrent"]["lookup"], theirs["concurrent"]
    found["concurrent"] = {
        "lookup_p50_ms": _ratio(their_crowd["p50_ms"], crowd["p50_ms"]),
        "lookup_p99_ms": _ratio(their_crowd["p99_ms"], crowd["p99_ms"]),
        "lookup_per_s": _ratio(crowd["per_s"], their_crowd["lookups_per_s"]),
    }
    return found


def _ratio(larger: float, smaller: float) -> float:
    return round(larger / smaller, 2)


def _run(command: list[str], doing: str, stdout: int) -> bytes:
    """What it printed; its stderr is ours."""
    try:
        with child(command, stdout=stdout) as process:
            printed, _ = process.communicate()
    except OSError as error:
        raise Unavailable(f"{doing} failed: {error}") from None
    if process.returncode:
        raise Unavailable(f"{doing} failed with exit code {process.returncode}; it says why above")
    return printed or b""


def _root() -> Path:
    return Path(kvcellar.__file__).parents[2]


def _installer(name: str) -> Path:
    return _root() / "tools" / f"peer_{name}.sh"


def _driver(name: str) -> Path:
    return _root() / "bench" / "peers" / f"{name}.py"
