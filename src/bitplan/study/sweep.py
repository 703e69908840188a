"""sweep: run every trial of a study that is not done yet, and keep whatever happens as files."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from bitplan.core.errors import UnknownName, WriteError
from bitplan.core.progress import Progress
from bitplan.core.record import Record
from bitplan.core.records import Costs, Gains, Graph, Plan
from bitplan.core.runs import RunFolder, file_name
from bitplan.core.store import save
from bitplan.core.studies import Agenda, Estimation, FailedTrial, Method, Study, Trained, Training
from bitplan.core.trials import Result, Trial
from bitplan.engines.base import Engine, Failure, make_engine
from bitplan.engines.jobs import run_jobs
from bitplan.gains.base import estimate
from bitplan.plan.base import select
from bitplan.study.jobs import Estimate, Train
from bitplan.study.setting import Setting, uniform
from bitplan.study.starts import MakeStart, is_made
from bitplan.study.trials import agenda, estimation, starts

_PAUSE = 5.0
_STORE_FAILED = "WriteError: cannot write"


@dataclass(frozen=True)
class Summary:
    """How a sweep ended: how many trials are done and failed, and how many networks it trained just now."""

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
) -> Summary:
    """Run what is not in the folder yet; a trial that fails is written down and stops no other.

    `only` names methods by their titles. Several processes may sweep the same folder: each network is trained once.
    """
    begin = time.perf_counter()
    listed = agenda(study)
    titles = list(dict.fromkeys(study.title_of(trial) for trial in listed.trials))
    for title in only or ():
        if title not in titles:
            raise UnknownName("method of this study", title, titles)
    sweeper = _Sweeper(
        Setting(study, Path(run_folder)),
        listed,
        engine or make_engine(study.engine, study.engine_options),
        progress or (lambda *_: None),
        retry_failed,
    )
    trained = sweeper.run(frozenset(only) if only else None)
    run = RunFolder(Path(run_folder))
    return Summary(len(listed.trials), len(run.results), tuple(run.failures), trained, time.perf_counter() - begin)


def prepare(setting: Setting, listed: Agenda) -> tuple[Graph, list[Costs]]:
    """Trace, price and see that every budget can be met; then write down what the run is about."""
    graph = setting.graph()
    costs = setting.costs(graph)
    plain = estimate("uniform", None, graph, choices=setting.study.choices)
    for budget in setting.study.budgets:
        select(graph, plain, costs, budget=budget)
    known = RunFolder(setting.folder).agenda
    if known is not None and known.study == listed.study:
        listed = listed.model_copy(update={"trainings": known.trainings})
    records = {"study": setting.study, "graph": graph, "costs": costs[0], "agenda": listed}
    for name, record in records.items():
        _keep(record, setting.folder / f"{name}.json")
    return graph, costs


@dataclass(frozen=True)
class _Sweeper:
    """One sweep: what it works on and with."""

    setting: Setting
    agenda: Agenda
    engine: Engine
    progress: Progress
    retry: bool

    def run(self, only: frozenset[str] | None) -> int:
        """Starts, gains, plans, then the networks; gives how many were trained now."""
        graph, costs = prepare(self.setting, self.agenda)
        found = starts(self.setting.study)
        self._tell("tracing and pricing done")
        for trial in (found.floating, found.high):
            if trial is not None and not self._start(trial):
                return 0
        own = {trial.id for trial in (found.floating, found.high) if trial is not None}
        wanted = [
            trial
            for trial in self.agenda.trials
            if trial.id not in own and (only is None or self.setting.study.title_of(trial) in only)
        ]
        plans = self._references(graph, wanted) | self._choose(graph, costs, wanted)
        for plan in {plan.id: plan for plan in plans.values()}.values():
            _keep(plan, self.folder / "plans" / f"{plan.id}.json")
        return self._train(found.high, [trial for trial in wanted if trial.id in plans], plans)

    @property
    def folder(self) -> Path:
        return self.setting.folder

    def _start(self, trial: Trial) -> bool:
        """Make a start unless it is there; whether there is one now."""
        if is_made(self.folder, trial):
            return True
        if self._skipped(trial):
            return False
        self._tell(f"{trial.method}: making the network that others start from")
        work = run_jobs(MakeStart(self.setting), [trial], Result, folder=self.folder / "trials", engine=self.engine)
        for _, outcome in work:
            if isinstance(outcome, Failure):
                self._fail([trial], outcome)
                return False
            self._succeed(trial)
        shutil.rmtree(self.setting.running(trial.id), ignore_errors=True)
        return True

    def _references(self, graph: Graph, wanted: Sequence[Trial]) -> dict[str, Plan]:
        return {trial.id: uniform(graph, trial) for trial in wanted if not trial.budgets}

    def _choose(self, graph: Graph, costs: list[Costs], wanted: Sequence[Trial]) -> dict[str, Plan]:
        """The plan of every trial whose method has gains; where estimating fails, its trials do."""
        own = {
            method.title: [one for one in wanted if one.budgets and self.setting.study.title_of(one) == method.title]
            for method in self.setting.study.methods
        }
        jobs: dict[str, tuple[Estimation, list[Method]]] = {}
        for method in self.setting.study.methods:
            if any(not self._skipped(trial) for trial in own[method.title]):
                job = estimation(self.setting.study, graph.id, method)
                jobs.setdefault(job.id, (job, []))[1].append(method)
        if jobs:
            self._tell(f"estimating gains: {', '.join(one.title for _, methods in jobs.values() for one in methods)}")
        plans: dict[str, Plan] = {}
        work, asked = Estimate(self.setting, self.engine, self._now_and_then()), [job for job, _ in jobs.values()]
        for job, outcome in run_jobs(work, asked, Gains, folder=self.folder / "estimates"):
            for method in jobs[job.id][1]:
                if isinstance(outcome, Failure):
                    self._fail(own[method.title], outcome)
                    continue
                _keep(outcome, self.folder / "gains" / f"{file_name(method.title)}.json")
                self._tell(f"{method.title}: gains estimated, {outcome.seconds:.1f} s of work")
                plans |= _plans(graph, outcome, costs, method, own[method.title])
        return plans

    def _train(self, high: Trial, wanted: Sequence[Trial], plans: dict[str, Plan]) -> int:
        """Train each network once, whichever trials it serves."""
        served: dict[str, tuple[Training, list[Trial]]] = {}
        seeds = {seed: place for place, seed in enumerate(self.setting.study.seeds)}
        for trial in sorted(wanted, key=lambda trial: seeds[trial.seed]):
            assert trial.recipe is not None, "only starts may go untrained"
            precisions = plans[trial.id].precisions
            job = Training(task=trial.task, start=high.id, precisions=precisions, recipe=trial.recipe, seed=trial.seed)
            served.setdefault(job.id, (job, []))[1].append(trial)
        sharing = {one: tuple(trial.id for trial in trials) for one, (_, trials) in served.items()}
        whole = self.agenda.model_copy(update={"trainings": self._known_trainings() | sharing})
        _keep(whole, self.folder / "agenda.json")
        results = {result.trial.id: result.plan for result in RunFolder(self.folder).results}
        asked = [
            job
            for job, trials in served.values()
            if any(results.get(trial.id) != plans[trial.id].id for trial in trials)
            and not all(self._skipped(trial) for trial in trials)
        ]
        there = {job.id for job in asked if (self.folder / "trained" / f"{job.id}.json").is_file()}
        count = 0
        for job, outcome in run_jobs(
            Train(self.setting), asked, Trained, folder=self.folder / "trained", engine=self.engine
        ):
            trials = served[job.id][1]
            if isinstance(outcome, Failure):
                self._fail(trials, outcome)
                continue
            count += job.id not in there
            for trial in trials:
                save(_result(trial, plans[trial.id], outcome), self.folder / "trials" / f"{trial.id}.json")
                self._succeed(trial)
            shutil.rmtree(self.setting.running(job.id), ignore_errors=True)
        return count

    def _known_trainings(self) -> dict[str, tuple[str, ...]]:
        known = RunFolder(self.folder).agenda
        return known.trainings if known is not None and known.study == self.agenda.study else {}

    def _skipped(self, trial: Trial) -> bool:
        """Whether a trial failed before and is not to be tried again."""
        return not self.retry and self._failure(trial).is_file()

    def _failure(self, trial: Trial) -> Path:
        return self.folder / "failures" / f"{trial.id}.json"

    def _fail(self, trials: Sequence[Trial], failure: Failure) -> None:
        if _STORE_FAILED in failure.error:  # the store is at fault, not the trial: whatever follows would fail as well
            raise WriteError(f"cannot write{failure.error.partition(_STORE_FAILED)[2]}")
        for trial in trials:
            save(FailedTrial(trial=trial, error=failure.error, traceback=failure.traceback), self._failure(trial))
            self._tell(f"{self.setting.study.words(trial)} failed: {failure.error}")

    def _succeed(self, trial: Trial) -> None:
        if self._failure(trial).is_file():  # asking a read-only disk to remove nothing would fail
            self._failure(trial).unlink(missing_ok=True)
        self._tell(f"{self.setting.study.words(trial)} done")

    def _now_and_then(self) -> Progress:
        """Tells of parts of a long estimate, every few seconds."""
        last = [time.monotonic()]

        def tell(done: int, total: int, what: str) -> None:
            if time.monotonic() - last[0] > _PAUSE:
                last[0] = time.monotonic()
                self._tell(f"{what} ({done} of {total})")

        return tell

    def _tell(self, text: str) -> None:
        done = sum((self.folder / "trials" / f"{trial.id}.json").is_file() for trial in self.agenda.trials)
        self.progress(done, len(self.agenda.trials), text)


def _plans(
    graph: Graph, gains: Gains, costs: list[Costs], method: Method, trials: Sequence[Trial]
) -> dict[str, Plan]:  # fmt: skip
    budgets = dict.fromkeys(trial.budgets for trial in trials)
    chosen = {one: select(graph, gains, costs, budget=one, selector=method.selector) for one in budgets}
    return {trial.id: chosen[trial.budgets] for trial in trials}


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


def _keep(record: Record, path: Path) -> None:
    """Write a record unless its file says the same already, so that a finished run is only read."""
    text = record.to_json()
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        save(record, path)
