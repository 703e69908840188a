"""The folder of a measurement that is going on: what is exported and which rounds are run, so that a kill costs little.

measuring.json     what is measured; a measurement that differs is refused
NETWORK.onnx       an exported network
rounds-K.json      the times of some rounds
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from bitplan.core.errors import FileError
from bitplan.core.latencies import Measuring, Rounds
from bitplan.core.store import load, save, write_text
from bitplan.core.temporary import clear_left

_ABOUT = "measuring.json"


class KeptMeasurement:
    """The files of one measurement."""

    def __init__(self, path: str | Path, about: Measuring) -> None:
        """Take over the folder if it is new or this measurement's."""
        self.path, self._about = Path(path), about
        known = self.path / _ABOUT
        clear_left(self.path)
        if not known.exists():
            if self.path.exists() and any(self.path.iterdir()):
                raise FileError(f"{self.path} is in the way of a measurement: move it, or write to another file")
            save(about, known)
            return
        before = load(known, Measuring, sealed=True)
        if before.id != about.id:
            fields = [name for name in Measuring.model_fields if getattr(before, name) != getattr(about, name)]
            raise FileError(
                f"{self.path} holds an unfinished measurement with another {', '.join(fields)}: finish that one with "
                "what was typed for it, or delete the folder"
            )

    def file(self, network: str) -> Path:
        """Where an exported network is, or will be."""
        return self.path / f"{re.sub('[^a-z0-9]', '-', network)}.onnx"

    def rounds(self, number: int) -> Rounds | None:
        """The rounds of that number, where they were run before."""
        path = self._rounds_file(number)
        return load(path, Rounds, of=self._about.id, sealed=True) if path.exists() else None

    def keep(self, number: int, rounds: Rounds) -> None:
        """Put rounds away."""
        write_text(self._rounds_file(number), rounds.to_json(of=self._about.id))

    def _rounds_file(self, number: int) -> Path:
        return self.path / f"rounds-{number}.json"


def forget(path: Path) -> None:
    """Delete a measurement's folder: its record is written."""
    if (path / _ABOUT).exists():
        shutil.rmtree(path, ignore_errors=True)
