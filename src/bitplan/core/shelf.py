"""A shelf: records of one kind in a folder, each under the id of what it belongs to.

What holds for every shelf, whoever fills it and however often its processes are killed:

- A file is there whole or not at all; who replaces one leaves the old one until then.
- Who reads checks that the file is as it was written and belongs to the id asked for; else it is refused by name.
- What is there already is not written again, so that a finished run is only read.
- `has` looks at one file and `ids` lists the folder once; nothing else looks at more than it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar, cast

from bitplan.core.errors import WriteError
from bitplan.core.record import Record
from bitplan.core.store import load, write_text

Kept = TypeVar("Kept", bound=Record)
Other = TypeVar("Other", bound=Record)
_SUFFIX = ".json"


@dataclass(frozen=True)
class Shelf(Generic[Kept]):
    """Where records of a kind are kept by id, and where those who work on one say so (`leases`).

    `sealed` takes no file without a checksum, which those of older formats lack.
    """

    folder: Path
    kind: type[Kept]
    leases: Path
    sealed: bool = True

    @classmethod
    def at(cls, folder: str | Path) -> Shelf[Record]:
        """A folder of its own for outcomes of any kind, its leases inside it."""
        return Shelf(Path(folder), Record, Path(folder) / "leases", sealed=False)

    def holding(self, kind: type[Other]) -> Shelf[Other]:
        """The same folder for records of another kind: jobs of several methods stand side by side."""
        return cast("Shelf[Other]", replace(self, kind=kind))  # type: ignore[arg-type]

    def path(self, name: str) -> Path:
        """The file of an id."""
        return self.folder / f"{name}{_SUFFIX}"

    def lease(self, name: str) -> Path:
        """The file of who works on an id."""
        return self.leases / f"{self.folder.name}-{name}"

    def has(self, name: str) -> bool:
        """Whether there is a record of that id."""
        return self.path(name).is_file()

    def ids(self) -> set[str]:
        """All that are there, by one look into the folder."""
        return {path.stem for path in self.folder.glob(f"[!.]*{_SUFFIX}")} if self.folder.is_dir() else set()

    def read(self, name: str) -> Kept:
        """The record of an id, checked."""
        return load(self.path(name), self.kind, of=name, sealed=self.sealed)

    def find(self, name: str) -> Kept | None:
        """The same, or None where there is none."""
        return self.read(name) if self.has(name) else None

    def read_all(self) -> dict[str, Kept]:
        """Every record by its id, in the order of ids."""
        return {name: self.read(name) for name in sorted(self.ids())}

    def keep(self, name: str, record: Kept) -> None:
        """Write a record under an id, unless its file says the same already."""
        keep_text(self.path(name), record.to_json(of=name))

    def remove(self, name: str) -> None:
        """Forget an id, if it is there: asking a read-only disk to remove nothing would fail."""
        if self.has(name):
            try:
                self.path(name).unlink(missing_ok=True)
            except OSError as error:
                raise WriteError(f"cannot remove {self.path(name)}: {error.strerror or error}") from None


def keep_text(path: Path, text: str) -> None:
    """Write a file unless it says the same already."""
    if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text:
        write_text(path, text)
