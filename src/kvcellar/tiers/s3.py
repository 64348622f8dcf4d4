"""Objects in a bucket of S3 or anything that speaks its protocol, through obstore.

One object is one key, prefix + name: the object header and the payload. S3 publishes a PUT whole or not at
all, and room is made by the bucket's lifecycle rules. Payloads are not hashed for the signature, which would
halve the speed of writing: TLS protects them on the way, the object's checksum for good.
"""

import configparser
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from kvcellar.errors import ConfigError, EngineError
from kvcellar.tiers.crew import Crew
from kvcellar.tiers.engine import Buffer
from kvcellar.tiers.remote import TIMEOUT_S, Options, addresses

# HEAD requests at once. S3 has no way to ask for many names; on loopback 8 are as fast as 32, but a bucket
# that is 20 ms away answers 32 at a time.
_HEADS = 32
# What obstore has read is copied into the slot. Small objects are 10 % faster in one piece; large ones would
# be fresh memory each time, and half as fast as in pieces.
_ONE_PIECE_BYTES, _PIECE_BYTES = 8 << 20, 1 << 20


class S3Engine:
    def __init__(self, store: S3Store, where: str, timeout_s: float) -> None:
        self.store = store
        self._where = where  # for people
        self._timeout_s = timeout_s
        self._heads = Crew("kvcellar-s3-head", _HEADS)
        self._is_closed = threading.Event()

    def write(self, name: str, source: Buffer) -> None:
        with self._guard():
            obstore.put(self.store, name, [source.header, source.payload], use_multipart=False)

    def read(self, name: str, target: Buffer) -> bool:
        with self._guard():
            try:
                found = obstore.get(self.store, name)
                if found.meta["size"] != len(target.header) + target.size:
                    return False
                pieces = found.stream(_PIECE_BYTES) if target.size > _ONE_PIECE_BYTES else [found.bytes()]
                return _copy(pieces, [target.header, target.payload])
            except FileNotFoundError as error:
                return self._miss(error)

    def exist(self, names: Sequence[str]) -> list[bool]:
        with self._guard():
            deadline = time.monotonic() + self._timeout_s
            asked = [self._ask(name, deadline) for name in names]
            try:
                return [one.result() for one in asked]
            finally:
                for one in asked:
                    one.cancel()

    def delete(self, names: Sequence[str]) -> None:
        with self._guard():
            try:
                if names:
                    obstore.delete(self.store, list(names))
            except FileNotFoundError as error:  # some servers say so, where S3 is silent
                self._miss(error)

    def check(self) -> None:
        """Raises EngineError unless the bucket is there and may be read."""
        with self._guard():
            next(obstore.list(self.store, chunk_size=1), None)

    def close(self) -> None:
        self._is_closed.set()
        self._heads.close()

    def _ask(self, name: str, deadline: float) -> Future[bool]:
        asked: Future[bool] = Future()

        def work() -> None:
            if not asked.set_running_or_notify_cancel():
                return  # one before it failed
            try:
                asked.set_result(self._head(name, deadline))
            except BaseException as error:  # noqa: BLE001 - for whoever waits for the result
                asked.set_exception(error)

        self._heads.submit(work, urgent=True)
        return asked

    def _head(self, name: str, deadline: float) -> bool:
        if self._is_closed.is_set() or time.monotonic() > deadline:
            raise TimeoutError
        try:
            obstore.head(self.store, name)
        except FileNotFoundError:
            return False
        return True

    def _miss(self, error: FileNotFoundError) -> bool:
        """There is no such object; unless it is the bucket that is missing."""
        if "NoSuchBucket" in str(error):
            raise error
        return False

    @contextmanager
    def _guard(self) -> Iterator[None]:
        if self._is_closed.is_set():
            raise EngineError("closed")
        try:
            yield
        except TimeoutError:
            raise EngineError(f"{self._where} did not answer in time") from None
        except (BaseError, OSError) as error:
            raise EngineError(f"{self._where}: {_explain(str(error))}") from None


