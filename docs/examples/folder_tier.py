"""An example tier: one file per object in a folder. `kvcellar serve --tier folder:///mnt/share/kv`"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcellar.errors import StartupError
from kvcellar.tiers import Buffer, EngineError


class FolderEngine:
    def __init__(self, folder: Path) -> None:
        self.folder: Path | None = folder

    def path(self, name: str) -> Path:
        if self.folder is None:
            raise EngineError("closed")
        return self.folder / name.replace("/", "_")

    @contextmanager
    def only_engine_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EngineError(f"{self.folder}: {error.strerror}") from None

    def write(self, name: str, source: Buffer) -> None:
        draft = self.path(f"draft.{os.getpid()}.{os.urandom(8).hex()}")
        with self.only_engine_errors():
            with draft.open("xb") as file:
                file.write(source.header)
                file.write(source.payload)
            draft.rename(self.path(name))  # all of it or nothing

    def read(self, name: str, target: Buffer) -> bool:
        with self.only_engine_errors(), suppress(FileNotFoundError), self.path(name).open("rb") as file:
            whole = os.fstat(file.fileno()).st_size == 64 + target.size
            return whole and file.readinto(target.header) + file.readinto(target.payload) == 64 + target.size
        return False

    def exist(self, names: Sequence[str]) -> list[bool]:
        with self.only_engine_errors():
            return [self.path(name).exists() for name in names]

    def delete(self, names: Sequence[str]) -> None:
        with self.only_engine_errors():
            for name in names:
                self.path(name).unlink(missing_ok=True)

    def close(self) -> None:
        self.folder = None


def open_folder(url: str, options: Mapping[str, str]) -> FolderEngine:
    folder = Path(url.removeprefix("folder://"))
    if options or not folder.is_dir():
        raise StartupError(f"{url}: expected folder:///PATH of a folder that exists, and no options")
    return FolderEngine(folder)
