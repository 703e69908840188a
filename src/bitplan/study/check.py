"""check: look at every file of a run, and say which are not as they were written or belong elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bitplan.core import kinds  # noqa: F401  (so that every kind is known)
from bitplan.core.checkpoints import ABOUT
from bitplan.core.errors import Damaged, InputError
from bitplan.core.records import Gains
from bitplan.core.run_files import RunPart, gains_file
from bitplan.core.runs import RunFolder
from bitplan.core.store import ASIDE, load, read_text
from bitplan.core.studies import FLOAT
from bitplan.engines.lease import read_lease
from bitplan.study.starts import check_network
from bitplan.tune.resume import check_training

_AGAIN = 0.3  # seconds until what looks wrong is looked at once more: somebody may just be writing


@dataclass(frozen=True)
class Wrong:
    """A file or folder of a run, and what is wrong with it."""

    path: Path
    what: str


@dataclass(frozen=True)
class Checked:
    """How many files were looked at, what is wrong, and which files carry nothing that they could be checked by."""

    files: int
    wrong: tuple[Wrong, ...]
    unknown: tuple[Path, ...]


@dataclass
class _Seen:
    """What was looked at so far."""

    files: set[Path] = field(default_factory=set)
    wrong: list[Wrong] = field(default_factory=list)

    def look(self, path: Path, check: Callable[[], object]) -> None:
        """Check a file or folder; one that is gone meanwhile is nobody's fault."""
        self.files.update(_files(path))
        for last in (False, True):
            try:
                check()
                return
            except InputError as error:
                what = str(error)
            if not path.exists():
                return
            if not last:
                time.sleep(_AGAIN)
        self.wrong.append(Wrong(path, what))


def check(folder: str | Path) -> Checked:
    """Check every file of a run; nothing is written, and a sweep may go on meanwhile."""
    run, seen = RunFolder(Path(folder)), _Seen()
    if not run.is_one(run.path) and not any(run.singles()):
        _ = run.study  # says that this is no run
    for path, kind in run.singles().items():
        seen.look(path, partial(load, path, kind, sealed=True))
    for path in sorted((run.path / "gains").glob("[!.]*.json")):
        seen.look(path, partial(_check_gains, path))
    for shelf in run.shelves():
        for name in sorted(shelf.ids()):
            seen.look(shelf.path(name), partial(shelf.read, name))
    _check_folders(run, seen)
    for lease in run.leases():
        seen.look(lease.path, partial(_check_lease, lease.path))
    if not seen.wrong:  # of sound files it can be asked whether they fit together
        seen.wrong += _unfitting(run)
    _name_missing(run, seen)
    there = {path for path in _files(run.path) if ASIDE not in str(path.relative_to(run.path))}
    unknown = sorted(path for path in there - seen.files if not _hidden(path, run.path))
    return Checked(len(seen.files), tuple(seen.wrong), tuple(unknown))


def _check_folders(run: RunFolder, seen: _Seen) -> None:
    """Checkpoints, and what trainings that are under way have left."""
    for part in (RunPart.STARTS, RunPart.NETWORKS, RunPart.RUNNING):
        for path in run.parts()[part]:
            if path.is_dir() and ASIDE not in path.name:
                running = part == RunPart.RUNNING
                seen.look(path, partial(check_training, path) if running else partial(check_network, path, path.name))


def _check_gains(path: Path) -> None:
    """Gains say the title of their method, which makes the name of their file."""
    try:
        title = str(json.loads(read_text(path)).get("of"))
    except (ValueError, AttributeError, RecursionError):
        title = ""  # whoever loads it says why
    load(path, Gains, sealed=True)
    if gains_file(title) != f"gains/{path.name}":
        raise Damaged(f"{path}: the gains belong to {title}: files were exchanged")


def _check_lease(path: Path) -> None:
    sign = read_lease(path)
    if sign is not None and not sign.holder.known:
        raise Damaged(f"{path} cannot be read: a sweep waits, then takes it over")


def _unfitting(run: RunFolder) -> Iterator[Wrong]:
    """What is sound by itself, but does not fit what is beside it."""
    study, agenda, graph, costs = run.study, run.agenda, run.graph, run.costs
    if agenda is not None and agenda.study != study.id:
        yield Wrong(run.file_of(type(agenda)), f"it is of study {agenda.study}, and {study.name} is {study.id}")
    if graph is not None and costs is not None and costs.graph != graph.id:
        yield Wrong(run.file_of(type(costs)), f"it is of graph {costs.graph}, and the graph here is {graph.id}")
    plans, trained = run.plans, run.trained.read_all()
    for result in run.results:
        path = run.trials.path(result.trial.id)
        if result.trial.role in ("reference", "choice") and result.plan not in plans:
            yield Wrong(path, f"its plan {result.plan} is not there")
        gave = trained.get(result.training)
        if gave is not None and gave.score != result.score:
            yield Wrong(path, f"its score is {result.score}, that of its training {gave.score}")
        if result.trial.role in ("float", "start") and not run.starts.has(result.trial.id):
            place = run.starts.path(result.trial.id) / ABOUT
            what = result.trial.method or FLOAT
            yield Wrong(place, f"the network of {what} is not there: it is made again where something needs it")


def _name_missing(run: RunFolder, seen: _Seen) -> None:
    """Trials whose result was set aside: they are not done again unless somebody asks for it."""
    try:
        missing = run.missing
        study = run.study
    except InputError:
        return  # named above
    for trial in missing:
        what = (
            f"{study.words(trial)} is missing, since its result was damaged: `bitplan sweep --redo-damaged` redoes it"
        )
        seen.wrong.append(Wrong(run.trials.path(trial.id), what))


def _files(path: Path) -> set[Path]:
    return {path} if path.is_file() else {file for file in path.rglob("*") if file.is_file()}


def _hidden(path: Path, run: Path) -> bool:
    """Whether it is a temporary name: of somebody who is writing, or was killed then."""
    return any(part.startswith(".") for part in path.relative_to(run).parts)
