"""clean_: find and remove what no study needs any more from the folder of a run."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bitplan.core.errors import FileError
from bitplan.core.runs import RunFolder
from bitplan.core.store import load
from bitplan.core.studies import Study
from bitplan.core.trials import Result
from bitplan.engines.lease import read_lease
from bitplan.study.trials import starts, trials

_BY_TRIAL = ("trials", "failures")


@dataclass(frozen=True)
class Waste:
    """Files and folders that none of the studies needs, and their bytes."""

    paths: tuple[Path, ...]
    bytes: int


def find_waste(folder: str | Path, studies: Iterable[Study]) -> Waste:
    """Everything in a run's folder that none of these studies needs, now or to go on.

    What methods measured on the way is waste once all trials of a study's methods are done or failed.
    """
    run = RunFolder(Path(folder))
    given = list(studies)
    wanted = {trial.id for study in given for trial in trials(study)}
    results = [load(path, Result) for path in _files(run.path / "trials") if path.stem in wanted]
    own = {one.id for study in given for one in (starts(study).floating, starts(study).high) if one is not None}
    settled = {result.trial.id for result in results} | {path.stem for path in _files(run.path / "failures")}
    finished = wanted <= settled
    kept = {
        "trials": wanted,
        "failures": wanted,
        "starts": own,
        "plans": {result.plan for result in results},
        "trained": {result.training for result in results},
    }
    if not finished:  # the work that is left may need what is there
        kept = {name: kept[name] for name in (*_BY_TRIAL, "starts")}
    waste = [path for name, needed in kept.items() for path in _files(run.path / name) if path.stem not in needed]
    if finished:
        waste += [path for name in ("jobs", "running") for path in _files(run.path / name)]
    waste += [path for path in _files(run.path / "leases") if (sign := read_lease(path)) and sign.holder.gone]
    return Waste(tuple(waste), sum(map(_size, waste)))


def clean_(waste: Waste) -> None:
    """Remove what was found."""
    for path in waste.paths:
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        except OSError as error:
            raise FileError(f"cannot remove {path}: {error.strerror or error}") from None


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("[!.]*")) if folder.is_dir() else []


def _size(path: Path) -> int:
    return sum(one.stat().st_size for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file())
