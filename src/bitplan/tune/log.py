"""The log of a training, a line per step: in memory, and as a file of one JSON object per line."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bitplan.core.errors import WriteError
from bitplan.core.parsing import explain_failures, parse_json
from bitplan.store.files import open_file, read_text, write_text

_TAIL = 1000  # bytes at the end of a log that hold its last lines
LOG = "log.jsonl"
"""What a log is called in the folder of its training."""
THEN = "then"
"""What the folder of a second stage is called in that of the first."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One step, counted from 1: loss, score, learning rate, speed, and seconds since the beginning.

    The score is None if the task has none for a batch.
    """

    step: int
    epoch: int
    loss: float
    score: float | None
    lr: float
    samples_per_second: float
    seconds: float


@dataclass(frozen=True)
class TrainLog:
    """All steps of a training; `complete` is False if it was asked to stop before its end."""

    lines: tuple[LogLine, ...]
    complete: bool

    def followed_by(self, later: TrainLog) -> TrainLog:
        """Return both logs as one training: steps, epochs and seconds are counted on."""
        if not self.lines:
            return later
        last = self.lines[-1]
        moved = [
            replace(
                line, step=line.step + last.step, epoch=line.epoch + last.epoch + 1, seconds=line.seconds + last.seconds
            )
            for line in later.lines
        ]
        return TrainLog((*self.lines, *moved), complete=later.complete)

    @property
    def seconds(self) -> float:
        """Return the seconds of training without interruptions."""
        return self.lines[-1].seconds if self.lines else 0.0

    @property
    def mean_loss(self) -> float:
        """Return the training loss, averaged over all steps."""
        return _mean([line.loss for line in self.lines])

    @property
    def mean_score(self) -> float:
        """Return the training score, averaged over all steps that have one (ALPS's A)."""
        return _mean([line.score for line in self.lines if line.score is not None])


class LogFile:
    """A log that grows by one line per step."""

    def __init__(self, path: Path, lines: Iterable[LogLine] = ()) -> None:
        """Start with the lines up to the last checkpoint; later lines of a killed run are dropped."""
        write_text(path, "".join(_text(line) for line in lines))
        self._path = path
        with self._writing():
            self._file = path.open("ab", buffering=0)  # nothing is held back that a full disk could refuse later

    def add(self, line: LogLine) -> None:
        """Append a step."""
        with self._writing():
            rest = _text(line).encode()
            while rest:  # a disk that is almost full takes a part, then refuses
                rest = rest[self._file.write(rest) :]

    def sync(self) -> None:
        """Make sure that what was added is on the disk."""
        with self._writing():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteError(f"cannot write {self._path}: {error.strerror or error}") from None


def read_log(path: Path, *, up_to: int) -> list[LogLine]:
    """Return the lines of a log file up to a step; a last line that a kill cut off is left out."""
    lines = []
    with explain_failures(path, "a log", "delete its folder to begin anew"):
        texts = read_text(path).splitlines() if path.exists() else []
    for text in texts:
        try:
            line = LogLine(**parse_json(text))
            if line.step > up_to:
                break
        except (ValueError, TypeError):
            break
        lines.append(line)
    return lines


def stage_folder(folder: str | Path, number: int) -> Path:
    """Return the folder of a stage: `folder` for the first, for each other one inside that of the former."""
    return Path(folder, *(THEN for _ in range(number)))


def last_step(folder: Path) -> int:
    """Return the last step that a training wrote into its folder, over all its stages; 0 if there is none yet."""
    own, then = _last_step(folder), folder / THEN
    return own + last_step(then) if then.is_dir() else own


def _last_step(folder: Path) -> int:
    try:
        with open_file(folder / LOG) as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return 0
    for line in reversed(lines):  # the last one may be cut off: it is being written
        try:
            return int(parse_json(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def hash_of_lines(path: Path, count: int) -> str:
    """Return a hash of the first `count` lines of a log file, or of all if there are fewer."""
    digest = hashlib.sha256()
    if path.exists():
        with open_file(path) as file:
            for line in itertools.islice(file, count):
                digest.update(line)
    return digest.hexdigest()[:32]


def _text(line: LogLine) -> str:
    return json.dumps(asdict(line), allow_nan=False) + "\n"


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
