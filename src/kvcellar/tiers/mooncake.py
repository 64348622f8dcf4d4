"""Objects in Mooncake Store: the memory of many hosts as one cache, over RDMA or TCP.

The store moves bytes between its segments and memory that was registered with it, without a copy: the slab of
a buffer, when it is first seen. A buffer without one is registered for the one call. Nothing in Mooncake's
client raises: every call returns a code, and every code is looked at here. All its calls let other Python
threads run. Its time-outs are per process and come from variables that it reads when it is first used.
"""

import math
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from kvcellar.config import environment
from kvcellar.errors import ConfigError, EngineError
from kvcellar.tiers.engine import Buffer
from kvcellar.tiers.remote import TIMEOUT_S, Address, Options, addresses

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

_MASTER_PORT = 50051  # where mooncake_master listens unless told otherwise
_LOCAL_BUFFER_BYTES = 16 << 20  # for the client itself; values do not pass through it

_NOT_FOUND, _EXISTS, _NOT_READY = -704, -705, -703
_BAD_SIZE, _TRANSFER_FAILED = -600, -800
_NO_MASTER = (-900, -901)
_MEANING = {
    -200: "it has no room, or no host lends memory to it: start a segment, see docs/tiers.md",
    _BAD_SIZE: "it did not like what it was asked",
    _NOT_READY: "somebody else is writing that",
    -706: "somebody else is reading that",
    -707: "the read took longer than a lease; a larger `--default_kv_lease_ttl` of mooncake_master helps",
    _TRANSFER_FAILED: "the host that lends this memory did not answer; is it overloaded, stopped or gone?",
    -900: "the master did not answer; is mooncake_master running?",
    -901: "the master did not answer in time; is mooncake_master overloaded or stopped?",
}


class MooncakeEngine:
    def __init__(self, store: "MooncakeDistributedStore", master: Address, prefix: str) -> None:
        self.store = store
        self._master = master
        self._prefix = prefix
        self._slabs: dict[int, memoryview] = {}  # what is registered for good, by address
        self._lock = threading.Lock()
        self._is_suspect = False
        self._is_closed = False

    # -- memory -----------------------------------------------------------------------------------------

    def forget(self, memory: memoryview) -> None:
        with self._lock:
            if self._slabs.pop(_address(memory), None) is not None:
                self.store.unregister_buffer(_address(memory))

    @contextmanager
    def _registered(self, buffer: Buffer) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
        """Where header and payload are, and their sizes: as Mooncake wants them, and registered."""
        views = [buffer.header, buffer.payload]
        strange = [] if buffer.memory is not None else views
        if buffer.memory is not None:
            self._keep(buffer.memory)
        for view in strange:
            self._take(self.store.register_buffer(_address(view), len(view)), "registering memory")
        try:
            yield [[_address(view) for view in views]], [[len(view) for view in views]]
        finally:
            for view in strange:
                self.store.unregister_buffer(_address(view))

    def _keep(self, slab: memoryview) -> None:
        # Holding the view keeps the memory mapped: what is registered is never something else by now.
        start = _address(slab)
        with self._lock:
            if start not in self._slabs:
                self._take(self.store.register_buffer(start, len(slab)), "registering memory")
                self._slabs[start] = memoryview(slab)

    # -- values -----------------------------------------------------------------------------------------

    def write(self, name: str, source: Buffer) -> None:
        self._ready()
        with self._registered(source) as (places, sizes):
            (code,) = self.store.batch_put_from_multi_buffers([self._prefix + name], places, sizes)
        if code != _EXISTS:
            self._take(code, "writing")

    def read(self, name: str, target: Buffer) -> bool:
        self._ready()
        key, wanted = self._prefix + name, len(target.header) + target.size
        with self._registered(target) as (places, sizes):
            (code,) = self.store.batch_get_into_multi_buffers([key], places, sizes)
        if code == wanted:
            return True
        if code in (_BAD_SIZE, _TRANSFER_FAILED):
            # Also what it says of a value of another size.
            there = self.store.get_size(key)
            if there in (_NOT_FOUND, _NOT_READY) or 0 <= there != wanted:
                return False
        if code not in (_NOT_FOUND, _NOT_READY):
            self._take(code, "reading")
        return False

    def exist(self, names: Sequence[str]) -> list[bool]:
        self._ready()
        codes = self.store.batch_is_exist([self._prefix + name for name in names]) if names else []
        return [self._take(code, "asking") == 1 for code in codes]

    def delete(self, names: Sequence[str]) -> None:
        self._ready()
        # By force: also what somebody is reading. He finds out by the checksum.
        codes = self.store.batch_remove([self._prefix + name for name in names], True) if names else []
        for code in codes:
            if code not in (_NOT_FOUND, _NOT_READY):  # what is only being written is not there yet
                self._take(code, "deleting")

    def check(self) -> None:
        """Raises EngineError unless the master answers."""
        self._is_suspect = True
        self.exist(["check"])

    def close(self) -> None:
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self.store.close()

    # -- codes ------------------------------------------------------------------------------------------

    def _ready(self) -> None:
        if self._is_closed:
            raise EngineError("closed")
        if self._is_suspect:
            # Mooncake's client would try for 4 seconds.
            reach(self._master)
            self._is_suspect = False

    def _take(self, code: int, doing: str) -> int:
        if code >= 0:
            return code
        self._is_suspect = code in _NO_MASTER
        raise EngineError(f"{self._master}: {doing}: {_MEANING.get(code, 'it failed')} (code {code})")


