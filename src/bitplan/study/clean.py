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
from bitplan.study.trials import estimation, starts, trials


@dataclass(frozen=True)
class Waste:
    """Files and folders that none of the studies needs, and their bytes."""

    paths: tuple[Path, ...]
    bytes: int


def find_waste(folder: str | Path, studies: Iterable[Study]) -> Waste:
    """Everything in a run's folder that none of these studies needs, now or to go on.

    What methods and trainings left on the way is waste once all trials of these studies are done.
    """
    run, given = RunFolder(Path(folder)), list(studies)
    own = [one for study in given for one in (starts(study).floating, starts(study).high) if one is not None]
    wanted = {trial.id for study in given for trial in trials(study)}
    results = [load(path, Result) for path in _files(run.path / "trials") if path.stem in wanted]
    kept = {"trials": wanted, "failures": wanted, "starts": {trial.id for trial in own}}
    if run.graph is not None:
        graph = run.graph.id
        kept["estimates"] = {estimation(study, graph, method).id for study in given for method in study.methods}
    signs = {path: sign for path in _files(run.path / "leases") if (sign := read_lease(path)) is not None}
    if wanted <= {result.trial.id for result in results}:  # nothing is left that may go on from what is there
        busy = {path.name.rpartition("-")[2] for path, sign in signs.items() if not sign.holder.gone}
        trainings = {one.training for one in results}
        kept |= {"plans": {one.plan for one in results}, "trained": trainings, "networks": trainings}
        kept |= {"jobs": set(), "running": busy}  # an export may be training a network again
    waste = [path for name, needed in kept.items() for path in _files(run.path / name) if path.stem not in needed]
    waste += [path for path, sign in signs.items() if sign.holder.gone]
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
