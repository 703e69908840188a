"""status: what is done, running, failed and waiting in a run, from nothing but its files."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from bitplan.core.runs import RunFolder
from bitplan.core.studies import Agenda, FailedTrial, Study
from bitplan.engines.lease import read_lease
from bitplan.tune.log import LOG


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
    """How far a run is; `seconds_left` is None where nothing is known yet, or nothing runs that could be timed."""

    study: Study
    total: int
    done: int
    shared: int
    running: tuple[Running, ...]
    failed: tuple[FailedTrial, ...]
    waiting: int
    seconds_left: float | None
    parts: tuple[MethodProgress, ...] = ()


def status(folder: str | Path) -> Status:
    """Look at a run at any time; nothing is written, and no process is asked."""
    run = RunFolder(Path(folder))
    study, agenda = run.study, run.agenda
    listed = agenda or Agenda(study=study.id, trials=())
    done = {result.trial.id for result in run.results}
    failed = tuple(failure for failure in run.failures if failure.trial.id not in done)
    lost = {failure.trial.id for failure in failed}
    names = {trial.id: study.words(trial) for trial in listed.trials}
    working = _working(run)
    busy = {trial for _, job in working for trial in listed.trainings.get(job, (job,)) if trial in names}
    served = {trial for trials in listed.trainings.values() for trial in trials if trial in names}
    return Status(
        study=study,
        total=len(names),
        done=len(done),
        shared=len(served) - sum(bool(set(trials) & names.keys()) for trials in listed.trainings.values()),
        running=tuple(Running(_what(part, job, listed, names), _step(run.running.path(job))) for part, job in working),
        failed=failed,
        waiting=len(names.keys() - done - busy - lost),
        seconds_left=_seconds_left(run, listed, done | lost, len(working)),
        parts=_parts(study, listed, done, lost),
    )


def _parts(study: Study, agenda: Agenda, done: set[str], failed: set[str]) -> tuple[MethodProgress, ...]:
    """Every method and reference in the agenda's order."""
    by_title: dict[str, list[str]] = {}
    for trial in agenda.trials:
        by_title.setdefault(study.title_of(trial), []).append(trial.id)
    return tuple(
        MethodProgress(title, len(ids), len(done.intersection(ids)), len(failed.intersection(ids)))
        for title, ids in by_title.items()
    )


def _working(run: RunFolder) -> list[tuple[str, str]]:
    """What living processes hold leases of: the part of the run that the outcome goes to, and the job's id."""
    signs = [(lease, read_lease(lease.path)) for lease in run.leases()]
    return [(lease.part, lease.job) for lease, sign in signs if sign is not None and not sign.holder.gone]


def _what(kind: str, job: str, agenda: Agenda, names: dict[str, str]) -> str:
    if kind == "estimates":
        return f"gains {job}"
    if kind == "jobs":
        return f"a method's job {job}"
    trials = [names[trial] for trial in agenda.trainings.get(job, (job,)) if trial in names]
    return " = ".join(trials) or f"{kind} {job}"


def _step(folder: Path) -> int:
    """The last step that a training wrote down."""
    try:
        with (folder / LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 1000))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return 0
    for line in reversed(lines):  # the last one may be cut off: it is being written
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def _seconds_left(run: RunFolder, agenda: Agenda, settled: set[str], at_once: int) -> float | None:
    """The trainings that are left, at the median pace of those that are done, as many at once as there are now."""
    took = [run.trained.read(job).seconds for job in run.trained.ids() & agenda.trainings.keys()]
    known = {trial for trials in agenda.trainings.values() for trial in trials}
    left = sum(not settled >= set(trials) for trials in agenda.trainings.values())
    left += sum(trial.id not in settled | known for trial in agenda.trials)
    if not left:
        return 0.0
    return statistics.median(took) * left / max(1, at_once) if took else None
