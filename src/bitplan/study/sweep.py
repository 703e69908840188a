"""sweep: run every trial of a study that is not done yet, and keep whatever happens as files."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bitplan.core.errors import InputError, UnknownName, WriteError
from bitplan.core.progress import Progress
from bitplan.core.records import Costs, Gains, Graph, Plan
from bitplan.core.runs import RunFolder
from bitplan.core.studies import Agenda, Estimation, FailedTrial, Method, Study, Trained, Training
from bitplan.core.trials import Result, Trial
from bitplan.engines.base import Engine, Failure
from bitplan.engines.jobs import run_jobs
from bitplan.gains.base import estimate
from bitplan.plan.base import select
from bitplan.study.jobs import Estimate, Train
from bitplan.study.setting import Setting, engine_of
from bitplan.study.starts import MakeStart, check_start, is_made
from bitplan.study.trials import agenda, estimation, starts

_PAUSE = 5.0  # seconds between two words on parts of a long estimate


@dataclass(frozen=True)
class Summary:
    """How a sweep ended: how many trials are done and failed, and how many networks were trained meanwhile.

    Those that another sweep of the same folder trained meanwhile count for both.
    """

    total: int
    done: int
    failed: tuple[FailedTrial, ...]
    trained: int
    seconds: float


def sweep(
    study: Study,
    run_folder: str | Path,
    *,
    engine: Engine | None = None,
    progress: Progress | None = None,
    retry_failed: bool = False,
    only: Collection[str] | None = None,
    trust: bool = False,
) -> Summary:
    """Run what is not in the folder yet; a trial that fails is written down and stops no other.

    `only` names methods by their titles. Several processes may sweep the same folder: each network is trained once.
    `trust` allows what a study asks for beyond what is installed here: its own code, an engine at an address.
    """
    begin = time.perf_counter()
    listed = agenda(study)
    titles = list(dict.fromkeys(study.title_of(trial) for trial in listed.trials))
    for title in only or ():
        if title not in titles:
            raise UnknownName("method of this study", title, titles)
    run = RunFolder(Path(run_folder))
    sweeper = _Sweeper(
        Setting(study, run, trust),
        listed,
        engine or engine_of(study, trust=trust),
        _Tally(study, [trial.id for trial in listed.trials], progress or (lambda *_: None)),
        retry_failed,
    )
    trained = sweeper.run_all(frozenset(only) if only else None)
    own = [trial.id for trial in listed.trials]
    failures = tuple(run.failed.read(name) for name in own if run.failed.has(name))
    return Summary(len(own), len(run.trials.ids().intersection(own)), failures, trained, time.perf_counter() - begin)


def prepare(setting: Setting, listed: Agenda) -> tuple[Graph, list[Costs]]:
    """Trace, price and see that every budget can be met; then write down what the run is about."""
    graph = setting.trace()
    costs = setting.costs(graph)
    plain = estimate("uniform", None, graph, choices=setting.study.choices)
    for budget in setting.study.budgets:
        select(graph, plain, costs, budget=budget)
    whole = listed.model_copy(update={"trainings": _known_trainings(setting.run, listed)})
    setting.run.keep(setting.study, graph, costs[0], whole)
    return graph, costs


@dataclass(frozen=True)
class _Tally:
    """Which trials are done, and telling so. The folder is looked at once; from then on every event is counted."""

    study: Study
    trials: Sequence[str]
    progress: Progress
    done: set[str] = field(default_factory=set)

    def begin(self, there: set[str]) -> None:
        """Start from what is there already."""
        self.done.update(there & set(self.trials))

    def tell(self, text: str) -> None:
        """Say what happens."""
        self.progress(len(self.done), len(self.trials), text)

    def succeed(self, trial: Trial) -> None:
        """Count a trial that is done."""
        self.done.add(trial.id)
        self.tell(f"{self.study.words(trial)} done")

    def now_and_then(self) -> Progress:
        """Tells of parts of a long estimate, every few seconds."""
        last = [time.monotonic()]

        def tell(done: int, total: int, what: str) -> None:
            if time.monotonic() - last[0] > _PAUSE:
                last[0] = time.monotonic()
                self.tell(f"{what} ({done} of {total})")

        return tell


@dataclass(frozen=True)
class _Sweeper:
    """One sweep: what it works on and with."""

    setting: Setting
    agenda: Agenda
    engine: Engine
    tally: _Tally
    retry: bool

    @property
    def run(self) -> RunFolder:
        return self.setting.run

    @property
    def study(self) -> Study:
        return self.setting.study

    def run_all(self, only: frozenset[str] | None) -> int:
        """Starts, gains, plans, then the networks; gives how many were trained now."""
        graph, costs = prepare(self.setting, self.agenda)
        self.tally.begin(self.run.trials.ids())
        self.tally.tell("tracing and pricing done")
        first = starts(self.study)
        for trial in (first.floating, first.high):
            if trial is not None and not self._start(trial):
                return 0
        wanted = [
            trial
            for trial in self.agenda.trials
            if trial.role in ("reference", "choice") and (only is None or self.study.title_of(trial) in only)
        ]
        plans = _references(graph, wanted) | self._choose(graph, costs, wanted)
        self.run.keep_plans(plans.values())
        return self._train(first.high, [trial for trial in wanted if trial.id in plans], plans)

    def _start(self, trial: Trial) -> bool:
        """Make a start unless it is there; whether there is one now."""
        if is_made(self.run, trial):
            check_start(self.run, trial)
            return True
        self.run.trials.remove(trial.id)  # a result whose network is gone
        self.tally.done.discard(trial.id)
        if self._skipped(trial):
            return False
        self.tally.tell(f"{trial.method}: making the network that others start from")
        for _, outcome in run_jobs(MakeStart(self.setting), [trial], shelf=self.run.trials, engine=self.engine):
            if isinstance(outcome, Failure):
                if outcome.fault == "input":  # no trial is to blame, and none can begin: the data is missing, say
                    raise InputError(outcome.message)
                self._fail([trial], outcome)
                return False
            self._succeed([trial])
        self.run.running.clear(trial.id)
        return True

    def _choose(self, graph: Graph, costs: list[Costs], wanted: Sequence[Trial]) -> dict[str, Plan]:
        """The plan of every trial whose method has gains; where estimating fails, its trials do."""
        own: dict[str, list[Trial]] = {method.title: [] for method in self.study.methods}
        for trial in wanted:
            if trial.role == "choice":
                own[self.study.title_of(trial)].append(trial)
        jobs: dict[str, tuple[Estimation, list[Method]]] = {}  # methods that differ only in their selector share one
        for method in self.study.methods:
            if any(not self._skipped(trial) for trial in own[method.title]):
                job = estimation(self.study, graph.id, method)
                jobs.setdefault(job.id, (job, []))[1].append(method)
        if jobs:
            titles = ", ".join(method.title for _, methods in jobs.values() for method in methods)
            self.tally.tell(f"estimating gains: {titles}")
        work = Estimate(self.setting, self.engine, self.tally.now_and_then())
        plans: dict[str, Plan] = {}
        for job, outcome in run_jobs(work, [job for job, _ in jobs.values()], shelf=self.run.estimates):
            for method in jobs[job.id][1]:
                if isinstance(outcome, Failure):
                    self._fail(own[method.title], outcome)
                    continue
                self.run.keep_gains(method.title, outcome)
                self.tally.tell(f"{method.title}: gains estimated, {outcome.seconds:.1f} s of work")
                plans |= _plans(graph, outcome, costs, method, own[method.title])
        return plans

    def _train(self, high: Trial, wanted: Sequence[Trial], plans: Mapping[str, Plan]) -> int:
        """Train each network once, whichever trials it serves."""
        served = _trainings(self.study, high, wanted, plans)
        sharing = {name: tuple(trial.id for trial in trials) for name, (_, trials) in served.items()}
        known = _known_trainings(self.run, self.agenda)
        self.run.keep(self.agenda.model_copy(update={"trainings": known | sharing}))
        asked = self._to_train(served, plans)
        before = self.run.trained.ids()
        count = 0
        for job, outcome in run_jobs(Train(self.setting), asked, shelf=self.run.trained, engine=self.engine):
            trials = served[job.id][1]
            if isinstance(outcome, Failure):
                self._fail(trials, outcome)
                continue
            count += job.id not in before
            for trial in trials:
                self.run.trials.keep(trial.id, _result(trial, plans[trial.id], outcome))
            self._succeed(trials)
            self.run.running.clear(job.id)
        return count

    def _to_train(
        self, served: Mapping[str, tuple[Training, list[Trial]]], plans: Mapping[str, Plan]
    ) -> list[Training]:
        """The trainings of which some trial has no result by its plan yet, and not all have failed before."""
        planned = {result.trial.id: result.plan for result in self.run.results}
        asked = []
        for job, trials in served.values():
            is_open = any(planned.get(trial.id) != plans[trial.id].id for trial in trials)
            if is_open and not all(self._skipped(trial) for trial in trials):
                asked.append(job)
        return asked

    def _skipped(self, trial: Trial) -> bool:
        """Whether a trial failed before and is not to be tried again."""
        return not self.retry and self.run.failed.has(trial.id)

    def _fail(self, trials: Iterable[Trial], failure: Failure) -> None:
        if failure.fault == "store":  # not the trial's: whatever follows would fail as well
            raise WriteError(failure.message)
        for trial in trials:
            failed = FailedTrial(trial=trial, fault=failure.fault, error=failure.error, traceback=failure.traceback)
            self.run.failed.keep(trial.id, failed)
            self.tally.tell(f"{self.study.words(trial)} failed: {failure.error}")

    def _succeed(self, trials: Iterable[Trial]) -> None:
        for trial in trials:
            self.run.failed.remove(trial.id)
            self.tally.succeed(trial)


def _known_trainings(run: RunFolder, listed: Agenda) -> dict[str, tuple[str, ...]]:
    """Which trials share a training, as far as an earlier sweep of the same study wrote it down."""
    known = run.agenda
    return known.trainings if known is not None and known.study == listed.study else {}


def _references(graph: Graph, wanted: Sequence[Trial]) -> dict[str, Plan]:
    """The plans of the trials that have all layers at one precision."""
    return {trial.id: Plan.uniform(graph, trial.precision) for trial in wanted if trial.precision is not None}


def _plans(
    graph: Graph, gains: Gains, costs: list[Costs], method: Method, trials: Sequence[Trial]
) -> dict[str, Plan]:  # fmt: skip
    """The plans of a method's trials, selected once per budget."""
    budgets = dict.fromkeys(trial.budgets for trial in trials)
    chosen = {budget: select(graph, gains, costs, budget=budget, selector=method.selector) for budget in budgets}
    return {trial.id: chosen[trial.budgets] for trial in trials}


def _trainings(
    study: Study, high: Trial, wanted: Sequence[Trial], plans: Mapping[str, Plan]
) -> dict[str, tuple[Training, list[Trial]]]:
    """Id → the training and the trials that it serves; the first seed of all comes before the second."""
    served: dict[str, tuple[Training, list[Trial]]] = {}
    turn = {seed: place for place, seed in enumerate(study.seeds)}
    for trial in sorted(wanted, key=lambda trial: turn[trial.seed]):
        assert trial.recipe is not None, "only starts may go untrained"
        precisions = plans[trial.id].precisions
        job = Training(task=trial.task, start=high.id, precisions=precisions, recipe=trial.recipe, seed=trial.seed)
        served.setdefault(job.id, (job, []))[1].append(trial)
    return served


def _result(trial: Trial, plan: Plan, trained: Trained) -> Result:
    return Result(
        trial=trial,
        plan=plan.id,
        training=trained.training,
        score=trained.score,
        metric=trained.metric,
        higher_is_better=trained.higher_is_better,
        log=trained.log,
        seconds=trained.seconds,
        device=trained.device,
        versions=trained.versions,
    )
