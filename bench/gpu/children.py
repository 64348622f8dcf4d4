"""Engines in processes of their own, with a time limit, and their server beside them.

A job is a JSON file: what the child is to do, and where to put its result. It writes the result again after
each part, so that one that hangs costs itself and not what was before it. A child whose only part is TURNS
does what it is told, one command after the other, and its result is the answer to the last one.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu import timeline
from bench.gpu.engine import ENVIRONMENT, backing, end, server
from bench.gpu.progress import MARK, say
from bench.gpu.scale import Scale
from bench.gpu.weights import plugin_path

ROOT = Path(__file__).parents[2]
_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
TURNS = "turns"
_END_S = 25.0  # for an engine to leave by itself


class Site(NamedTuple):
    """A mode's server, up, and what its engines must be told."""

    job: dict[str, Any]
    folder: Path
    server: subprocess.Popen[bytes] | None
    seconds: float  # until it was up


def cache_gib(wanted: int) -> int:
    """What /dev/shm has room for, where KVCellar's memory is: in all modes."""
    gib = min(wanted, (shutil.disk_usage("/dev/shm").free >> 30) - 2)
    if gib < wanted:
        say(f"a cache of {gib} GiB instead of {wanted}: /dev/shm has no room for more")
    return gib


@contextlib.contextmanager
def site(scale: Scale, model: str, mode: str, gib: int, *, small: bool) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="kvcellar-bench-") as name:
        folder = Path(name)
        back = backing(mode, folder, gib, several_groups=model == "hybrid" and scale.gpu)
        begun = time.monotonic()
        with server(back, folder / "server.log") as process:
            seconds = time.monotonic() - begun
            job = {
                "model": model,
                "mode": mode,
                "small": small,
                "cache_gib": gib,
                "folder": name,
                "transfer": back.transfer,
                "memory": str(back.memory) if back.memory else None,
                "socket": str(back.address) if mode == "kvcellar" else None,
            }
            yield Site(job, folder, process, seconds)


class Child:
    """One engine at work, from `with` to its end."""

    def __init__(self, job: dict[str, Any], name: str, log: Path) -> None:
        folder = Path(job["folder"])
        self._name, self._log = name, log
        self._done = False  # it has nothing left to do, and will leave by itself
        self._told = 0
        self.result_path = folder / f"{name}.result.json"
        path = folder / f"{name}.job.json"
        path.write_text(json.dumps(job | {"result": str(self.result_path)}))
        before = [str(plugin_path(folder)), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | ENVIRONMENT | (_CPU if job["small"] else {})
        environment[timeline.VARIABLE] = str(folder / timeline.NAME)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.job", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment | {"PYTHONPATH": ":".join(filter(None, before))},
        )
        self._relay = threading.Thread(target=self._pass_on, daemon=True)
        self._relay.start()

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("ab") as log, self._process.stdout as lines:
            for line in lines:
                log.write(line)
                log.flush()
                if line.startswith(MARK.encode()):
                    print(f"  {self._name:18} {line.decode(errors='replace').rstrip()}", flush=True)

    def wait(self, seconds: float) -> dict[str, Any]:
        """What it has found out: all of it, or as far as it came in the time."""
        result = self._result("done", True, seconds)
        result.pop("done", None)
        return result

    def tell(self, **command: Any) -> None:
        """One command; its answer has to be heard before the next."""
        assert self._process.stdin is not None
        self._told += 1
        self._process.stdin.write(json.dumps(command | {"number": self._told}).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, seconds: float) -> dict[str, Any]:
        """The answer to the last command; before there was one, what it says when it is up."""
        answer = self._result("answered", self._told, seconds)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        answer.pop("answered")
        return answer

    def _result(self, key: str, value: Any, seconds: float) -> dict[str, Any]:
        """As soon as it says so; after that time, or if the child has ended, with an error."""
        deadline = time.monotonic() + seconds
        result: dict[str, Any] = {}
        while True:
            last = self._process.poll() is not None or time.monotonic() > deadline
            with contextlib.suppress(FileNotFoundError):
                result = json.loads(self.result_path.read_text())
            if last or result.get(key) == value:
                break
            time.sleep(0.02)
        self._done = result.get(key) == value
        if not self._done:
            code = self._process.poll()
            result["error"] = f"no end within {seconds:.0f} s" if code is None else f"ended with {code}"
            tail = self._log.read_text(errors="replace")[-2500:]
            say(f"{self._name}: {result['error']}; the end of {self._log}:\n{tail}")
        return result

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S if self._done else 0.1)
        end(self._process)
        self._relay.join(5)
