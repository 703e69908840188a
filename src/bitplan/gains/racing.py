"""ALPS for less: screen all groups by how far answers drift, then fine-tune only where the selection is in doubt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from bitplan.core.about import About
from bitplan.core.budget import Budget
from bitplan.core.defaults import COST
from bitplan.core.errors import InputError, UnknownName
from bitplan.core.jobs import Lowered, Tuned
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.gains.alps import errors_over_seeds
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.gains.drift import Drift
from bitplan.gains.drop import Drop
from bitplan.gains.finetuned import Expected, Tuner, check_length, counts_of, recipe_for, seconds_of, shortened
from bitplan.gains.loss_table import Chosen, LossTable, loss_table
from bitplan.gains.lowering import by_first_layer
from bitplan.gains.margins import Floats, Scales, Weighed
from bitplan.tune.pace import steps_of

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
        values, errors = race.run(loss_table(screened.good)).gains()
        jobs, outcomes = zip(*race.trained.values(), strict=True)
        counts = {
            "screened_samples": screened.samples,
            "raced_groups": len({job.groups for job in jobs}),
            "groups": len(names),
            "steps_of_alps": steps_of_alps,
        }
        return LayerGains(
            values=by_first_layer(graph, dict(zip(names, values.tolist(), strict=True))),
            errors=by_first_layer(graph, dict(zip(names, errors.tolist(), strict=True))),
            counts=counts_of(outcomes, tuner.work.task) | counts,
            work=screened.seconds + seconds_of(outcomes),
            notes=()
            if self._read_budgets()
            else (f"gains: alps_racing raced for {', '.join(scales.aims[0].budgets)}",),
        )

    def expected(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Expected:
        """At most this much: as if all groups were raced, and the share to keep of them in every further round."""
        self._scales(graph, choices, context)
        tuner = self._tuner(model, graph, choices, context)
        groups = len(graph.selectable)
        allowed = self._most(_steps_of_alps(tuner, len(choices)), groups, len(choices))
        left = groups
        jobs: list[Lowered] = []
        for steps, most in zip(self.lengths, allowed, strict=True):
            left = min(left, most)
            raced = np.arange(groups) < left  # whichever they are
            jobs += _jobs(tuner, choices, raced, steps, self.seeds)
            left = math.ceil(self.keep * left)
        return tuner.expected(jobs)

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
    trained: dict[str, tuple[Lowered, Tuned]] = field(default_factory=dict)

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
        mean_losses = np.array([self.trained[job.id][1].mean_loss for job in jobs])
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
    epoch = steps_of(tuner.work.task, shortened(tuner.run_of_all.recipe, epochs=1.0))
    return len(tuner.graph.selectable) * (choices - 1) * epoch


def _jobs(tuner: Tuner, choices: Sequence[Precision], raced: Chosen, steps: int, seeds: int) -> list[Lowered]:
    """In the order of groups, choices, seeds."""
    jobs: list[Lowered] = []
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
