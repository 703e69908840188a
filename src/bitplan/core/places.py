"""Folders of a run by id that others fill, such as checkpoints."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from bitplan.core.store import checked_name, set_aside
from bitplan.core.swap import restore


@dataclass(frozen=True)
class Places:
    """Folders by id that others fill, such as checkpoints."""

    folder: Path

    def path(self, name: str) -> Path:
        """The folder of an id, there or not."""
        return self.folder / checked_name(name)

    def has(self, name: str) -> bool:
        """Whether it is there."""
        restore(self.path(name))
        return self.path(name).is_dir()

    def set_aside(self, name: str) -> None:
        """Keep a damaged one under another name, if it is there."""
        if self.path(name).exists():
            set_aside(self.path(name))

    def clear(self, name: str) -> None:
        """Remove it; what cannot be removed stays, and does no harm."""
        shutil.rmtree(self.path(name), ignore_errors=True)
