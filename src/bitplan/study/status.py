"""status: what is done, running, failed and waiting in a run, from nothing but its files."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from bitplan.core.run_files import RunPart
from bitplan.core.runs import LeaseFile, RunFolder
from bitplan.core.studies import Agenda, FailedTrial, Study
from bitplan.engines.lease import read_lease
from bitplan.tune.log import last_step

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
    done, damaged = run.trials.look_at(sorted(run.trials.ids() & names.keys()))
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
