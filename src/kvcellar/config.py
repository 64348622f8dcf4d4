"""Settings: from flags, then KVCELLAR_* variables, then one TOML file, then defaults. Parsed once, frozen, in
real units.

A wrong value stops the program and names the setting, the value and what is allowed. This is the only module
that reads the environment.
"""

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints
from urllib.parse import quote

from kvcellar.errors import ConfigError

_MAX_BYTES = 1 << 50
_MAX_FILE = 1 << 20  # characters: a device may have no end
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "KB": 10**3, "MB": 10**6}
_UNITS |= {"GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def fix_hash_seed() -> None:
    """Give vLLM's block hashes the same seed in every engine, unless the user chose one."""
    os.environ.setdefault("PYTHONHASHSEED", "0")


def parse_bytes(text: str) -> int:
    """'64GiB', '512M', '1073741824'."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError("a size such as 512MiB or 64GiB")
    size = Decimal(match[1]) * _UNITS[match[2].upper()]
    if size > _MAX_BYTES:
        raise ValueError("at most 1024TiB")
    return int(size)


def _size(text: str) -> int:
    size = parse_bytes(text)
    if size < 1 << 20:
        raise ValueError("at least 1MiB")
    return size


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", text):
        raise ValueError("1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit")
    return text


def _seconds(text: str) -> float:
    value = float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else -1.0
    if not 0 <= value <= 3600:
        raise ValueError("seconds, from 0 to 3600")
    return value


def _percent(text: str) -> int:
    value = int(text) if text.isdecimal() else -1
    if not 1 <= value <= 100:
        raise ValueError("a whole number from 1 to 100")
    return value


def _uids(text: str) -> tuple[int, ...]:
    parts = text.replace(",", " ").split()
    if not all(part.isdecimal() for part in parts):
        raise ValueError("numeric user ids, separated by commas")
    return tuple(map(int, parts))


def _tiers(text: str) -> tuple[str, ...]:
    specs = tuple(text.split())
    if not all("://" in spec for spec in specs):
        raise ValueError("URLs such as disk:///var/cache/kv?size=200GiB, separated by spaces")
    return specs


def _level(text: str) -> str:
    if text.lower() not in ("debug", "info", "warning", "error"):
        raise ValueError("debug, info, warning or error")
    return text.lower()


def parse_path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError("a path")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ValueError("a path; that user has no home") from None


def own_folder() -> Path:
    """Of the sockets of this user's servers, unless somebody names another."""
    return Path(f"/tmp/kvcellar-{os.geteuid()}")


class _Setting(NamedTuple):
    parse: Callable[[str], Any]
    help: str


@dataclass(frozen=True, slots=True)
class Settings:
    name: Annotated[str, _Setting(_name, "Name of the server; several may live on one host.")] = "default"
    memory: Annotated[
        int | None,
        _Setting(_size, "Shared memory to use at most, e.g. 64GiB. [default: half of what is free]"),
    ] = None
    folder: Annotated[
        Path | None, _Setting(parse_path, "Where slabs live: a tmpfs. [default: /dev/shm/kvcellar-UID/NAME]")
    ] = None
    socket: Annotated[
        Path | None, _Setting(parse_path, "The server's socket. [default: /tmp/kvcellar-UID/NAME.sock]")
    ] = None
    hold_percent: Annotated[
        int, _Setting(_percent, "Share of the memory that one engine may keep pinned or in writing.")
    ] = 50
    allow_uids: Annotated[
        tuple[int, ...], _Setting(_uids, "Further user ids that may attach, e.g. 1000,1001.")
    ] = ()
    drain_seconds: Annotated[float, _Setting(_seconds, "How long SIGTERM waits for writes under way.")] = 5.0
    grace_seconds: Annotated[
        float, _Setting(_seconds, "How long a restarted server waits for the engines it knew.")
    ] = 30.0
    disk: Annotated[
        Path | None, _Setting(parse_path, "Folder of the disk tier: an empty one, or one it had before.")
    ] = None
    disk_size: Annotated[
        int | None,
        _Setting(_size, "Disk to use at most, e.g. 200GiB. [default: half of what is free]"),
    ] = None
    tier: Annotated[
        tuple[str, ...],
        _Setting(
            _tiers, "A further tier: redis://HOST:PORT, s3://BUCKET, ...; may be repeated, nearest first."
        ),
    ] = ()
    log_level: Annotated[str, _Setting(_level, "debug, info, warning or error.")] = "info"

    @property
    def folder_path(self) -> Path:
        return self.folder or Path(f"/dev/shm/kvcellar-{os.geteuid()}") / self.name

    @property
    def socket_path(self) -> Path:
        return self.socket or own_folder() / f"{self.name}.sock"

    @property
    def tier_urls(self) -> tuple[str, ...]:
        """All tiers, nearest first."""
        if self.disk is None:
            return self.tier
        size = f"?size={self.disk_size}" if self.disk_size is not None else ""
        return (f"disk://{quote(str(self.disk))}{size}", *self.tier)


_SETTINGS: dict[str, _Setting] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Settings, include_extras=True).items()
}
HELP = {
    field.name: _SETTINGS[field.name].help + (f" [default: {field.default}]" if field.default else "")
    for field in fields(Settings)
}


def load_settings(flags: Mapping[str, str | None], config_file: str | None = None) -> Settings:
    """Merge the sources; flags are text as the user typed it, None where not given."""
    path = config_file or os.environ.get("KVCELLAR_CONFIG")
    from_file = _read_file(Path(path)) if path else {}
    values: dict[str, Any] = {}
    for name, setting in _SETTINGS.items():
        variable = f"KVCELLAR_{name.upper()}"
        for source, text in (
            (f"--{name.replace('_', '-')}", flags.get(name)),
            (variable, os.environ.get(variable)),
            (f"{name} in {path}", from_file.get(name)),
        ):
            if text is not None:
                values[name] = _parse(source, text, setting.parse)
                break
    settings = Settings(**values)
    if settings.disk_size is not None and settings.disk is None:
        raise ConfigError("--disk-size without --disk: name the folder too")
    return settings


def environment(name: str) -> str | None:
    """A variable that a setting names, such as the one that holds a password."""
    return os.environ.get(name)


def default_socket() -> Path:
    """Where a client looks when it is told nothing."""
    return load_settings({}).socket_path


def _parse(source: str, text: str, parse: Callable[[str], Any]) -> Any:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        # Paths and URLs are shown in logs and reports, which are UTF-8.
        raise ConfigError(f"{source}: got {text!r}, expected UTF-8")
    try:
        return parse(text)
    except ValueError as error:
        shown = re.sub(r"\S+@", "...@", text)  # what stands there may be a password, in a URL that is none
        raise ConfigError(f"{source}: got {shown!r}, expected {error}") from None


def _read_file(path: Path) -> dict[str, str]:
    try:
        with path.open() as file:
            text = file.read(_MAX_FILE + 1)
        if len(text) > _MAX_FILE:
            raise ConfigError(f"{path} is no file of settings: it is longer than {_MAX_FILE >> 20} MiB")
        content = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{path} is no file of settings: it is nested too deeply") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    if unknown := sorted(set(content) - set(_SETTINGS)):
        raise ConfigError(f"{path}: unknown setting {unknown[0]!r}; known are {', '.join(sorted(_SETTINGS))}")
    return {key: _as_text(value) for key, value in content.items()}


def _as_text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
