"""Finished work on disk: records by id and folders by id.

The rules hold for every store, however often its processes are killed:

- A file is whole or not there. The old file stays until the new one replaces it.
- Reading checks that the file is as it was written and belongs to the id asked for. Otherwise it is refused by name.
- A refused file is never deleted nor overwritten. To make it anew, set it aside first.
- A record that is there already is not written again, so that a finished run is only read.
- `has` looks at one file, and `ids` lists the folder once.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar, cast

from bitplan.core.errors import Damaged, FileError, WriteError
from bitplan.core.record import Record
from bitplan.store.files import ASIDE, check_name, load, read_bytes, restore_folder, set_aside, write_text

Kept = TypeVar("Kept", bound=Record)
Other = TypeVar("Other", bound=Record)
_SUFFIX, _RUNNING = ".json", "running"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordStore(Generic[Kept]):
    """Records of one kind in a folder, each under the id of its owner. `leases` says who works on which id."""

    folder: Path
    kind: type[Kept]
    leases: Path

    @classmethod
    def at(cls, folder: str | Path) -> RecordStore[Record]:
        """Return the store of a folder for outcomes of any kind, with its leases inside it."""
        return RecordStore(Path(folder), Record, Path(folder) / "leases")

    def holding(self, kind: type[Other]) -> RecordStore[Other]:
        """Return the same folder for records of another kind: jobs of several methods stand side by side."""
        return cast("RecordStore[Other]", replace(self, kind=kind))  # type: ignore[arg-type]

    def path(self, name: str) -> Path:
        """Return the file of an id."""
        return self.folder / f"{check_name(name)}{_SUFFIX}"

    def lease(self, name: str) -> Path:
        """Return the lease of an id."""
        return self.leases / f"{self.folder.name}-{check_name(name)}"

    @property
    def running(self) -> FolderStore:
        """The folders of unfinished trainings, by id. They stand beside the leases."""
        return FolderStore(self.leases.with_name(_RUNNING))

    def has(self, name: str) -> bool:
        """Return True if there is a record of that id."""
        return self.path(name).is_file()

    def ids(self) -> set[str]:
        """Return the ids that are there, by listing the folder once."""
        return {name.removesuffix(_SUFFIX) for name in self._names() if name.endswith(_SUFFIX)}

    def read(self, name: str) -> Kept:
        """Return the record of an id, checked."""
        return load(self.path(name), self.kind, of=name, sealed=True)

    def find(self, name: str) -> Kept | None:
        """Return the record of an id, or None if there is none."""
        return self.read(name) if self.has(name) else None

    def read_sound(self, names: Iterable[str]) -> tuple[dict[str, Kept], dict[str, Damaged]]:
        """Return the sound records among some ids, and the errors of the damaged ones.

        Ids without a record are left out.
        """
        sound: dict[str, Kept] = {}
        damaged: dict[str, Damaged] = {}
        for name in names:
            try:
                sound[name] = self.read(name)
            except Damaged as error:
                damaged[name] = error
            except FileError:
                if self.has(name):
                    raise
        return sound, damaged

    def set_aside(self, name: str) -> Path:
        """Keep a damaged record under another name, and return that name."""
        return set_aside(self.path(name))

    def lost(self) -> set[str]:
        """Return the ids whose record was set aside and has not been made again."""
        aside = {name.partition(_SUFFIX)[0] for name in self._names() if f"{_SUFFIX}{ASIDE}" in name}
        return aside - self.ids() if aside else aside

    def read_all(self) -> dict[str, Kept]:
        """Return every record by its id, in the order of ids."""
        return {name: self.read(name) for name in sorted(self.ids())}

    def keep(self, name: str, record: Kept) -> None:
        """Write a record under an id, unless its file says the same already."""
        keep_record(self.path(name), record, of=name)

    def _names(self) -> list[str]:
        """List the names of all files but temporary ones; none if the folder cannot be listed."""
        try:
            return [name for name in os.listdir(self.folder) if not name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []

    def remove(self, name: str) -> None:
        """Remove the record of an id, if it is there: removing nothing would fail on a read-only disk."""
        if self.has(name):
            try:
                self.path(name).unlink(missing_ok=True)
            except OSError as error:
                raise WriteError(f"cannot remove {self.path(name)}: {error.strerror or error}") from None


def keep_record(path: Path, record: Record, *, of: str | None = None) -> None:
    """Write a record unless its file says the same already. Set a damaged file aside, with a warning."""
    text = record.to_json(of=of)
    if path.is_file():
        try:
            if path.stat().st_size == len(text.encode()) and read_bytes(path) == text.encode():
                return
            load(path, type(record), of=of, sealed=True)
        except Damaged as error:
            _log.warning("%s; it is made again, and the old one is kept as %s", error, set_aside(path).name)
        except FileError:
            pass  # a file of another version may be overwritten
    elif os.path.lexists(path):
        _log.warning("%s is no file; it is made, and the old one is kept as %s", path, set_aside(path).name)
    write_text(path, text)


@dataclass(frozen=True)
class FolderStore:
    """Folders by id that others fill, such as checkpoints."""

    folder: Path

    def path(self, name: str) -> Path:
        """Return the folder of an id, there or not."""
        return self.folder / check_name(name)

    def has(self, name: str) -> bool:
        """Return True if the folder of an id is there."""
        restore_folder(self.path(name))
        return self.path(name).is_dir()

    def set_aside(self, name: str) -> None:
        """Keep a damaged folder under another name, if it is there."""
        if self.path(name).exists():
            set_aside(self.path(name))

    def clear(self, name: str) -> None:
        """Remove a folder. Files that cannot be removed stay; they do no harm."""
        shutil.rmtree(self.path(name), ignore_errors=True)
