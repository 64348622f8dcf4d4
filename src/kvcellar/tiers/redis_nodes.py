"""Which node of Redis or Valkey has a key, and connections to it. redis-py connects, authenticates and pools.

One server is a cluster of one node here. A node that did not answer in time is left alone for a moment, so
that a dead one costs fast errors; the others go on. Knows nothing of values.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.credentials import CredentialProvider
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from kvcellar.errors import EngineError
from kvcellar.tiers.redis_wire import Redirect, ReplyError, Wire, WireError
from kvcellar.tiers.remote import Address, Secret

# How long a node that timed out is not asked again, and how often the map of slots is fetched at most.
_REST_S = 1.0
# Who answered so lately is there.
_LATELY_S = 10.0
# What a node says that is there, and has nothing for anybody.
_AWAY = ("CLUSTERDOWN", "LOADING", "MASTERDOWN")


class NodeAway(EngineError):
    """This node, and perhaps no other, cannot be reached."""


class Login(CredentialProvider):
    """Asked at each connect, so that a changed password is used without a restart."""

    def __init__(self, username: str, password: Secret | None) -> None:
        self._username = username
        self._password = password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._password.read() if self._password else ""
        return (self._username, password) if self._username else (password,)


class Node:
    def __init__(self, address: Address, tls: dict[str, Any] | None, settings: dict[str, Any]) -> None:
        self.address = address
        kind = redis.Connection if tls is None else redis.SSLConnection
        self._pool = redis.ConnectionPool(
            connection_class=kind,
            host=address.host,
            port=address.port,
            protocol=2,  # what redis_wire speaks
            driver_info=None,  # saves two round trips of a new connection
            retry=Retry(NoBackoff(), 0),  # the tier tries again, and knows how often
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
            redis_connect_func=_log_in,
            **settings,
            **(tls or {}),
        )
        self._suspicion = "is it overloaded or stopped" + ("?" if tls is None else ", or without TLS?")
        self._has_left = False
        self.failed_at = float("-inf")
        self.heard_at = float("-inf")  # when it answered last, unless it has failed since

    @contextmanager
    def connection(self, deadline: float) -> Iterator[Wire]:
        """One that is not left clean is closed and never used again: a reply may still be on its way."""
        now = time.monotonic()
        if now - self.failed_at < _REST_S:
            raise NodeAway(f"{self.address} did not answer a moment ago")
        if now > deadline:  # which is not this one's fault
            raise NodeAway(f"there was no time left to ask {self.address}")
        with self.guard():
            connection = self._pool.get_connection()
        wire = None
        try:
            # Not public: so redis-py is pinned to one major version, and a test holds it to this.
            sock = connection._get_socket()
            if sock is None:
                raise NodeAway(f"{self.address} closed the connection")
            wire = Wire(sock, deadline)
            yield wire
        finally:
            if wire is None or not wire.is_clean or self._has_left:
                connection.disconnect()  # type: ignore[no-untyped-call]
            self._pool.release(connection)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """What goes wrong inside is this node's fault, and becomes an EngineError; redirects pass."""
        try:
            yield
        except Redirect:
            raise
        except (TimeoutError, redis.TimeoutError):
            self.failed_at, self.heard_at = time.monotonic(), float("-inf")
            raise NodeAway(f"{self.address} did not answer in time; {self._suspicion}") from None
        except ReplyError as error:
            problem = f"{self.address}: {explain(str(error))}"
            if error.code not in _AWAY:
                raise EngineError(problem) from None
            self.heard_at = float("-inf")
            raise NodeAway(problem) from None
        except (redis.RedisError, WireError, OSError, ValueError) as error:
            self.heard_at = float("-inf")
            raise NodeAway(f"{self.address}: {explain(str(error))}") from None

    def close(self) -> None:
        self._pool.disconnect()

    def leave(self) -> None:
        """Close its connections: those in use when they are given back."""
        self._has_left = True
        self._pool.disconnect(inuse_connections=False)


