"""status: count the done, running, failed and waiting trials of a run from its files alone."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import bitplan.core.jobs  # noqa: F401 - makes the kinds of records known that methods keep in a run
from bitplan.core.errors import Damaged, InputError
from bitplan.core.records import ABOUT, Gains
from bitplan.core.studies import FLOAT, Agenda, FailedTrial, Study
from bitplan.store.files import ASIDE, load, read_text
from bitplan.store.lease import read_lease
from bitplan.store.run_folder import LeaseFile, RunFolder, RunPart, gains_file
from bitplan.tune.log import last_step

_TIMED = 100  # trainings whose seconds say what one takes


@dataclass(frozen=True)
class Running:
    """A job of a living process: its words, and its number of steps."""

    what: str
    step: int


@dataclass(frozen=True)
class MethodProgress:
    """The number of trials of one method, reference or start; of them done, and failed."""

    title: str
    total: int
    done: int
    failed: int


@dataclass(frozen=True)
class Status:
    """The progress of a run; `seconds_left` is None if nothing is known yet, or nothing runs that could be timed.

    `missing` counts the trials whose result was damaged and set aside; `damaged` names the damaged files that still lie
    in their places.
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
    """Return the progress of a run at any time; nothing is written, and no process is asked."""
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
    for lease in _living_leases(run):
        wanted_by = agenda.trainings.get(lease.job, (lease.job,))  # what is no training may be a trial by itself
        serves = [trial for trial in wanted_by if trial in names]
        busy.update(serves)
        what = _describe_lease(lease, [names[trial] for trial in serves])
        running.append(Running(what, last_step(run.running.path(lease.job))))
    return Status(
        study=study,
        total=len(names),
        done=len(done),
        shared=_count_shared(agenda, names.keys()),
        running=tuple(running),
        failed=failed,
        waiting=len(names.keys() - done - busy - lost - missing - damaged.keys()),
        seconds_left=_estimate_seconds(run, agenda, done | lost, len(running)),
        parts=_count_by_method(study, agenda, done, lost),
        missing=len(missing),
        damaged=tuple(str(error) for error in (*damaged.values(), *unclear.values())),
    )


def _living_leases(run: RunFolder) -> Iterator[LeaseFile]:
    """Yield the leases that living processes hold."""
    for lease in run.leases():
        sign = read_lease(lease.path)
        if sign is not None and sign.holder.known and not sign.holder.gone:
            yield lease


def _describe_lease(lease: LeaseFile, trials: Sequence[str]) -> str:
    """Return words for the job of a lease; `trials` are the words of the trials that it serves."""
    if lease.part == RunPart.ESTIMATES:
        return f"gains {lease.job}"
    if lease.part == RunPart.JOBS:
        return f"a method's job {lease.job}"
    return " = ".join(trials) or f"{lease.part} {lease.job}"


def _count_shared(agenda: Agenda, listed: Set[str]) -> int:
    """Return how many trials need no training of their own, since another trial has the same."""
    served: set[str] = set()
    trainings = 0
    for trials in agenda.trainings.values():
        serves = listed & set(trials)
        served |= serves
        trainings += bool(serves)
    return len(served) - trainings


def _count_by_method(study: Study, agenda: Agenda, done: set[str], failed: set[str]) -> tuple[MethodProgress, ...]:
    """Return the counts of every method and reference in the agenda's order."""
    by_title: dict[str, list[str]] = {}
    for trial in agenda.trials:
        by_title.setdefault(study.title_of(trial), []).append(trial.id)
    return tuple(
        MethodProgress(title, len(ids), len(done.intersection(ids)), len(failed.intersection(ids)))
        for title, ids in by_title.items()
    )


def _estimate_seconds(run: RunFolder, agenda: Agenda, settled: set[str], at_once: int) -> float | None:
    """Return the trainings left at the median time of some that are done, as many at once as run now."""
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


# check: find the files of a run that are damaged or belong elsewhere.

_AGAIN = 0.3  # seconds until what looks wrong is looked at once more: somebody may just be writing


@dataclass(frozen=True)
class Wrong:
    """A file or folder of a run, and its fault."""

    path: Path
    what: str


@dataclass(frozen=True)
class Checked:
    """The number of files checked, the faults, and the files without a checksum."""

    files: int
    wrong: tuple[Wrong, ...]
    unknown: tuple[Path, ...]


@dataclass
class _Checker:
    """The files checked so far, and their faults."""

    files: set[Path] = field(default_factory=set)
    wrong: list[Wrong] = field(default_factory=list)

    def look(self, path: Path, check: Callable[[], object]) -> None:
        """Check a file or folder; one that disappears meanwhile is no fault."""
        self.files.update(_files_in(path))
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
    run, checker = RunFolder(Path(folder)), _Checker()
    if not run.is_one(run.path) and not any(run.singles()):
        _ = run.study  # says that this is no run
    for path, kind in run.singles().items():
        checker.look(path, partial(load, path, kind, sealed=True))
    for path in sorted((run.path / "gains").glob("[!.]*.json")):
        checker.look(path, partial(_check_gains, path))
    for shelf in run.shelves():
        for name in sorted(shelf.ids()):
            checker.look(shelf.path(name), partial(shelf.read, name))
    _check_folders(run, checker)
    for lease in run.leases():
        checker.look(lease.path, partial(_check_lease, lease.path))
    if not checker.wrong:  # of sound files it can be asked whether they fit together
        checker.wrong += _find_mismatches(run)
    _name_missing(run, checker)
    there = {path for path in _files_in(run.path) if ASIDE not in str(path.relative_to(run.path))}
    unknown = sorted(path for path in there - checker.files if not _is_hidden(path, run.path))
    return Checked(len(checker.files), tuple(checker.wrong), tuple(unknown))


def _check_folders(run: RunFolder, checker: _Checker) -> None:
    """Check the checkpoints, and the folders of unfinished trainings."""
    from bitplan.study.context import check_network  # here, since these load torch, which `status` can do without
    from bitplan.tune.resume import check_training

    for part in (RunPart.STARTS, RunPart.NETWORKS, RunPart.RUNNING):
        for path in run.parts()[part]:
            if path.is_dir() and ASIDE not in path.name:
                running = part == RunPart.RUNNING
                checker.look(
                    path, partial(check_training, path) if running else partial(check_network, path, path.name)
                )


def _check_gains(path: Path) -> None:
    """Check gains, and that the name of their file is that of their method."""
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


def _find_mismatches(run: RunFolder) -> Iterator[Wrong]:
    """Yield records that are sound by themselves and do not fit others."""
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


def _name_missing(run: RunFolder, checker: _Checker) -> None:
    """Add the trials whose result was set aside: they are not done again unless the user asks for it."""
    try:
        missing = run.missing
        study = run.study
    except InputError:
        return  # named above
    for trial in missing:
        what = (
            f"{study.words(trial)} is missing, since its result was damaged: `bitplan sweep --redo-damaged` redoes it"
        )
        checker.wrong.append(Wrong(run.trials.path(trial.id), what))


def _files_in(path: Path) -> set[Path]:
    return {path} if path.is_file() else {file for file in path.rglob("*") if file.is_file()}


def _is_hidden(path: Path, run: Path) -> bool:
    """Return True if a path is temporary: somebody is writing it, or was killed then."""
    return any(part.startswith(".") for part in path.relative_to(run).parts)
