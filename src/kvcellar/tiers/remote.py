"""What the engines on the network have in common: the options of their URLs, and secrets.

A URL is shown in logs, in `kvcellar status` and in `ps`, so it never holds a secret: it says where one is, in
a variable or in a file. Knows nothing of any one engine.
"""

import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvcellar.config import environment
from kvcellar.errors import ConfigError
from kvcellar.tiers.engine import EngineError

# Longer than any value takes on a network worth using, shorter than what the tier takes for a hang.
TIMEOUT_S = 4.0
_LONGEST_S = 60.0


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Options:
    """The options of one tier, each asked for by name; finish() refuses those that nobody asked for."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self.url = url.partition("?")[0]
        self._left = dict(options)
        self._known: list[str] = []
        if "@" in self.url or any("@" in name for name in options):  # the password has a question mark
            raise ConfigError(
                "a tier's URL is shown to everybody, so it holds no user and password; name a variable or "
                "a file that does: see docs/tiers.md"
            )

    def text(self, name: str, default: str = "", pattern: str = ".*") -> str:
        self._known.append(name)
        value = self._left.pop(name, default)
        if not re.fullmatch(pattern, value):
            raise self.error(f"{name}={value!r} should match {pattern}")
        return value

    def seconds(self, name: str, default: float) -> float:
        text = self.text(name, f"{default:g}")
        value = float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else -1.0
        if not 0 < value <= _LONGEST_S:
            raise self.error(f"{name}={text!r} should be seconds, more than 0 and at most {_LONGEST_S:g}")
        return value

    def whole(self, name: str, default: int, largest: int) -> int:
        text = self.text(name, str(default))
        if not re.fullmatch(r"\d{1,12}", text) or int(text) > largest:
            raise self.error(f"{name}={text!r} should be a whole number from 0 to {largest}")
        return int(text)

    def path(self, name: str) -> str | None:
        """Of a file that must be there."""
        text = self.text(name)
        if text and (problem := _unreadable(text)):
            raise self.error(f"{name}={text!r}: {problem}")
        return text or None

    def certificates(self, *names: str) -> dict[str, str | None]:
        """Paths: of ca_file, cert_file and key_file, those of them that an engine knows."""
        files = {name: self.path(name) for name in names}
        authority, own, key = map(files.get, ("ca_file", "cert_file", "key_file"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if authority:
                context.load_verify_locations(authority)
        except ssl.SSLError:
            raise self.error(f"ca_file={authority!r} should hold certificates in PEM") from None
        try:
            if own or key:
                context.load_cert_chain(own or "", key, password="")  # else OpenSSL would ask for one
        except OSError:
            raise self.error(
                "cert_file= and key_file= should hold a certificate and its key, without a password, in PEM"
            ) from None
        return files

    def secret(self, name: str) -> "Secret | None":
        """From NAME_file or NAME_env."""
        file, variable = self.path(f"{name}_file"), self.text(f"{name}_env")
        if not file and not variable:
            return None
        secret = Secret(file, variable)
        try:
            secret.read()
        except EngineError as error:
            raise self.error(str(error)) from None
        return secret

    def finish(self) -> None:
        if self._left:
            unknown, known = min(self._left), ", ".join(sorted(self._known))
            raise self.error(f"unknown option {unknown!r}; known are {known}")

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.url}: {problem}")


def _unreadable(path: str) -> str:
    """Why a file cannot be read."""
    try:
        if not Path(path).is_file():
            return "there is no such file"
        with open(path, "rb"):
            return ""
    except OSError as error:
        return error.strerror or str(error)


class Secret:
    """Where a secret is. It is read each time it is used, so that it can be changed, and never kept."""

    def __init__(self, file: str | None, variable: str) -> None:
        self._file = file
        self._variable = variable

    def read(self) -> str:
        if self._file is None:
            value = environment(self._variable)
            if not value:
                raise EngineError(f"the variable {self._variable} is not set")
            return value
        try:
            return Path(self._file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise EngineError(f"cannot read {self._file}: {getattr(error, 'strerror', 'not text')}") from None


def addresses(text: str, default_port: int) -> list[Address]:
    """'a:1,b:2' or '[::1]:1', from the part of a URL between // and the next /."""
    found = []
    for one in text.split(","):
        match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:\[\]]+))(?::(\d{1,5}))?", one)
        if not match or not 0 < int(match[3] or default_port) < 65536:
            raise ConfigError(f"{text!r} should be HOST:PORT, or several with commas between them")
        try:
            (match[2] or "").encode("idna")
        except UnicodeError:
            raise ConfigError(f"{match[2]!r} cannot be the name of a host") from None
        found.append(Address(match[1] or match[2], int(match[3] or default_port)))
    return found
