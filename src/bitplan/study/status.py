"""status: what is done, running, failed and waiting in a run, from nothing but its files."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bitplan.core.errors import Damaged, InputError
from bitplan.core.records import ABOUT, Gains
from bitplan.core.studies import FLOAT, Agenda, FailedTrial, Study
from bitplan.store.files import ASIDE, load, read_text
from bitplan.store.lease import read_lease
from bitplan.store.run_folder import LeaseFile, RunFolder, RunPart, gains_file
from bitplan.study.context import check_network
from bitplan.tune.log import last_step
from bitplan.tune.resume import check_training

_TIMED = 100  # trainings whose seconds say what one takes


@dataclass(frozen=True)
class Running:
    """Something that a living process works on: its words, and how many steps it has taken."""

    what: str
    step: int


@dataclass(frozen=True)
class MethodProgress:
    """The trials of one method, reference or start: how many there are, are done, and failed."""

    title: str
    total: int
    done: int
    failed: int


@dataclass(frozen=True)
class Status:
    """How far a run is; `seconds_left` is None where nothing is known yet, or nothing runs that could be timed.

    `missing` counts the trials whose result was damaged and set aside, `damaged` says which files are and still lie
    where they were.
    """

    study: Study
    total: int
    done: int
    shared: int
    running: tuple[Running, ...]
    failed: tuple[FailedTrial, ...]
    waiting: int
    seconds_left: float | None
    parts: tuple[MethodProgress, ...] = ()
    missing: int = 0
    damaged: tuple[str, ...] = ()


def status(folder: str | Path) -> Status:
    """Look at a run at any time; nothing is written, and no process is asked."""
    run = RunFolder(Path(folder))
    study = run.study
    agenda = run.agenda or Agenda(study=study.id, trials=())
    names = {trial.id: study.words(trial) for trial in agenda.trials}
    results, damaged = run.trials.read_sound(sorted(run.trials.ids() & names.keys()))
    done = set(results)
    failures, unclear = run.failed.read_sound(name for name in names if name not in done and run.failed.has(name))
    failed = tuple(failures.values())
    lost = set(failures)
    missing = {trial.id for trial in run.missing}
    running: list[Running] = []
    busy: set[str] = set()
    for lease in _living(run):
        wanted_by = agenda.trainings.get(lease.job, (lease.job,))  # what is no training may be a trial by itself
        serves = [trial for trial in wanted_by if trial in names]
        busy.update(serves)
        what = _words(lease, [names[trial] for trial in serves])
        running.append(Running(what, last_step(run.running.path(lease.job))))
    return Status(
        study=study,
        total=len(names),
        done=len(done),
        shared=_shared(agenda, names.keys()),
        running=tuple(running),
        failed=failed,
        waiting=len(names.keys() - done - busy - lost - missing - damaged.keys()),
        seconds_left=_seconds_left(run, agenda, done | lost, len(running)),
        parts=_parts(study, agenda, done, lost),
        missing=len(missing),
        damaged=tuple(str(error) for error in (*damaged.values(), *unclear.values())),
    )


def _living(run: RunFolder) -> Iterator[LeaseFile]:
    """The leases that living processes hold: what is being worked on."""
    for lease in run.leases():
        sign = read_lease(lease.path)
        if sign is not None and sign.holder.known and not sign.holder.gone:
            yield lease


def _words(lease: LeaseFile, trials: Sequence[str]) -> str:
    """What a lease is held for, as people call it; `trials` are the words of those that its job serves."""
    if lease.part == RunPart.ESTIMATES:
        return f"gains {lease.job}"
    if lease.part == RunPart.JOBS:
        return f"a method's job {lease.job}"
    return " = ".join(trials) or f"{lease.part} {lease.job}"


def _shared(agenda: Agenda, listed: Set[str]) -> int:
    """How many trials need no training of their own, since that of another is the same."""
    served: set[str] = set()
    trainings = 0
    for trials in agenda.trainings.values():
        serves = listed & set(trials)
        served |= serves
        trainings += bool(serves)
    return len(served) - trainings


def _parts(study: Study, agenda: Agenda, done: set[str], failed: set[str]) -> tuple[MethodProgress, ...]:
    """Every method and reference in the agenda's order."""
    by_title: dict[str, list[str]] = {}
    for trial in agenda.trials:
        by_title.setdefault(study.title_of(trial), []).append(trial.id)
    return tuple(
        MethodProgress(title, len(ids), len(done.intersection(ids)), len(failed.intersection(ids)))
        for title, ids in by_title.items()
    )


def _seconds_left(run: RunFolder, agenda: Agenda, settled: set[str], at_once: int) -> float | None:
    """The trainings that are left, at the median pace of some that are done, as many at once as there are now."""
    some = sorted(run.trained.ids() & agenda.trainings.keys())[:_TIMED]  # ids are hashes: the first are any
    took = [trained.seconds for trained in run.trained.read_sound(some)[0].values()]
    trainings = agenda.trainings.values()
    left = sum(not settled.issuperset(trials) for trials in trainings)
    accounted_for = settled.union(*trainings)
    left += sum(trial.id not in accounted_for for trial in agenda.trials)  # each may need a training of its own
    if not left:
        return 0.0
    if not took:
        return None
    return statistics.median(took) * left / max(1, at_once)


# --- check: look at every file of a run, and say which are not as they were written or belong elsewhere.

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