class Nodes:
    """The nodes, by slot. Threads share it; one at a time fetches the map, the others use the old one."""

    def __init__(
        self, seeds: list[Address], *, is_cluster: bool, make_node: Callable[[Address], Node]
    ) -> None:
        self._seeds = seeds
        self._make_node = make_node
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Address | None] = []
        self._fetching = threading.Lock()
        self._lock = threading.Lock()
        self._is_old = True
        self._fetched_at = float("-inf")
        self._is_closed = False
        self.is_cluster = is_cluster
        self.uncovered = ""  # a sentence about slots that no node has
        if not is_cluster:
            self._slots, self._is_old = [seeds[0]], False

    def of_key(self, key: bytes, deadline: float) -> Node:
        slots = self._map(deadline)
        slot = key_slot(key) if self.is_cluster else 0
        address = slots[slot]
        if address is None:
            self.fetch_soon()
            raise NodeAway(self.uncovered)
        return self.at(address)

    def at(self, address: Address) -> Node:
        with self._lock:
            if self._is_closed:
                raise EngineError("closed")
            if address not in self._nodes:
                self._nodes[address] = self._make_node(address)
            return self._nodes[address]

    def masters(self, deadline: float) -> list[Node]:
        return [self.at(address) for address in sorted({one for one in self._map(deadline) if one})]

    def fetch_soon(self) -> None:
        """Somebody met a node that is gone or has moved: the map is fetched anew."""
        self._is_old = self.is_cluster

    @property
    def some_answer(self) -> bool:
        now = time.monotonic()
        with self._lock:
            return any(now - node.heard_at < _LATELY_S for node in self._nodes.values())

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            node.close()

    # -- the map ----------------------------------------------------------------------------------------

    def _map(self, deadline: float) -> list[Address | None]:
        due = self._is_old and time.monotonic() - self._fetched_at > _REST_S
        if not self._slots:
            with self._fetching:
                if not self._slots:
                    self._fetch(deadline)
        elif due and self._fetching.acquire(blocking=False):
            try:
                with suppress(EngineError):  # the old map is better than none
                    self._fetch(deadline)
            finally:
                self._fetching.release()
        return self._slots

    def _fetch(self, deadline: float) -> None:
        now = self._fetched_at = time.monotonic()
        known = {one: None for one in (*self._seeds, *self._slots) if one}
        problem = EngineError("no nodes")
        best: list[Address | None] = []
        # Those that failed last are asked last.
        for node in sorted(map(self.at, known), key=lambda node: node.failed_at):
            try:
                # One that is silent must leave time for the next, and for what the map is wanted for.
                found = self._ask(node, now + (deadline - now) / 2)
            except EngineError as error:
                problem = error
            else:
                # A node that has lost its memory of the cluster knows of no slots.
                best = min(best or found, found, key=lambda slots: slots.count(None))
                if None not in best:
                    break
            now = time.monotonic()
        if not best:
            raise problem
        self._slots, self._is_old = best, False
        self.uncovered = _uncovered(best)
        self._drop({*self._seeds, *best})

    def _drop(self, there: Set[Address | None]) -> None:
        """Nodes come and go under new addresses: those that went keep no connections."""
        with self._lock:
            gone = [self._nodes.pop(address) for address in [*self._nodes] if address not in there]
        for node in gone:
            node.leave()

    @staticmethod
    def _ask(node: Node, deadline: float) -> list[Address | None]:
        slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        with node.connection(deadline) as wire, node.guard():
            wire.send(b"CLUSTER", b"SLOTS")
            for part in wire.array():
                match part:
                    case [int(first), int(last), [bytes() | None as host, int(port), *_], *_] if (
                        0 <= first <= last < len(slots) and 0 <= port < 1 << 16
                    ):
                        # An empty host means the one that was asked; without a port it is known to be gone.
                        address = Address((host or b"").decode() or node.address.host, port)
                        slots[first : last + 1] = [address if port else None] * (last + 1 - first)
                    case _:
                        raise WireError(f"got {str(part)[:60]} where slots and their node were due")
        return slots


def _log_in(connection: Any) -> None:
    """As redis-py does by itself, which after an error of ours (a password file that cannot be read) would
    keep a socket that is not logged in, and take it for one that is.
    """
    try:
        connection.on_connect()
    except BaseException:
        connection.disconnect()
        raise


def _uncovered(slots: list[Address | None]) -> str:
    gaps = [slot for slot, address in enumerate(slots) if address is None]
    if not gaps:
        return ""
    return (
        f"{len(gaps)} of {REDIS_CLUSTER_HASH_SLOTS} slots of the cluster have no node "
        f"(the first is {gaps[0]}): start the node that had them, or give them to another "
        "(`valkey-cli --cluster fix HOST:PORT`)"
    )


def explain(problem: str) -> str:
    """What a server or redis-py says, with what to do about it."""
    problem = re.sub(r"^Error -?\d+ connecting to \S+ ", "", problem)
    for pattern, advice in _ADVICE:
        if re.search(pattern, problem, re.I):
            return f"{problem.rstrip('.')}: {advice}"
    return problem


_ADVICE = (
    (
        "NOAUTH|authentication required",
        "it wants a password; name where it is with password_file= or password_env=",
    ),
    (
        "WRONGPASS|invalid (username|password)",
        "check what username=, password_file= or password_env= point to",
    ),
    ("without any password configured", "it has no password; leave password_file= and password_env= out"),
    ("NOPERM", "this user may not do that; it needs GET, SET, GETRANGE, EXISTS and UNLINK"),
    ("^MOVED|^ASK", "this server belongs to a cluster; use redis+cluster:// in the URL"),
    ("cluster support disabled", "this server is no cluster; use redis:// in the URL"),
    (
        "CLUSTERDOWN",
        "part of the cluster is gone; with `cluster-require-full-coverage no` the rest stays usable",
    ),
    ("^OOM", "it is full; set `maxmemory-policy allkeys-lru` so that it makes room by itself"),
    ("LOADING", "it is starting; it will be used when it is ready"),
    ("READONLY", "this is a replica; name the master in the URL"),
    ("MISCONF", "it cannot save its data to disk and refuses writes; see its log"),
    (
        "reset by peer|broken pipe|was closed",
        "it hung up; if it speaks TLS on this port, use rediss:// in the URL",
    ),
    ("refused", "nothing listens there; is the server running, and is the port right?"),
    ("Name or service not known|name resolution", "there is no such host"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not trusted; name the authority's with ca_file="),
    ("WRONG_VERSION_NUMBER|record layer", "it does not speak TLS on this port; use redis:// or the TLS port"),
)
