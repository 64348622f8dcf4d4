"""The disk engine with a gate, as a package of its own: `gated:///PATH`. What it does is decided by files.

PATH/hang     while it exists, no call returns
PATH/stall    the same for reads alone
PATH/fail     every call fails, with the file's text as the reason
PATH/slow     reads and writes take their bytes over the number in it, in seconds
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvcellar.errors import EngineError
from kvcellar.tiers.disk import DiskEngine
from kvcellar.tiers.engine import Buffer


class GatedEngine(DiskEngine):
    def __init__(self, path: Path) -> None:
        super().__init__(path / "store", 64 << 20)
        self._gate = path

    def _pass(self, size: int = 0) -> None:
        while (self._gate / "hang").exists():
            time.sleep(0.005)
        if (self._gate / "fail").exists():
            raise EngineError((self._gate / "fail").read_text())
        if size and (self._gate / "slow").exists():
            time.sleep(size / float((self._gate / "slow").read_text()))

    def write(self, name: str, source: Buffer) -> None:
        self._pass(source.size)
        super().write(name, source)

    def read(self, name: str, target: Buffer) -> bool:
        while (self._gate / "stall").exists():
            time.sleep(0.005)
        self._pass(target.size)
        return super().read(name, target)

    def exist(self, names: Sequence[str]) -> list[bool]:
        self._pass()
        return super().exist(names)


def open_gated(url: str, _options: Mapping[str, str]) -> GatedEngine:
    return GatedEngine(Path(url.removeprefix("gated://")))
