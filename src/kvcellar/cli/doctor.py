"""`kvcellar doctor`: is each tier there, how fast is it, and what is wrong with it.

Opens a tier's engine as the server would, and puts objects of its own through it: written, looked for, read,
compared, deleted. Touches nothing else that is stored there: in a disk's own engine, objects that are written
make others give way, so a disk is measured beside it. Knows nothing of servers.
"""

import json
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

from kvcellar.cli.plain import plain
from kvcellar.errors import CellarError, EngineError
from kvcellar.slab import PAGE
from kvcellar.tiers.disk import DiskEngine, parse_disk
from kvcellar.tiers.engine import Buffer, Engine
from kvcellar.tiers.folder import Folder
from kvcellar.tiers.registry import TierSpec, label_of, parse_spec

_SIZE = 4 << 20
_ROUNDS = 4
# A folder in the disk's, and so on the same file system. Servers leave it alone.
_BESIDE, _BESIDE_BYTES = "doctor", 32 << 20


class Finding(NamedTuple):
    """What became of one tier. Times in milliseconds; nothing but the problem if it is not usable, nothing
    but the note if it was not measured.
    """

    tier: str
    problem: str = ""
    note: str = ""
    open_ms: float = 0.0
    exist_ms: float = 0.0
    write_gbps: float = 0.0
    read_gbps: float = 0.0


def examine(urls: Sequence[str]) -> list[Finding]:
    return [_examine(url) for url in urls]


def print_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([_plain(finding) for finding in findings], indent=2))
        return
    for finding in findings:
        print(("FAIL " if finding.problem else "ok   ") + _told(finding))


def _told(finding: Finding) -> str:
    if finding.problem:
        return f"{plain(finding.tier)}\n     {plain(finding.problem)}"
    return f"{plain(finding.tier)}: " + (
        finding.note
        or f"opened in {finding.open_ms:.0f} ms, one question {finding.exist_ms * 1e3:,.0f} us, "
        f"{_SIZE >> 20} MiB objects: write {finding.write_gbps * 1e3:,.0f} MB/s, "
        f"read {finding.read_gbps * 1e3:,.0f} MB/s"
    )


def _plain(finding: Finding) -> dict[str, Any]:
    if finding.problem:
        return {"tier": finding.tier, "ok": False, "problem": finding.problem}
    if finding.note:
        return {"tier": finding.tier, "ok": True, "note": finding.note}
    return {"tier": finding.tier, "ok": True} | {
        name: round(value, 3) for name, value in finding._asdict().items() if name.endswith(("_ms", "_gbps"))
    }


def _examine(url: str) -> Finding:
    label = label_of(url)
    try:
        spec = parse_spec(url)
        label = spec.label
        start = time.perf_counter()
        with _opened(spec) as engine:
            if engine is None:
                return Finding(label, note=f"not measured, that takes {_BESIDE_BYTES >> 20} MiB of free disk")
            return _measure(label, time.perf_counter() - start, engine)
    except CellarError as error:
        return Finding(label, str(error))
    except Exception as error:  # noqa: BLE001 - engines of others may break in any way
        return Finding(label, f"it broke: {type(error).__name__}: {error}")


@contextmanager
def _opened(spec: TierSpec) -> Iterator[Engine | None]:
    """None: a disk that a server could use, without room for another beside it."""
    if not spec.url.startswith("disk:"):
        with closing(spec.open()) as engine:
            yield engine
        return
    path, size = parse_disk(spec.url, spec.options)
    with closing(Folder(path)) as folder:
        folder.check_size(size)
        beside = path / _BESIDE
        shutil.rmtree(beside, ignore_errors=True)  # of a doctor that was killed: the folder's lock is ours
        if shutil.disk_usage(path).free < _BESIDE_BYTES:
            yield None
            return
        try:
            with closing(DiskEngine(beside, _BESIDE_BYTES)) as engine:
                yield engine
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def _measure(label: str, opened: float, engine: Engine) -> Finding:
    source, target = _buffer(), _buffer()
    source.header[:] = os.urandom(len(source.header))
    source.payload[:] = os.urandom(_SIZE)
    # A namespace that nobody has, so that nobody finds it even if we are killed in between.
    names = [f"{secrets.token_hex(16)}/{secrets.token_hex(16)}-0-0" for _ in range(_ROUNDS)]
    with _cleaned(engine, names):
        write = [_time(lambda name=name: engine.write(name, source)) for name in names]  # type: ignore[misc]
        exist = [
            _time(lambda: _must(all(engine.exist(names)), "what was written is not found")) for _ in names
        ]
        read = [
            _time(lambda name=name: _must(engine.read(name, target), "what was written cannot be read"))  # type: ignore[misc]
            for name in names
        ]
        same = source.header == target.header and source.payload == target.payload
        _must(same, "what was read is not what was written")
    _must(not any(engine.exist(names)), "what was deleted is still there")
    # The best of each: the first pays for connections and fresh memory.
    return Finding(
        label, "", "", opened * 1e3, min(exist) * 1e3, _SIZE / min(write) / 1e9, _SIZE / min(read) / 1e9
    )


@contextmanager
def _cleaned(engine: Engine, names: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(Exception):  # what it says first is what is wrong with it
            engine.delete(names)
        raise
    engine.delete(names)


def _buffer() -> Buffer:
    memory = memoryview(mmap.mmap(-1, PAGE + _SIZE))
    return Buffer(memory[:64], memory[PAGE:], _SIZE)


def _time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _must(true: bool, otherwise: str) -> None:
    if not true:
        raise EngineError(otherwise)
