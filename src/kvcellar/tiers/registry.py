"""From `--tier scheme://...` to an engine: our own by name, others by entry point.

A package adds a scheme with an entry point in the group `kvcellar.tiers`, whose name is the scheme and whose
object is a factory(url, options) that returns an Engine: `url` is what the user wrote up to the question
mark, `options` what follows it. A factory raises StartupError for settings that can never work, and
EngineError when the engine is away and may come back.
"""

import importlib
import re
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import NamedTuple, cast
from urllib.parse import parse_qsl, urlsplit

from kvcellar.errors import ConfigError
from kvcellar.tiers.admission import FILTERS, WriteEverything, WriteFilter
from kvcellar.tiers.engine import Engine

Factory = Callable[[str, Mapping[str, str]], Engine]

GROUP = "kvcellar.tiers"
# Imported when used: a server with a disk needs no S3 client.
BUILT_IN = {
    "disk": "kvcellar.tiers.disk:open_disk",
    "memory": "kvcellar.tiers.memory:open_memory",
    "mooncake": "kvcellar.tiers.mooncake:open_mooncake",
    "redis": "kvcellar.tiers.redis:open_redis",
    "redis+cluster": "kvcellar.tiers.redis:open_redis",
    "rediss": "kvcellar.tiers.redis:open_redis",
    "rediss+cluster": "kvcellar.tiers.redis:open_redis",
    "s3": "kvcellar.tiers.s3:open_s3",
}


class TierSpec(NamedTuple):
    label: str  # for people: no credentials, no options
    url: str
    options: Mapping[str, str]
    open: Callable[[], Engine]
    write_filter: Callable[[], WriteFilter] = WriteEverything


def parse_spec(text: str) -> TierSpec:
    """Raises ConfigError if it is no URL, nobody knows the scheme, or what has it cannot be loaded."""
    url, _, query = text.partition("?")
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise ConfigError(f"--tier {label_of(text)!r} is no URL: {error}") from None
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) or "://" not in url:
        raise ConfigError(
            f"--tier {label_of(text)!r}: expected a URL such as disk:///var/cache/kv?size=200GiB"
        )
    # A plus is a plus, as in the name of a file: this is no form.
    options = dict(parse_qsl(query.replace("+", "%2B"), keep_blank_values=True))
    factory = _factory(scheme)
    # Only a disk wears, and only a disk is ours alone: what one host reads once, another may read next.
    write = options.pop("write", "everything") if scheme == "disk" else "everything"
    if write not in FILTERS:
        raise ConfigError(f"--tier {label_of(text)}: write={write!r} is none of {', '.join(FILTERS)}")
    return TierSpec(label_of(text), url, options, lambda: factory(url, options), FILTERS[write])


def _factory(scheme: str) -> Factory:
    if scheme in BUILT_IN:
        module, _, name = BUILT_IN[scheme].partition(":")
        try:
            return cast(Factory, getattr(importlib.import_module(module), name))
        except ModuleNotFoundError as error:
            extra = module.rpartition(".")[2]
            raise ConfigError(
                f"--tier {scheme}://... needs the package {error.name}: pip install 'kvcellar[{extra}]'"
            ) from None
    added = {point.name: point for point in entry_points(group=GROUP)}
    if scheme not in added:
        known = ", ".join(sorted([*BUILT_IN, *added]))
        raise ConfigError(
            f"--tier {scheme}://...: unknown; known are {known}. A package adds one by an entry point in "
            f"the group {GROUP!r}"
        )
    try:
        return cast(Factory, added[scheme].load())
    except Exception as error:  # noqa: BLE001 - packages of others may break in any way
        raise ConfigError(
            f"--tier {scheme}://...: cannot be loaded: {type(error).__name__}: {error}"
        ) from None


def label_of(url: str) -> str:
    """For people: without options, nor user and password, in which any character may have been left as it is.
    A path of this host, which begins with a third slash, has neither, nor has the value of an option.
    """
    return re.sub(r"^([^:/]*)(?::/{0,2}|//)(?!/)[^?]*(?:\?[^=]*)?@", r"\1://", url).partition("?")[0]
