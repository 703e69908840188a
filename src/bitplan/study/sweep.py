"""sweep: run every trial of a study that is not done yet, and keep every outcome as a file."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bitplan.core.errors import Damaged, InputError, UnknownName, WriteError
from bitplan.core.progress import Progress
from bitplan.core.records import Costs, Graph, Plan
from bitplan.core.studies import Agenda, Estimation, FailedTrial, Study, Training
from bitplan.core.trials import Trial
from bitplan.gains.base import estimate
from bitplan.selection.base import select_each
from bitplan.store.engines import Engine, Failure, keep_workers
from bitplan.store.files import remove_quietly
from bitplan.store.jobs import run_jobs
from bitplan.store.run_folder import RunFolder
from bitplan.study.clean import left_by_killed
from bitplan.study.context import RunContext, StartStore, check_same, find_missing_starts, make_start, make_study_engine
from bitplan.study.forecast import check_limits
from bitplan.study.restore import is_finished, is_needless
from bitplan.study.scheduling import (
    Estimate,
    Served,
    Train,
    estimates_for,
    plans_of,
    references,
    result_of,
    trainings_of,
)
from bitplan.study.trials import agenda, all_starts, quantizer_plans, with_controls

_PAUSE = 5.0  # seconds between two words on parts of a long estimate


@dataclass(frozen=True)
class Tally:
    """Count the trials that are done, and report progress; the folder is read once, later events are counted."""

    study: Study
    trials: Sequence[str]
    progress: Progress
    done: set[str] = field(default_factory=set)

    def begin(self, there: set[str]) -> None:
        """Start from the trials that are there already."""
        self.done.update(there & set(self.trials))

    def tell(self, text: str) -> None:
        """Report an event."""
        self.progress(len(self.done), len(self.trials), text)

    def count(self, trial: Trial) -> None:
        """Count a trial that is done."""
        self.done.add(trial.id)
        self.tell(f"{self.study.words(trial)} done")

    def report_parts(self) -> Progress:
        """Return a progress that reports parts of a long estimate every few seconds."""
        last = [time.monotonic()]

        def tell(done: int, total: int, what: str) -> None:
            if time.monotonic() - last[0] > _PAUSE:
                last[0] = time.monotonic()
                self.tell(f"{what} ({done} of {total})")

        return tell


_PASSES = 3  # a file may be damaged while we work; then what it was needed for is gone through again


@dataclass(frozen=True)
class Summary:
    """The end of a sweep: the numbers of trials done and failed, and of networks trained meanwhile.

    Networks that another sweep of the same folder trained meanwhile count for both. `missing` are the trials whose
    result was damaged, and that are done again only on request; `set_aside` are the damaged files found in this sweep.
    """

    total: int
    done: int
    failed: tuple[FailedTrial, ...]
    trained: int
    seconds: float
    missing: tuple[Trial, ...] = ()
    set_aside: tuple[Path, ...] = ()


def sweep(
    study: Study,
    run_folder: str | Path,
    *,
    engine: Engine | None = None,
    progress: Progress | None = None,
    retry_failed: bool = False,
    redo_damaged: bool = False,
    only: Collection[str] | None = None,
    trust: bool = False,
) -> Summary:
    """Run the trials that are not in the folder yet; a trial that fails is recorded and stops no other.

    The study's controls belong to it (`study/trials.py`). `only` names methods by their titles. Several processes may
    sweep the same folder: each network is trained once. `trust` allows a study to use code that is not installed here,
    and an engine at an address. A damaged file is set aside and made again, but a result that took a training only with
    `redo_damaged`.
    """
    begin = time.perf_counter()
    study = with_controls(study)
    listed = agenda(study)
    titles = list(dict.fromkeys(study.title_of(trial) for trial in listed.trials))
    for title in only or ():
        if title not in titles:
            raise UnknownName("method of this study", title, titles)
    run = RunFolder(Path(run_folder))
    sweeper = _Sweeper(
        RunContext(study, run, trust),
        listed,
        engine or make_study_engine(study, trust=trust),
        Tally(study, [trial.id for trial in listed.trials], progress or (lambda *_: None)),
        retry_failed,
        redo_damaged,
    )
    remove_quietly(left_by_killed(run))
    before = set(run.set_aside())
    with keep_workers():
        trained = sweeper.run_passes(frozenset(only) if only else None)
    own = [trial.id for trial in listed.trials]
    return Summary(
        total=len(own),
        done=len(run.trials.ids().intersection(own)),
        failed=tuple(run.failed.read_sound(name for name in own if run.failed.has(name))[0].values()),
        trained=trained,
        seconds=time.perf_counter() - begin,
        missing=tuple(run.missing),
        set_aside=tuple(path for path in run.set_aside() if path not in before),
    )


def prepare(setting: RunContext, listed: Agenda) -> tuple[Graph, list[Costs]]:
    """Trace, price, check that every budget can be met and that spends suffice; then keep study, graph and costs."""
    graph = setting.trace()
    costs = setting.costs(graph)
    plain = estimate("uniform", None, graph, choices=setting.study.choices)
    select_each(graph, plain, costs, budgets=setting.study.budgets)
    check_limits(setting, graph)
    whole = listed.model_copy(update={"trainings": _known_trainings(setting.run, listed)})
    setting.run.keep(setting.study, graph, costs[0], whole)
    return graph, costs


@dataclass(frozen=True)
class _Sweeper:
    """The settings and the state of one sweep."""

    setting: RunContext
    agenda: Agenda
    engine: Engine
    tally: Tally
    retry: bool
    redo: bool
    damaged: list[str] = field(default_factory=list)  # what was found to be while others needed it

    @property
    def run(self) -> RunFolder:
        return self.setting.run

    @property
    def study(self) -> Study:
        return self.setting.study

    def run_passes(self, only: frozenset[str] | None) -> int:
        """Run all trials, and again if a file was found damaged: the pass that owns the file makes it again."""
        trained = 0
        for _ in range(_PASSES):
            self.damaged.clear()
            trained += self.run_all(only)
            if not self.damaged:
                return trained
        raise Damaged(f"{self.damaged[0]}. It was made again, and is damaged again: look at the disk")

    def run_all(self, only: frozenset[str] | None) -> int:
        """Make starts, gains and plans, then train the networks; return how many were trained now."""
        graph, costs = prepare(self.setting, self.agenda)
        self.tally.begin(self.run.trials.ids())
        self.tally.tell("tracing and pricing done")
        wanted = [
            trial
            for trial in self.agenda.trials
            if trial.role not in ("float", "start") and (only is None or self.study.title_of(trial) in only)
        ]
        given = references(graph, wanted) | quantizer_plans(self.study, graph, wanted)
        wanted = self._make_starts(wanted, only)
        plans = given | self._make_plans(graph, costs, wanted)
        self.run.keep_plans(plans.values())
        return self._train_networks([trial for trial in wanted if trial.id in plans], plans)

    def _make_starts(self, wanted: Sequence[Trial], only: frozenset[str] | None) -> list[Trial]:
        """Make all starts that are still needed, and return the trials that can begin."""
        left = list(wanted)
        for first in all_starts(self.study):
            if is_finished(self.run, [trial for trial in first.all if trial in self.agenda.trials], wanted):
                continue
            for trial in (first.floating, first.high):
                if trial in self.agenda.trials and not self._make_start(trial):
                    left = [one for one in left if one.start not in (trial.id, first.high.id)]
                    break
            else:
                own = {title: trial for title, trial in first.others.items() if only is None or title in only}
                unmade = {title for title, trial in own.items() if not self._make_start(trial)}
                here = first.high.id
                left = [one for one in left if one.start != here or self.study.title_of(one) not in unmade]
        return left

    def _make_start(self, trial: Trial) -> bool:
        """Make a start unless it is there; return True if there is one now."""
        shelf = StartStore.of(self.run)
        if shelf.has(trial.id):
            sound, damaged = shelf.read_sound([trial.id])
            if sound:
                check_same(self.run, trial)
                return True
            for error in damaged.values():
                self.tally.tell(f"{error}; all trials start from it, and it is made again")
        self.tally.done.discard(trial.id)
        if self._is_skipped(trial):
            return False
        self.tally.tell(f"{trial.method}: making the network that others start from")
        outcome = make_start(self.setting, trial, self.engine)
        if isinstance(outcome, Failure):
            if outcome.fault == "input":  # no trial is to blame, and none can begin: the data is missing, say
                raise InputError(outcome.message)
            self._write_failure([trial], outcome)
            return False
        self._count_done([trial])
        return True

    def _make_plans(self, graph: Graph, costs: list[Costs], wanted: Sequence[Trial]) -> dict[str, Plan]:
        """Return the plan of every trial whose method has gains; if estimating fails, its trials fail."""
        jobs: dict[str, tuple[Estimation, list[Served]]] = {}  # methods that differ only in their selector share one
        scored = self.run.trials.ids()
        for job, served in estimates_for(self.study, graph.id, wanted):
            if is_needless(self.run, job, served.trials, scored):
                if self.run.estimates.has(job.id):
                    aside = self.run.estimates.set_aside(job.id)
                    self.tally.tell(f"an estimate is damaged, and not needed any more: it is kept as {aside.name}")
                continue
            if any(not self._is_skipped(trial) for trial in served.trials):
                jobs.setdefault(job.id, (job, []))[1].append(served)
        if jobs:
            titles = ", ".join(dict.fromkeys(one.method.title for _, several in jobs.values() for one in several))
            self.tally.tell(f"estimating gains: {titles}")
        work = Estimate(self.setting, self.engine, self.tally.report_parts())
        plans: dict[str, Plan] = {}
        for job, outcome in run_jobs(work, [job for job, _ in jobs.values()], shelf=self.run.estimates):
            for one in jobs[job.id][1]:
                if isinstance(outcome, Failure):
                    self._write_failure(one.trials, outcome)
                    continue
                self.run.keep_gains(one.title, outcome)
                self.tally.tell(f"{one.title}: gains estimated, {outcome.seconds:.1f} s of work")
                plans |= plans_of(graph, outcome, costs, one.method, one.trials)
        return plans

    def _train_networks(self, wanted: Sequence[Trial], plans: Mapping[str, Plan]) -> int:
        """Train each network once, for all the trials that it serves."""
        served = trainings_of(self.study, wanted, plans)
        sharing = {name: tuple(trial.id for trial in trials) for name, (_, trials) in served.items()}
        known = _known_trainings(self.run, self.agenda)
        self.run.keep(self.agenda.model_copy(update={"trainings": known | sharing}))
        asked = self._list_trainings(served, plans)
        before = self.run.trained.ids()
        if self.redo:  # what is damaged among them is trained again
            before = set(self.run.trained.read_sound(before & {job.id for job in asked})[0])
        for trial in find_missing_starts(self.setting, {job.start for job in asked if job.id not in before}):
            self._make_start(trial)
        count = 0
        work, shelf = Train(self.setting), self.run.trained
        for job, outcome in run_jobs(work, asked, shelf=shelf, engine=self.engine, remake=self.redo):
            trials = served[job.id][1]
            if isinstance(outcome, Failure):
                self._write_failure(trials, outcome)
                continue
            count += job.id not in before
            for trial in trials:
                self.run.trials.keep(trial.id, result_of(trial, plans[trial.id], outcome))
            self._count_done(trials)
            self.run.running.clear(job.id)
        return count

    def _list_trainings(
        self, served: Mapping[str, tuple[Training, list[Trial]]], plans: Mapping[str, Plan]
    ) -> list[Training]:
        """Return the trainings with a trial that has no result by its plan yet, unless all of its trials failed before.

        A result that was damaged is taken from a training that is there; one is trained again only on request.
        """
        planned, there = self._read_plans(), self.run.trained.ids()
        lost = self.run.trained.lost() | self.run.trials.lost()
        asked = []
        for job, trials in served.values():
            still = [trial for trial in trials if planned.get(trial.id) != plans[trial.id].id]
            if not still or all(self._is_skipped(trial) for trial in trials):
                continue
            if self.redo or job.id in there or not lost.intersection([job.id, *(trial.id for trial in still)]):
                asked.append(job)
        return asked

    def _read_plans(self) -> dict[str, str]:
        """Return trial → plan for those that are done; damaged results are set aside and reported."""
        own = {trial.id: trial.role for trial in self.agenda.trials}
        sound, damaged = self.run.trials.read_sound(sorted(self.run.trials.ids() & own.keys()))
        for name, error in damaged.items():
            self.tally.done.discard(name)
            self.tally.tell(f"{error}; it is kept as {self.run.trials.set_aside(name).name}")
            if own[name] in ("float", "start"):  # since we looked at it; the next pass makes it again
                self.damaged.append(str(error))
        return {name: result.plan for name, result in sound.items()}

    def _is_skipped(self, trial: Trial) -> bool:
        """Return True if a trial failed before and is not to be tried again; a damaged record of it is set aside."""
        if self.retry or not self.run.failed.has(trial.id):
            return False
        sound, damaged = self.run.failed.read_sound([trial.id])
        if damaged:
            aside = self.run.failed.set_aside(trial.id)
            self.tally.tell(f"{damaged[trial.id]}; it is kept as {aside.name}, and the trial tried again")
        return bool(sound)

    def _write_failure(self, trials: Iterable[Trial], failure: Failure) -> None:
        if failure.fault == "store":  # not the trial's: whatever follows would fail as well
            raise WriteError(failure.message)
        if failure.fault == "damage":  # nor this: whoever owns the file mends it, then they are tried again
            self.damaged.append(failure.message)
            self.tally.tell(failure.message)
            return
        for trial in trials:
            failed = FailedTrial(trial=trial, fault=failure.fault, error=failure.error, traceback=failure.traceback)
            self.run.failed.keep(trial.id, failed)
            self.tally.tell(f"{self.study.words(trial)} failed: {failure.error}")

    def _count_done(self, trials: Iterable[Trial]) -> None:
        for trial in trials:
            self.run.failed.remove(trial.id)
            self.tally.count(trial)


def _known_trainings(run: RunFolder, listed: Agenda) -> dict[str, tuple[str, ...]]:
    """Return which trials share a training, as an earlier sweep of the same study recorded it."""
    try:
        known = run.agenda
    except Damaged:  # it is made again from the study, and set aside when the new one is written
        return {}
    return known.trainings if known is not None and known.study == listed.study else {}
