"""What a user may say in `kv_connector_extra_config`. Nothing is required."""

from pathlib import Path
from typing import Any, NamedTuple

from vllm.config import VllmConfig

from kvcellar.config import default_socket, parse_path
from kvcellar.errors import ConfigError

_KNOWN = {"socket", "require", "lookup_timeout_ms", "tenant", "staging_mib"}


class Options(NamedTuple):
    socket: Path
    session: str  # common to the scheduler and the workers of this engine
    require: bool  # refuse to start without a server
    lookup_timeout: float  # seconds a request may wait for an answer
    tenant: str
    staging_bytes: int  # of GPU memory per rank, where KV is in GPU memory


def read_options(config: VllmConfig) -> Options:
    transfer = config.kv_transfer_config
    assert transfer is not None
    extra: dict[str, Any] = dict(transfer.kv_connector_extra_config or {})
    if unknown := sorted(set(extra) - _KNOWN):
        raise ConfigError(
            f"kv_connector_extra_config: unknown {unknown[0]!r}; known are {', '.join(sorted(_KNOWN))}"
        )
    timeout = extra.get("lookup_timeout_ms", 50)
    if type(timeout) not in (int, float) or not 1 <= timeout <= 10_000:
        raise ConfigError(f"lookup_timeout_ms: got {timeout!r}, expected milliseconds from 1 to 10000")
    staging = extra.get("staging_mib", 64)
    if not isinstance(staging, int) or not 4 <= staging <= 4096:
        raise ConfigError(f"staging_mib: got {staging!r}, expected a whole number from 4 to 4096")
    if not isinstance(extra.get("require", False), bool):
        raise ConfigError(f"require: got {extra['require']!r}, expected true or false")
    for name in ("socket", "tenant"):
        if not isinstance(extra.get(name, ""), str):
            raise ConfigError(f"{name}: got {extra[name]!r}, expected text")
    if transfer.kv_role != "kv_both":
        raise ConfigError(f"kv_role: got {transfer.kv_role!r}, expected 'kv_both'")
    try:
        socket = parse_path(extra["socket"]) if "socket" in extra else default_socket()
    except ValueError as error:
        raise ConfigError(f"socket: got {extra['socket']!r}, expected {error}") from None
    return Options(
        socket=socket,
        session=f"vllm-{transfer.engine_id}",
        require=extra.get("require", False),
        lookup_timeout=timeout / 1000,
        tenant=extra.get("tenant", ""),
        staging_bytes=staging << 20,
    )
