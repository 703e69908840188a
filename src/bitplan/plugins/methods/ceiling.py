"""find_ceiling: the best plan of a study's network within a budget, with the score of trained networks as the judge.

Plans are trained on a part of the training samples and judged by the others; the finalists are then trained as trials
are, with the study's seeds, which no plan was chosen by, and scored on the test split. Every training is one of the
run's, by id, so that it is done once, and a killed search repeats its proposals and finds their scores there.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bitplan.core.ceilings import Ceiling, CeilingSearch, Finalist, FinalScore, TriedPlan
from bitplan.core.errors import Damaged, InputError, WriteError
from bitplan.core.progress import Progress
from bitplan.core.records import Plan
from bitplan.core.studies import Study, Trained, Training
from bitplan.selection.budget_constraint import BudgetConstraint, Picks
from bitplan.store.engines import Engine, Failure, keep_workers
from bitplan.store.jobs import run_jobs
from bitplan.store.run_folder import RunFolder
from bitplan.study.context import RunContext, make_study_engine, remake_missing_starts
from bitplan.study.forecast import forecast
from bitplan.study.scheduling import Train
from bitplan.study.sweep import sweep
from bitplan.study.trials import all_starts, with_controls

# --- find_ceiling: the best plan of a study's network within a budget, with the score of trained networks as the
# judge.

HOLD_OUT = 0.1
"""The share of the training samples that judges, where the study holds none out."""
_LEAST = 2


@dataclass(frozen=True)
class Effort:
    """How many trainings a search takes, how many plans are trained again at its end, and the seed of its lots."""

    trainings: int = 150
    finalists: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trainings < _LEAST or self.finalists < 1:
            raise InputError(
                f"a ceiling takes at least {_LEAST} trainings and 1 finalist, not {self.trainings} and {self.finalists}"
            )

    def in_all(self, study: Study) -> int:
        """The trainings of the search and of the finalists."""
        return self.trainings + min(self.finalists, self.trainings) * len(all_starts(study)) * len(study.seeds)


USUAL = Effort()


def find_ceiling(
    study: Study,
    run_folder: str | Path,
    budget: str,
    *,
    effort: Effort = USUAL,
    engine: Engine | None = None,
    progress: Progress | None = None,
    trust: bool = False,
) -> Ceiling:
    """Sweep what is left of the study, search with so many trainings, then train the finalists; all goes on if killed.

    The search begins with the plans of all methods, and is from the study's first start; finalists are trained from all
    starts. More trainings, later, go on where fewer ended.
    """
    begin = time.perf_counter()
    study = with_controls(study)
    check_budget(study, budget)
    run, tell = RunFolder(Path(run_folder)), progress or (lambda *_: None)
    at_work = engine or make_study_engine(study, trust=trust)
    with keep_workers():
        sweep(study, run.path, engine=at_work, progress=progress, trust=trust)
        quest = _Quest(RunContext(study, run, trust), budget, effort, at_work, tell)
        quest.search()
        return quest.decide(begin)


def check_budget(study: Study, budget: str) -> None:
    """Refuse a budget at which the study's methods have no plans."""
    if budget not in study.budgets:
        raise InputError(
            f"the study {study.name} has no budget {budget}, at which a ceiling would be compared with its methods: "
            f"take one of {', '.join(study.budgets) or 'none, it compares quantizers'}, or add it to the study"
        )


@dataclass(frozen=True)
class Outlook:
    """What is left to do for a ceiling: trials of the sweep, trainings of the search and of finalists, and seconds."""

    trials: int
    searching: int
    deciding: int
    seconds: float


def outlook(
    study: Study, run_folder: str | Path, budgets: Sequence[str], *, effort: Effort = USUAL, trust: bool = False
) -> Outlook:
    """What ceilings at these budgets take at most, in turn, by a few steps of training; the folder is only read."""
    study = with_controls(study)
    told = forecast(study, run_folder, trust=trust)
    run = RunFolder(Path(run_folder))
    alike = [one for one in run.ceilings.read_all().values() if one.search.study == study.id]
    known = {one.search.budget: one for one in alike if one.search.seed == effort.seed}
    searching = deciding = 0
    for budget in budgets:
        check_budget(study, budget)
        found = known.get(budget)
        searching += max(0, effort.trainings - (len(found.judged) if found else 0))
        as_asked = found is not None and found.complete and found.trainings == effort.trainings
        deciding += 0 if as_asked else effort.in_all(study) - effort.trainings
    one = max((line.seconds for line in told.lines if line.trial.role == "choice"), default=0.0)
    left = sum(not line.done for line in told.lines)
    return Outlook(left, searching, deciding, told.seconds + one * (searching + deciding))


