"""ALPS for less: screen all groups by how far answers drift, then fine-tune only where the selection is in doubt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from bitplan.core.budget import Budget
from bitplan.core.defaults import COST
from bitplan.core.errors import InputError, UnknownName
from bitplan.core.jobs import Job, Outcome
from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.costs.base import price_for
from bitplan.gains.alps import Goodness, errors_over_seeds, values_of
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.gains.drift import Drift
from bitplan.gains.drop import Drop
from bitplan.gains.finetuning import Trainings, Tuner, check_length, counts_of, recipe_for, shorten
from bitplan.gains.jobs import seconds_of
from bitplan.gains.lowering import rows_by_layer
from bitplan.selection.base import spent_by
from bitplan.selection.budget_constraint import BudgetConstraint
from bitplan.selection.exact import exact
from bitplan.selection.problem import Problem, to_integers
from bitplan.tune.length import steps_of

# --- How sure a selection is of each group: what it chooses within every budget, and how far the next best is.

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Weighed:
    """What is chosen, (K, G) for K budgets and G groups, and how sure that is of each group.

    `margins` (G) is the number of standard errors by which the best selection beats the best one with another choice
    for that group, at the budget where that is least; infinite where a budget leaves no other choice.
    """

    picks: NDArray[np.int64]
    margins: Floats

    @property
    def moving(self) -> NDArray[np.bool_]:
        """(G): which groups are chosen differently by some budgets."""
        moves: NDArray[np.bool_] = (self.picks != self.picks[:1]).any(axis=0)
        return moves


@dataclass(frozen=True)
class Scales:
    """What will be asked for, one at a time: each a budget, or several that must hold at once."""

    aims: tuple[BudgetConstraint, ...]

    @classmethod
    def of(cls, graph: Graph, choices: tuple[Precision, ...], budgets: Sequence[Budget], cost: str) -> Scales:
        """Price what the budgets name, and refuse those that cannot be met."""
        priced = price_for(budgets, [cost], graph, choices)
        return cls(tuple(BudgetConstraint.of(graph, choices, priced, [budget]) for budget in budgets))

    def weigh(self, values: Floats, errors: Floats) -> Weighed:
        """Choose by gains (G, C) with standard errors (G, C)."""
        scaled = to_integers([tuple(row) for row in values.tolist()])
        problems = [
            Problem(aim.groups, aim.choices, scaled.values, aim.costs, aim.capacities, scaled.unit, scaled.rounding)
            for aim in self.aims
        ]
        found = [_weigh(problem, errors) for problem in problems]
        return Weighed(np.array([picks for picks, _ in found]), np.min([margins for _, margins in found], axis=0))


def _weigh(problem: Problem, errors: Floats) -> tuple[list[int], list[float]]:
    best = exact(problem).picks
    margins = []
    for group in range(len(problem.groups)):
        others = [
            _standard_errors(problem, errors, best, picks)
            for choice in range(len(problem.choices))
            if choice != best[group] and (picks := _forced(problem, group, choice)) is not None
        ]
        margins.append(min(others, default=math.inf))
    return list(best), margins


def _forced(problem: Problem, group: int, choice: int) -> tuple[int, ...] | None:
    """The best selection with one group at a given choice, or None where the budget does not allow it."""
    rest = [other for other in range(len(problem.groups)) if other != group]
    left = problem.capacities - problem.costs[:, group, choice]
    if not rest:
        return (choice,) if (left >= 0).all() else None
    if (problem.costs[:, rest].min(axis=2).sum(axis=1) > left).any():
        return None
    smaller = replace(
        problem,
        groups=tuple(problem.groups[other] for other in rest),
        values=problem.values[rest],
        costs=problem.costs[:, rest],
        capacities=left,
    )
    picks = list(exact(smaller).picks)
    picks.insert(group, choice)
    assert all(spent_by(problem, picks) <= problem.capacities), "the rest was chosen within what is left"
    return tuple(picks)


def _standard_errors(problem: Problem, errors: Floats, best: Sequence[int], other: Sequence[int]) -> float:
    """By how many standard errors of their difference the best selection beats another one."""
    every = np.arange(len(best))
    changed = np.array(best) != np.array(other)
    lost = int((problem.values[every, list(best)] - problem.values[every, list(other)]).sum()) * problem.unit
    spread = np.hypot(errors[every, list(best)], errors[every, list(other)])[changed]
    error = float(np.sqrt((spread**2).sum()))
    return lost / error if error else math.inf if lost else 0.0


# --- ALPS for less: screen all groups by how far answers drift, then fine-tune only where the selection is in doubt.

_SCREENS: dict[str, type[Drift] | type[Drop]] = {"drift": Drift, "drop": Drop}
_FEWEST = 3  # groups in a first round: two ends of the screen, and one in doubt
_LEAST = 4  # groups that are raced in any case, to see how far the screen can be trusted


@dataclass(frozen=True)
class AlpsRacing(Gain):
    """ALPS by loss, with fine-tuning only where a selection within one of `budgets` depends on it.

    Without that option it is the budget of the plan. All groups are screened on `samples` by `drift`, or by `drop`.
    Those that some budgets choose differently, or whose choice is less than `margin` standard errors from another (the
    nearest four in any case), are fine-tuned for steps/2^(rounds − 1) steps; as this tells how far the screen can be
    trusted, others may join. The share `keep` that is nearest to another choice, as far as it is still in doubt, goes
    on for twice the steps, up to `steps`; 1 keeps all that is in doubt. `spend`, a share of what ALPS takes with an
    epoch per group, is divided evenly among rounds (successive halving): each races the nearest to another choice, as
    many as its part allows. Losses of groups that stay behind are carried over to the longer training by a line
    (`LossTable.carried`), so that all gains are on the scale of the last one. They are meant for these budgets, of
    `cost` unless they name another. `lr_factor` is that of `alps`; more than one of `seeds` gives better errors.
    """

    about: ClassVar[About] = About(
        True, True, True, "N·(1 + G·(C − 1)), and up to spend·3·T·G·(C − 1)", "bitplan, after ALPS"
    )

    budgets: str | float | Sequence[str | float] = ()
    cost: str = COST
    steps: int = 80
    rounds: int = 3
    lr_factor: float = 0.25
    margin: float = 2.0
    keep: float = 0.5
    samples: int = 512
    batch_size: int = 64
    seeds: int = 1
    screen: Literal["drift", "drop"] = "drift"
    spend: float | None = None

    def __post_init__(self) -> None:
        check_length("alps_racing", None, self.steps, self.lr_factor)
        self._read_budgets()  # refuses what is none
        if self.rounds < 1 or self.steps < 2 ** (self.rounds - 1):
            raise InputError(
                f"alps_racing: {self.rounds} rounds that double up to {self.steps} steps are not possible: "
                "at least one round, and at least one step in the first"
            )
        if self.seeds < 1 or not 0 <= self.margin < math.inf or not 0 < self.keep <= 1:
            raise InputError(
                f"alps_racing needs at least one seed, a margin of 0 or more and a share to keep of up to 1, not "
                f"{self.seeds}, {self.margin} and {self.keep}"
            )
        if self.screen not in _SCREENS:
            raise UnknownName("screen of alps_racing", self.screen, _SCREENS)
        if self.spend is not None and not 0 < self.spend < math.inf:
            raise InputError(f"alps_racing: spend is a share of what ALPS takes, above 0, not {self.spend}")
        _SCREENS[self.screen](samples=self.samples, batch_size=self.batch_size)

    def _read_budgets(self) -> list[Budget]:
        """As Python gives them, or as the command line writes them: with commas."""
        if isinstance(self.budgets, str):
            parts: Sequence[str | float] = self.budgets.split(",")
        else:
            parts = self.budgets if isinstance(self.budgets, Sequence) else [self.budgets]
        return [Budget.parse(part) for part in parts if part != ""]

    def _scales(self, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Scales:
        """What will be asked for: the option's budgets, or else what the context aims at."""
        budgets = self._read_budgets()
        if budgets:
            return Scales.of(graph, choices, budgets, self.cost)
        if context.aim is None:
            raise InputError(
                "alps_racing fine-tunes what the budgets hang on: say which you will ask for, --budget 70% or "
                "--gain alps_racing:budgets=60%,70% (in Python: estimate(…, budget='70%'), or budgets=…)"
            )
        return Scales((context.aim,))

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """Screen, race, and put all on one scale."""
        scales = self._scales(graph, choices, context)
        tuner = self._tuner(model, graph, choices, context)
        names = [group.name for group in graph.selectable]
        steps_of_alps = _steps_of_alps(tuner, len(choices))
        race = _Race(self, tuner, choices, scales, self._most(steps_of_alps, len(names), len(choices)))
        screened = _SCREENS[self.screen](self.samples, self.batch_size).measure(model, graph, choices, context)
        values, errors = race.run(make_loss_table(screened.good)).gains()
        jobs, outcomes = zip(*race.trained.values(), strict=True)
        counts = {
            "screened_samples": screened.samples,
            "raced_groups": len({job.groups for job in jobs}),
            "groups": len(names),
            "steps_of_alps": steps_of_alps,
        }
        return LayerGains(
            values=rows_by_layer(graph, dict(zip(names, values.tolist(), strict=True))),
            errors=rows_by_layer(graph, dict(zip(names, errors.tolist(), strict=True))),
            counts=counts_of(outcomes, tuner.work.task) | counts,
            work=screened.seconds + seconds_of(outcomes),
            notes=()
            if self._read_budgets()
            else (f"gains: alps_racing raced for {', '.join(scales.aims[0].budgets)}",),
        )

    def trainings(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Trainings:
        """Return the most trainings that there may be: all groups raced, then the share to keep of them each round."""
        self._scales(graph, choices, context)
        tuner = self._tuner(model, graph, choices, context)
        groups = len(graph.selectable)
        allowed = self._most(_steps_of_alps(tuner, len(choices)), groups, len(choices))
        left = groups
        jobs: list[Job] = []
        for steps, most in zip(self.lengths, allowed, strict=True):
            left = min(left, most)
            raced = np.arange(groups) < left  # whichever they are
            jobs += _jobs(tuner, choices, raced, steps, self.seeds)
            left = math.ceil(self.keep * left)
        return Trainings(tuner, jobs)

    def _most(self, steps_of_alps: int, groups: int, choices: int) -> list[int]:
        """How many groups each round may race, of all and by what may be spent on it."""
        if self.spend is None:
            return [groups] * self.rounds
        most: list[int] = []
        for steps in self.lengths:
            for_one_group = steps * (choices - 1) * self.seeds
            most.append(int(self.spend * steps_of_alps / self.rounds / for_one_group))
        if most[0] < _FEWEST:
            raise InputError(
                f"alps_racing: spend={self.spend:g} of ALPS's {steps_of_alps:,} steps is too little to race {_FEWEST} "
                f"groups for {self.lengths[0]} steps: spend more, or take fewer steps"
            )
        return [min(groups, count) for count in most]

    @property
    def lengths(self) -> list[int]:
        """The steps of each round."""
        return [self.steps >> back for back in reversed(range(self.rounds))]

    def _tuner(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Tuner:
        recipe = recipe_for("alps_racing", context, epochs=None, steps=self.steps, lr_factor=self.lr_factor)
        return Tuner.of("alps_racing", model, graph, choices, context, recipe)


@dataclass(frozen=True)
class _Race:
    """The rounds, and what was trained in them."""

    options: AlpsRacing
    tuner: Tuner
    choices: tuple[Precision, ...]
    scales: Scales
    most: Sequence[int]
    trained: dict[str, tuple[Job, Outcome]] = field(default_factory=dict)

    def run(self, screen: LossTable) -> LossTable:
        """From the losses of the screen to those on the scale of the last training that was needed."""
        first, *later = self.options.lengths
        weighed = self.scales.weigh(*screen.gains())
        raced = self._starters(weighed, screen.ends)
        table, raced = self._joined(screen, weighed, raced, first)
        for steps, allowed in zip(later, self.most[1:], strict=True):
            margins = self.scales.weigh(*table.gains()).margins
            margins = np.where(raced, margins, np.inf)  # who stayed behind does not come back
            most = min(allowed, math.ceil(self.options.keep * int(raced.sum())))
            raced = _nearest(margins, most) & (margins <= self.options.margin)
            if not raced.any():
                break
            table = table.carried(self._measured(raced, steps), raced, alike=True)
        return table

    def _starters(self, weighed: Weighed, ends: Chosen) -> Chosen:
        """Who is in doubt by the screen, the nearest to another choice first, and its ends in any case."""
        in_doubt = weighed.moving | (weighed.margins <= self.options.margin) | _nearest(weighed.margins, _LEAST)
        room = max(0, self.most[0] - int(ends.sum()))
        inner = np.where(in_doubt & ~ends, weighed.margins, np.inf)
        starters: Chosen = ends | (in_doubt & _nearest(inner, room))
        return starters

    def _joined(self, screen: LossTable, before: Weighed, raced: Chosen, steps: int) -> tuple[LossTable, Chosen]:
        """The first round: who is in doubt, or chosen otherwise, once it shows how far the screen is right, joins."""
        while True:
            table = screen.carried(self._measured(raced, steps), raced, alike=False)
            now = self.scales.weigh(*table.gains())
            in_doubt = now.margins <= self.options.margin
            chosen_otherwise = (now.picks != before.picks).any(axis=0)
            joining = ~raced & (in_doubt | chosen_otherwise)
            room = self.most[0] - int(raced.sum())
            joining &= _nearest(np.where(joining, now.margins, np.inf), room)
            if not joining.any():
                return table, raced
            raced = raced | joining

    def _measured(self, raced: Chosen, steps: int) -> LossTable:
        """Fine-tune what is not yet, for so many steps; NaN for the groups that are not raced and unknown errors."""
        jobs = _jobs(self.tuner, self.choices, raced, steps, self.options.seeds)
        new = [job for job in jobs if job.id not in self.trained]
        for job, tuned in zip(new, self.tuner.run(new), strict=True):
            self.trained[job.id] = job, tuned
        mean_losses = np.array([self.trained[job.id][1].value("mean_loss") for job in jobs])
        lower_choices, seeds = len(self.choices) - 1, self.options.seeds
        measured = mean_losses.reshape(-1, lower_choices, seeds)  # (raced groups, C − 1, seeds)
        losses = np.full((len(raced), lower_choices), np.nan)
        errors = np.full_like(losses, np.nan)
        losses[raced] = measured.mean(axis=2)
        if seeds > 1:
            errors[raced] = errors_over_seeds(measured)
        return LossTable(losses, errors)


def _steps_of_alps(tuner: Tuner, choices: int) -> int:
    """What ALPS takes: an epoch for each group at each choice below the highest."""
    epoch = steps_of(tuner.work.task, shorten(tuner.recipe, epochs=1.0))
    return len(tuner.graph.selectable) * (choices - 1) * epoch


def _jobs(tuner: Tuner, choices: Sequence[Precision], raced: Chosen, steps: int, seeds: int) -> list[Job]:
    """In the order of groups, choices, seeds."""
    jobs: list[Job] = []
    for group, runs in zip(tuner.graph.selectable, raced, strict=True):
        if not runs:
            continue
        for choice in choices[:-1]:
            jobs += [tuner.job({group.name: choice}, seed=seed, steps=steps) for seed in range(seeds)]
    return jobs


def _nearest(margins: Floats, count: int) -> Chosen:
    """So many groups with the least margins; of equals the first."""
    chosen = np.zeros(len(margins), dtype=np.bool_)
    chosen[np.argsort(margins, kind="stable")[:count]] = True
    return chosen


# --- Losses with one group lowered at a time, and how they are carried over from a short training to a longer one.

_SLOPE_VARIANCE = 0.25  # of the line from one training to a longer one: its slope is 1 ± 0.5
Chosen = NDArray[np.bool_]
"""(G): which groups."""


@dataclass(frozen=True)
class LossTable:
    """Losses with one group lowered, (G, C − 1), all on one scale, and their standard errors, (G, C − 1)."""

    losses: Floats
    errors: Floats

    @property
    def ends(self) -> Chosen:
        """The groups of the least loss, with which ALPS compares all others, and of the greatest.

        Both are raced: a line from the screen through groups that are nearly equal would be drawn by their noise.
        """
        least, greatest = self.losses.min(axis=1).argmin(), self.losses.max(axis=1).argmax()
        groups = np.arange(len(self.losses))
        ends: Chosen = (groups == least) | (groups == greatest)
        return ends

    def gains(self) -> tuple[Floats, Floats]:
        """As ALPS's: values and standard errors over the lowest choice, (G, C)."""
        values = np.array(values_of(-self.losses[:, :, None]))
        lowest = self.errors[:, :1]  # (G, 1): also of the highest choice, where all are as good as the best
        between = np.hypot(self.errors[:, 1:], lowest)  # (G, C − 2)
        return values, np.concatenate([np.zeros_like(lowest), between, lowest], axis=1)

    def carried(self, measured: LossTable, raced: Chosen, *, alike: bool) -> LossTable:
        """On the scale of a longer training: what was measured there, and the others by a line through those.

        The line is the least-squares one from these losses to the measured ones, never falling. Where both are of
        trainings (`alike`), its slope is expected to be 1 ± 0.5, or else the noise of groups that are nearly equal
        would draw it. What it says is as uncertain as the measured ones lie about it. A measured loss without an error
        of its own has that one too: how far it moved against what was known before.
        """
        before, after = self.losses[raced].ravel(), measured.losses[raced].ravel()  # (raced groups · (C − 1))
        noise = float((self.errors[raced] ** 2).mean()) if alike else None
        slope, residual = _line(before, after, noise)
        losses = after.mean() + slope * (self.losses - before.mean())  # (G, C − 1)
        errors = np.hypot(slope * self.errors, residual or 0.0)
        moved = errors if residual is None else residual
        measured_errors = np.where(np.isfinite(measured.errors), measured.errors, moved)
        here = raced[:, None]
        return LossTable(np.where(here, measured.losses, losses), np.where(here, measured_errors, errors))


def _line(before: Floats, after: Floats, noise: float | None) -> tuple[float, float | None]:
    """The slope from losses to others, and the standard deviation about the line, None where two points make it.

    With `noise`, the variance of the losses before, the slope is the likeliest one that is 1 ± 0.5 to begin with.
    """
    x, y = before - before.mean(), after - after.mean()
    expected = 0.0 if noise is None else noise / _SLOPE_VARIANCE
    spread = float((x**2).sum()) + expected
    slope = 1.0
    if spread:
        slope = max(0.0, (float((x * y).sum()) + expected) / spread)
    if len(x) <= 2:
        return slope, None
    return slope, float(np.sqrt(((y - slope * x) ** 2).sum() / (len(x) - 2)))


def make_loss_table(good: Goodness) -> LossTable:
    """What `drop` or `drift` measured, (G, C, B), as losses with the standard errors of their rise."""
    low, top = -good[:, :-1], -good[:, -1:]  # (G, C − 1, B), (G, 1, B)
    losses = low.mean(axis=2)
    batches = good.shape[2]
    errors = np.zeros_like(losses)
    if batches > 1:
        errors = (low - top).std(axis=2, ddof=1) / np.sqrt(batches)
    return LossTable(losses, errors)