def open_s3(url: str, options: Mapping[str, str]) -> S3Engine:
    """s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=..."""
    given = Options(url, options)
    parts = urlsplit(given.url)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", parts.netloc):
        raise given.error(
            "after s3:// comes the name of a bucket: 3 to 63 small letters, digits, '.' and '-'"
        )
    endpoint = _endpoint(given)
    region = given.text("region", "us-east-1", r"[a-z0-9-]+")
    timeout_s = given.seconds("timeout", TIMEOUT_S)
    keys = _credentials(given)
    authority = given.certificates("ca_file")["ca_file"]
    given.finish()
    client: Any = {"timeout": timedelta(seconds=timeout_s), "allow_http": True}
    client["connect_timeout"] = timedelta(seconds=timeout_s / 4)
    if authority:
        with open(authority, "rb") as file:
            client["root_certificate"] = file.read()
    place: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    try:
        store = S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or "kvcellar",
            region=region,
            virtual_hosted_style_request=not endpoint,
            unsigned_payload=True,
            client_options=client,
            # Once more at once, for a connection that the server had closed; not after a time-out. The tier
            # does the rest.
            retry_config={
                "max_retries": 1,
                "retry_timeout": timedelta(seconds=timeout_s / 4),
                "backoff": _BACKOFF,
            },
            **place,
            **keys,
        )
    except ValueError as error:
        raise given.error(str(error).partition("\n")[0]) from None
    engine = S3Engine(store, f"s3://{parts.netloc}" + (f" at {endpoint}" if endpoint else ""), timeout_s)
    try:
        engine.check()
    except EngineError:  # it will be opened again and again, until somebody answers
        engine.close()
        raise
    return engine


def _endpoint(given: Options) -> str:
    text = given.text("endpoint", "", r"(https?://[A-Za-z0-9_.:\[\]-]+/?)?").rstrip("/")
    try:
        if text:  # obstore would panic, where we expect exceptions
            addresses(text.partition("://")[2], 443)
    except ConfigError as error:
        raise given.error(f"endpoint={text!r}: {error}") from None
    return text


_BACKOFF: Any = {
    "init_backoff": timedelta(milliseconds=10),
    "max_backoff": timedelta(milliseconds=100),
    "base": 2,
}


def _credentials(given: Options) -> dict[str, Any]:
    """From a file as the AWS tools write it; without one, obstore looks where the AWS tools do."""
    file = given.path("credentials_file")
    profile = given.text("profile", "default")
    if file is None:
        return {}
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(file, encoding="utf-8")
        section = parser[profile]
        found = {"access_key_id": section["aws_access_key_id"]}
        found["secret_access_key"] = section["aws_secret_access_key"]
    except (configparser.Error, UnicodeDecodeError):
        # Not the parser's own words: they may quote the line.
        raise given.error(f"{file} is not a file as `aws configure` writes it") from None
    except KeyError:
        raise given.error(
            f"{file} should have a section [{profile}] with aws_access_key_id and aws_secret_access_key"
        ) from None
    if "aws_session_token" in section:
        found["session_token"] = section["aws_session_token"]
    return found


def _copy(pieces: Iterable[Any], targets: Sequence[memoryview]) -> bool:
    """Fill the targets one after the other. False: the pieces are not as long as they are."""
    waiting = list(targets)
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while len(view):
            if not waiting:
                return False
            count = min(len(view), len(waiting[0]))
            waiting[0][:count] = view[:count]
            view, waiting[0] = view[count:], waiting[0][count:]
            if not len(waiting[0]):
                del waiting[0]
    return not waiting


def _explain(problem: str) -> str:
    """Of what obstore says, what a person needs; and what to do about it."""
    code = re.search(r"<Code>(\w+)</Code>", problem)
    status = re.search(r"status code: (\d+ [\w ]+)", problem)
    said = (code and code[1]) or (status and status[1]) or problem.partition("\n")[0][:200]
    for pattern, advice in _ADVICE:
        if re.search(pattern, f"{said}\n{problem}"):
            return f"{said}: {advice}" if code or status else advice
    return said


_KEYS = "see AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or credentials_file= and profile= in the URL"
_ADVICE: tuple[tuple[str, str], ...] = (
    (r"/latest/(api|meta-data|dynamic)/", f"no keys were found; {_KEYS}"),
    (
        "^NoSuchBucket",
        "there is no such bucket; make it (`aws s3 mb s3://...`), or check endpoint= and region=",
    ),
    ("^(SignatureDoesNotMatch|InvalidAccessKeyId)", f"the keys are not right; {_KEYS}"),
    ("^(InvalidToken|ExpiredToken)", f"the keys are too old; {_KEYS}"),
    ("^(AccessDenied|403)", f"these keys may not do that: list, get, put and delete are needed; {_KEYS}"),
    (
        "^(PermanentRedirect|AuthorizationHeaderMalformed|301)",
        "the bucket is elsewhere; set region= or endpoint=",
    ),
    ("^(SlowDown|503)", "it is overloaded"),
    ("kind: Timeout|operation timed out", "it did not answer in time; is it overloaded or stopped?"),
    ("certificate", "its certificate is not trusted; name the authority's with ca_file="),
    ("kind: Connect|error sending request", "it cannot be reached; is it running, and is endpoint= right?"),
)