@dataclass
class _Quest:
    """One search: what it works on and with, and what it has found."""

    setting: RunContext
    budget: str
    effort: Effort
    engine: Engine
    tell: Progress
    judged: list[TriedPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.study, self.run, self.graph = self.setting.study, self.setting.run, self.setting.graph
        self.starts = [one.high.id for one in all_starts(self.study)]
        self.about = CeilingSearch(
            study=self.study.id,
            graph=self.graph.id,
            start=self.starts[0],
            budget=self.budget,
            seed=self.effort.seed,
            hold_out=self.study.choosing.hold_out or HOLD_OUT,
        )
        aim = self.setting.aim((self.budget,))
        assert aim is not None
        self.aim: BudgetConstraint = aim
        unknowns = len(aim.groups) * (len(aim.choices) - 1)
        self.swaps = Swaps(aim, self.effort.seed, self._given(), min(unknowns, self.effort.trainings // 3))
        self.count, self.total = 0, self.effort.in_all(self.study)
        self.sign = 1 if self.setting.task.higher_is_better else -1

    def search(self) -> None:
        """Propose, train, learn, until the trainings are used up or there is nothing left to propose."""
        self._refuse_fewer()
        proposals, tried = self.swaps.first(), Counter[Picks]()
        while proposals and len(self.judged) < self.effort.trainings:
            asked: dict[str, tuple[Training, Proposal]] = {}
            for picks, by in proposals[: self.effort.trainings - len(self.judged)]:
                job = self._training(picks, self.starts[0], self._fresh(tried[picks]), self.about.hold_out)
                asked[job.id] = job, (picks, by)
                tried[picks] += 1
            done = self._trained([job for job, _ in asked.values()], "searching")
            for name, (job, (picks, by)) in asked.items():
                if name in done:
                    score = done[name].score
                    self.judged.append(TriedPlan(picks=picks, by=by, seed=job.seed, training=name, score=score))
                    self.swaps.learn_([(picks, self.sign * score)])
            self._note()
            proposals = self.swaps.propose()

    def decide(self, begin: float) -> Ceiling:
        """Train those that are expected to be the best, and keep what was found."""
        model, seeds = self.swaps.model, self.study.seeds
        best = sorted(model.plans, key=model.expected, reverse=True)[: self.effort.finalists]
        by = {one.picks: one.by for one in reversed(self.judged)}
        jobs = {
            (picks, start, seed): self._training(picks, start, seed)
            for picks in best for seed in seeds for start in self.starts
        }  # fmt: skip
        done = self._trained(list(jobs.values()), "deciding")
        last: list[Finalist] = []
        for picks in best:
            scores = tuple(
                FinalScore(start=start, seed=seed, training=job.id, score=done[job.id].score)
                for (own, start, seed), job in jobs.items() if own == picks and job.id in done
            )  # fmt: skip
            expected = self.sign * model.expected(picks)
            error = model.error(picks)
            last.append(Finalist(picks=picks, by=by[picks], expected=expected, error=error, scores=scores))
        complete = all(len(one.scores) == len(self.starts) * len(seeds) for one in last)
        return self._keep(finalists=tuple(last), complete=complete, seconds=time.perf_counter() - begin)

    def _given(self) -> list[Proposal]:
        """The plans of all methods from the start that the search is from."""
        plans, own = self.run.plans, list[Proposal]()
        for result in self.run.results:
            trial = result.trial
            if trial.role == "choice" and trial.start == self.starts[0] and trial.budgets == (self.budget,):
                own.append((self._picks(plans[result.plan]), self.study.title_of(trial)))
        return list(dict.fromkeys(own))

    def _picks(self, plan: Plan) -> Picks:
        return tuple(self.aim.choices.index(plan.precisions[name]) for name in self.aim.groups)

    def _fresh(self, turn: int) -> int:
        """The seed of a plan's training of that turn: the same for all plans, and none of the study's."""
        return max(self.study.seeds) + 1 + turn

    def _training(self, picks: Picks, start: str, seed: int, hold_out: float = 0.0) -> Training:
        """As a trial with this plan would be trained; where samples are held out, without them."""
        chosen = dict(zip(self.aim.groups, picks, strict=True))
        precisions = dict(self.graph.fixed_beside(self.aim.choices))
        for group in self.graph.selectable:
            precisions |= dict.fromkeys((layer.name for layer in group.layers), self.aim.choices[chosen[group.name]])
        return Training(
            task=self.study.task,
            start=start,
            precisions={layer.name: precisions[layer.name] for layer in self.graph.layers},
            recipe=self.study.recipe,
            seed=seed,
            hold_out=hold_out,
        )

    def _trained(self, jobs: Sequence[Training], what: str) -> dict[str, Trained]:
        """What trainings gave, by id; one that fails is told, and is not among them."""
        done: dict[str, Trained] = {}
        shelf = self.run.trained
        there, _ = shelf.read_sound(job.id for job in jobs)
        lacking = {job.start for job in jobs if job.id not in there}
        remake_missing_starts(self.setting, lacking, self.engine, partial(self.tell, self.count, self.total))
        for job, outcome in run_jobs(Train(self.setting), list(jobs), shelf=shelf, engine=self.engine):
            if isinstance(outcome, Failure):
                if outcome.fault in ("store", "damage"):
                    raise (WriteError if outcome.fault == "store" else Damaged)(outcome.message)
                self.tell(self.count, self.total, f"{what}: a training failed, {outcome.error}")
                continue
            done[job.id] = outcome
            self.run.running.clear(job.id)
            self.count += 1
            self.tell(self.count, self.total, f"{what}: {outcome.score:.2f}")
        if jobs and not done:
            raise InputError(f"every training of this round failed ({what} at {self.budget}): look at the recipe")
        return done

    def _refuse_fewer(self) -> None:
        """A shorter search would take the place of a longer one, and its trainings would be called waste."""
        taken = len(self._before.judged) if self._before is not None else 0
        if taken > self.effort.trainings:
            raise InputError(
                f"the run has a search of {taken} trainings at {self.budget}, whose place one of "
                f"{self.effort.trainings} would take: ask for {taken} or more, or for a search with another seed"
            )

    @property
    def _before(self) -> Ceiling | None:
        """What was written down of this search."""
        return self.run.ceilings.read_sound([self.about.id])[0].get(self.about.id)

    def _note(self) -> None:
        """Write down how far it is, unless a search that was further did: its trainings would be called waste.

        Finalists of a search that took fewer trainings stay there until others are decided on.
        """
        before = self._before
        if before is None or len(before.judged) < len(self.judged):
            self._keep(finalists=() if before is None else before.finalists)

    def _keep(self, **more: Any) -> Ceiling:
        """Write down what was found."""
        found = Ceiling(
            search=self.about,
            groups=self.aim.groups,
            choices=self.aim.choices,
            trainings=self.effort.trainings,
            metric=self.setting.task.metric,
            higher_is_better=self.sign > 0,
            judged=tuple(self.judged),
            **more,
        )
        self.run.ceilings.keep(self.about.id, found)
        return found


# --- Which plans to train next, so that the best one is among them: by an additive model and its doubts, and by
# swaps.

By = Literal["method", "random", "model", "draw", "swap", "again"]
"""Why a plan is tried: a method chose it, at random, the model's best, the best of a draw, near the best, once more."""
Proposal = tuple[Picks, str]
_LOTS = 20  # draws for a proposal that is not among those of its round


@dataclass
class Swaps:
    """Proposals within an aim. All depend on the seed and on the scores so far, so that a killed search repeats them.

    `given` are plans to begin with, with who chose them. Then `randoms` plans that use the budget up, so that every
    group is seen at several choices; then rounds of four: the best plan by the model, that is by an additive
    regression; the best plan by values drawn from what the model knows (Thompson's way to try what may be best); the
    best of the plans that are a swap away from the best so far; and once more the one that may be best of those tried.
    """

    aim: BudgetConstraint
    seed: int
    given: Sequence[Proposal] = ()
    randoms: int = 0
    scored: list[tuple[Picks, float]] = field(default_factory=list)

    @property
    def model(self) -> AdditiveModel:
        """What the scores so far say."""
        return AdditiveModel.fit(len(self.aim.choices), self.scored)

    def learn_(self, scored: Sequence[tuple[Picks, float]]) -> None:
        """Take in what trainings reached; more is better."""
        self.scored += scored

    def first(self) -> list[Proposal]:
        """What is tried before anything is known, each plan once."""
        found: dict[Picks, str] = {}
        for picks, who in self.given:
            found[picks] = f"{found[picks]}, {who}" if picks in found else who
        chance = np.random.default_rng([self.seed, len(self.aim.groups)])
        for _ in range(self.randoms):
            order = [int(place) for place in chance.permutation(len(self.aim.groups))]
            low = self.aim.lowered(self.aim.top, order)
            found.setdefault(self.aim.raised(low, order[::-1]), "random")
        return list(found.items())

    def propose(self) -> list[Proposal]:
        """A round, each plan once; it may have fewer than four where there are few plans."""
        model, chance = self.model, np.random.default_rng([self.seed, len(self.scored)])
        tried, found = set(model.plans), dict[Picks, str]()
        best = self.aim.best(model.gains())
        if best not in tried:
            found[best] = "model"

        def add(by: By, make: Callable[[Floats], Picks | None]) -> None:
            for _ in range(_LOTS):
                picks = make(model.draw(chance))
                if picks is not None and picks not in found:
                    found[picks] = "again" if picks in tried else by
                    return

        add("draw", lambda values: self.aim.best(model.gains(values)))
        add("swap", lambda values: self._swapped(model.best_tried(), model.gains(values), tried | found.keys()))
        add("again", model.best_tried)
        return list(found.items())

    def _swapped(self, picks: Picks, gains: Floats, known: set[Picks]) -> Picks | None:
        """The best plan that is not known and differs from this one in one group, or in two, by a choice each."""
        groups, choices = gains.shape
        moves = [
            (group, picks[group] + step) for group in range(groups) for step in (-1, 1)
            if 0 <= picks[group] + step < choices
        ]  # fmt: skip
        worth = [float(gains[group, to] - gains[group, picks[group]]) for group, to in moves]
        near: list[tuple[float, Picks]] = []
        for first, (group, to) in enumerate(moves):
            for second in range(first, len(moves)):
                other, where = moves[second]
                if second != first and other == group:
                    continue
                changed = list(picks)
                changed[group], changed[other] = to, where
                near.append((worth[first] + (worth[second] if second != first else 0.0), tuple(changed)))
        near.sort(key=lambda one: -one[0])
        return next((plan for _, plan in near if plan not in known and self.aim.fits(plan)), None)


# --- An additive model of plans: what every step of a group adds to the score, learned from scores of whole plans.

Floats = NDArray[np.float64]
_STEPS = tuple(10 ** (power / 2) for power in range(-4, 9))  # variances of a step, in those of the noise
_OWN = (0.03, 0.3, 3.0)  # … and of what is a plan's own
_CONSTANT = 1e-18  # of the squared scores: below, all are the same


@dataclass(frozen=True, eq=False)
class AdditiveModel:
    """What is known of steps, (G, C − 1), then of what is own to each of `plans`: means and covariance, (F + P)."""

    shape: tuple[int, int]
    plans: tuple[Picks, ...]
    mean: float
    values: Floats
    covariance: Floats
    of_mean: float
    """The variance of the mean."""
    with_mean: Floats
    """The covariance of the unknowns with the mean, (F + P)."""

    @classmethod
    def fit(cls, choices: int, scored: Sequence[tuple[Picks, float]]) -> AdditiveModel:
        """Learn from trainings of plans, each with its score; a plan may be among them several times."""
        plans = tuple(dict.fromkeys(picks for picks, _ in scored))
        groups = len(plans[0])
        y = np.array([score for _, score in scored])  # (N)
        steps = np.array([_steps(picks, choices) for picks, _ in scored])  # (N, F)
        own = np.array([[float(picks == plan) for plan in plans] for picks, _ in scored])  # (N, P)
        features = np.hstack([steps, own])
        parts = steps.shape[1], len(plans)
        fits = [(_solved(y, features, prior), prior) for prior in _priors(*parts)]
        best, prior = max(fits, key=lambda fit: fit[0].likelihood)
        gain = prior[:, None] * features.T  # (F + P, N)
        covariance = best.noise * (np.diag(prior) - gain @ best.precision @ gain.T)
        of_mean = best.noise / best.of_ones.sum()
        with_mean = -of_mean * (gain @ best.of_ones)
        return cls((groups, choices - 1), plans, best.mean, gain @ best.residual, covariance, of_mean, with_mean)

    def expected(self, picks: Picks) -> float:
        """The score that a plan is expected to reach, what is known to be its own included."""
        return self.mean + float(self._features(picks) @ self.values)

    def error(self, picks: Picks) -> float:
        """The standard error of that, as far as the plan was tried; the mean of all is not known either."""
        features = self._features(picks)
        spread = features @ self.covariance @ features + 2 * (features @ self.with_mean) + self.of_mean
        return math.sqrt(max(0.0, float(spread)))

    def gains(self, values: Floats | None = None) -> Floats:
        """What every choice adds to the lowest, (G, C): as expected, or as a draw says."""
        chosen = self.values if values is None else values
        steps = chosen[: self.shape[0] * self.shape[1]].reshape(self.shape)
        return np.hstack([np.zeros((self.shape[0], 1)), np.cumsum(steps, axis=1)])

    def draw(self, chance: np.random.Generator) -> Floats:
        """Values that may be the true ones, by what is known."""
        return chance.multivariate_normal(self.values, self.covariance, method="eigh", check_valid="ignore")

    def best_tried(self, values: Floats | None = None) -> Picks:
        """The plan that is best of those tried: as expected, or as a draw says; of equals the first."""
        chosen = self.values if values is None else values
        totals = [float(self._features(plan) @ chosen) for plan in self.plans]
        return self.plans[int(np.argmax(totals))]

    def _features(self, picks: Picks) -> Floats:
        own = [float(picks == plan) for plan in self.plans]
        return np.concatenate([_steps(picks, self.shape[1] + 1), own])


def _steps(picks: Picks, choices: int) -> Floats:
    """1 for every step from a choice to the next that a plan takes, (G · (C − 1))."""
    return (np.array(picks)[:, None] > np.arange(choices - 1)[None, :]).astype(np.float64).ravel()


def _priors(steps: int, plans: int) -> list[Floats]:
    """Every pair of variances on the grid, for each unknown."""
    return [np.repeat([step, own], [steps, plans]) for step, own in product(_STEPS, _OWN)]


@dataclass(frozen=True, eq=False)
class _Solved:
    """The mean, the variance of the noise, what scores tell beyond the mean, (N, N), and what is left of them, (N).

    `of_ones` is by how much each score counts for the mean, (N).
    """

    mean: float
    noise: float
    precision: Floats
    residual: Floats
    of_ones: Floats
    likelihood: float


def _solved(y: Floats, features: Floats, prior: Floats) -> _Solved:
    """The mean and the noise that fit best, with the restricted log-likelihood of all, but for a constant."""
    spread = np.eye(len(y)) + (features * prior) @ features.T  # (N, N)
    inverse = np.linalg.inv(spread)
    of_ones = inverse.sum(axis=1)  # (N)
    total = float(of_ones.sum())
    mean = float(of_ones @ y) / total
    residual = inverse @ (y - mean)
    smallest = _CONSTANT * float(1 + y @ y / len(y))
    noise = max(smallest, float((y - mean) @ residual) / max(1, len(y) - 1))
    size = float(np.linalg.slogdet(spread)[1])
    likelihood = -0.5 * ((len(y) - 1) * math.log(noise) + size + math.log(total))
    return _Solved(mean, noise, inverse - np.outer(of_ones, of_ones) / total, residual, of_ones, likelihood)