def open_mooncake(url: str, options: Mapping[str, str]) -> MooncakeEngine:
    """mooncake://MASTER_HOST:PORT?protocol=rdma&devices=mlx5_0"""
    given = Options(url, options)
    parts = urlsplit(given.url)
    master, *others = addresses(parts.netloc, _MASTER_PORT)
    if others or parts.path.strip("/"):
        raise given.error("it is mooncake://HOST:PORT of one mooncake_master, and nothing after it")
    protocol = given.text("protocol", "tcp", "tcp|rdma")
    devices = given.text("devices", "", r"[A-Za-z0-9_,.-]*")
    local = given.text("local", "", r"[A-Za-z0-9_.:-]*")
    prefix = given.text("prefix", "kvcellar/", r"[A-Za-z0-9_:./-]{1,64}")
    timeout_s = given.seconds("timeout", TIMEOUT_S)
    given.finish()
    own_address = reach(master)
    _set_timeouts(timeout_s)
    store = _client()()
    code = store.setup(
        local or own_address, "P2PHANDSHAKE", 0, _LOCAL_BUFFER_BYTES, protocol, devices, str(master)
    )
    if code:
        raise EngineError(
            f"{master}: Mooncake's client did not start (code {code}); its own words are in the log"
        )
    engine = MooncakeEngine(store, master, prefix)
    engine.check()
    return engine


def reach(master: Address) -> str:
    """Our own address on the way to it. Raises EngineError if nobody answers."""
    try:
        with socket.create_connection(master, TIMEOUT_S / 4) as connection:
            own: str = connection.getsockname()[0]
            return own
    except OSError as error:
        problem = error.strerror or "no answer in time"
        raise EngineError(
            f"{master}: {problem}: is mooncake_master running there, and is the port right?"
        ) from None


def _client() -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - large, and only here if it is used
    except ImportError as error:
        missing = str(error).partition(":")[0]
        if ".so" in missing:
            raise ConfigError(f"Mooncake needs {missing}: apt-get install libibverbs1 libnuma1") from None
        raise ConfigError("mooncake:// needs a package: pip install 'kvcellar[mooncake]'") from None
    return MooncakeDistributedStore


def _set_timeouts(timeout_s: float) -> None:
    """30 s is Mooncake's own idea. What the user has set stays."""
    seconds, milliseconds = str(math.ceil(timeout_s)), str(math.ceil(timeout_s * 1000))
    wanted = {"MC_RPC_TIMEOUT_MS": milliseconds, "MC_TCP_ADMISSION_TIMEOUT_MS": milliseconds}
    wanted |= {"MC_TCP_PROGRESS_TIMEOUT_SEC": seconds, "MC_TCP_STATUS_TIMEOUT_SEC": seconds}
    wanted |= {"MC_HANDSHAKE_CONNECT_TIMEOUT": "1", "MC_LOG_LEVEL": "ERROR"}
    for name, value in wanted.items():
        if environment(name) is None:
            os.putenv(name, value)  # for C code: Python's own view of the environment stays as it was


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
