"""Racing plans: what cheap methods would choose is fine-tuned shortly, each plan as a whole, and the best is taken."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from bitplan.core.errors import Diverged, FileError, InputError, Unfinished
from bitplan.core.jobs import Job, Outcome
from bitplan.core.method_facts import About, describe_method
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import charge, meter_spend
from bitplan.gains.base import Context, Gain, LayerGains, check_constraint, make_gain, make_record, usual_options
from bitplan.gains.finetuning import Trainings, Tuner, check_length, counts_of, recipe_for
from bitplan.gains.jobs import seconds_of
from bitplan.gains.lowering import rows_by_layer
from bitplan.selection.budget_constraint import BudgetConstraint, Picks
from bitplan.tasks.base import measuring_split, samples_per_epoch

_PLANS = ("drift", "drift_in_context", "fisher", "eagl", "uniform")
_FOR_PLANS = 0.5  # of what may be spent, for the methods that select the plans; the rest is for racing them
_FEWEST = 8  # samples that a method looks at, at least


@dataclass(frozen=True)
class PlanRacing(Gain):
    """The best of the plans that other methods select, told apart by training them.

    Every one of `plans`, which are names of methods that train nothing, selects within the budget; where one cannot (a
    task has no class scores to drift) the others go on. Plans that differ are fine-tuned as they are, with the same
    batches for all; the better half, two at least, is fine-tuned again on other batches, for as many `rounds`; the one
    with the least training loss, over all steps of all rounds, is taken. `spend` is a share of what ALPS takes with an
    epoch per group: half of it at most goes to the default methods, whose samples are cut where they would take more,
    the rest is divided evenly among rounds, an epoch for a plan at most. `lr_factor` is that of `alps`.
    """

    about: ClassVar[About] = About(True, True, True, "spend·3·T·G·(C − 1)", "bitplan")
    bound: ClassVar[bool] = True

    plans: str | Sequence[str] = _PLANS
    spend: float = 0.05
    rounds: int = 2
    lr_factor: float = 0.25

    def __post_init__(self) -> None:
        check_length("plan_racing", None, None, self.lr_factor)
        if not 0 < self.spend < math.inf or self.rounds < 1:
            raise InputError(
                "plan_racing: spend is a share of what ALPS takes, above 0, and there is at least one round, not "
                f"{self.spend} and {self.rounds}"
            )
        if not self._names:
            raise InputError("plan_racing: name the methods whose plans are raced, plans=drift,fisher,uniform")
        for name in self._names:
            gain, _ = make_gain(name, {})
            if gain.selector != "exact":
                raise InputError(f"plan_racing: {name} is not defined by exact selection: leave it out")
            about = describe_method(gain)
            if about is not None and about.trains:
                raise InputError(f"plan_racing: {name} trains, which would leave nothing for the race: leave it out")

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """Select the plans, race them, and give the best as gains for which it is the best selection."""
        aim = check_constraint(context.aim, "plan_racing", graph, choices)
        tuner = self._tuner(model, graph, choices, context)
        with meter_spend() as meter:
            found = self._selected(model, graph, aim, context, self._samples(tuner, aim))
        charge(meter.spent if meter.known else None)
        race = _PlanRace(tuner, aim, self._allowed(tuner, aim) - meter.spent.passes, self.rounds, self.spend)
        best, outcomes = race.run(list(found.plans))
        whose = f"{' and '.join(found.plans[best])}, of {len(found.plans)} plans"
        left_out = tuple(f"gains: plan_racing goes on without {one}" for one in found.left_out)
        return LayerGains(
            rows_by_layer(graph, aim.rows(best)),
            counts=counts_of(outcomes, tuner.work.task) | {"plans": len(found.plans)},
            work=found.seconds + seconds_of(outcomes),
            notes=(*left_out, f"gains: plan_racing takes the plan of {whose}, for {', '.join(aim.budgets)} alone"),
        )

    def trainings(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Trainings:
        """Return the most trainings that there may be: as if all plans differed, and methods took nothing."""
        aim = check_constraint(context.aim, "plan_racing", graph, choices)
        tuner = self._tuner(model, graph, choices, context)
        race = _PlanRace(tuner, aim, self._allowed(tuner, aim), self.rounds, self.spend)
        plans = [aim.top[:-number] + (0,) * number for number in range(1, min(len(self._names), len(aim.groups)) + 1)]
        counts = [count for count in range(2, len(plans) + 1) if race.suffices_for(count)] or [min(2, len(plans))]
        most = max(counts, key=race.steps_for)  # fewer plans may be left more by rounding
        return Trainings(tuner, [job for jobs in race.jobs(plans[:most]) for job in jobs])

    @property
    def _names(self) -> list[str]:
        """As Python gives them, or as the command line writes them: with commas."""
        written = self.plans.split(",") if isinstance(self.plans, str) else self.plans
        return [name for name in written if name]

    def _tuner(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Tuner:
        recipe = recipe_for("plan_racing", context, epochs=None, steps=None, lr_factor=self.lr_factor)
        return Tuner.of("plan_racing", model, graph, choices, context, recipe)

    def _allowed(self, tuner: Tuner, aim: BudgetConstraint) -> float:
        """The passes of all that this method does."""
        epoch = _passes_of_a_sample(tuner) * samples_per_epoch(tuner.work.task)
        return self.spend * epoch * len(aim.groups) * (len(aim.choices) - 1)

    def _samples(self, tuner: Tuner, aim: BudgetConstraint) -> int:
        """How many samples methods may look at: drift runs each once for every group and lower choice.

        So does drift in context in each of four rounds, on a quarter of them, and it decides on all of them.
        """
        lowered = len(aim.groups) * (len(aim.choices) - 1)
        samples = int(_FOR_PLANS * self._allowed(tuner, aim) / (2 * lowered + 12))
        if samples < _FEWEST:
            raise InputError(
                f"plan_racing: spend={self.spend:g} of what ALPS takes lets methods look at {samples} samples: spend "
                "more, or give more training samples"
            )
        return samples

    def _selected(self, model: Any, graph: Graph, aim: BudgetConstraint, context: Context, samples: int) -> _Selected:
        """What each method selects; methods that agree are one plan."""
        plans: dict[Picks, list[str]] = {}
        left_out, seconds = list[str](), 0.0
        for name in self._names:
            gain, _ = make_gain(name, usual_options(context.task, name))
            try:
                found = _fewer(gain, samples).layer_gains(model, graph, aim.choices, context)
            except (FileError, Diverged, Unfinished):
                raise  # what a disk or a worker did today is no reason to choose otherwise
            except InputError as error:
                left_out.append(f"{name} ({error})")
                continue
            rows = make_record(gain, name, found, graph, aim.choices, context.seed, found.work).rows
            plans.setdefault(aim.best(np.array([rows[group] for group in aim.groups])), []).append(name)
            seconds += found.work
        if not plans:
            raise InputError(f"plan_racing: there is no plan to race: {'; '.join(left_out)}")
        return _Selected(plans, left_out, seconds)


@dataclass(frozen=True)
class _Selected:
    """Plans with the methods that select each, why others select none, and what that took."""

    plans: Mapping[Picks, Sequence[str]]
    left_out: Sequence[str]
    seconds: float


@dataclass(frozen=True)
class _PlanRace:
    """Plans, as picks, that are fine-tuned in rounds, of which each takes its part of the passes."""

    tuner: Tuner
    aim: BudgetConstraint
    passes: float
    rounds: int
    spend: float

    def run(self, plans: Sequence[Picks]) -> tuple[Picks, list[Outcome]]:
        """The plan of the least loss, and all trainings; of one plan none. Of equals the one that came first."""
        losses = dict.fromkeys(plans, 0.0)
        outcomes: list[Outcome] = []
        left = list(plans)
        for number, steps in enumerate(self._lengths(len(plans))):
            tuned = self.tuner.run([self._job(picks, number, steps) for picks in left])
            for picks, outcome in zip(left, tuned, strict=True):
                losses[picks] += steps * outcome.value("mean_loss")  # all that are left have trained for as long
            outcomes += tuned
            left = sorted(left, key=losses.__getitem__)[: _kept(len(left))]
        return left[0], outcomes

    def jobs(self, plans: Sequence[Picks]) -> list[list[Job]]:
        """Those of every round, if the first plans are the best."""
        rounds, left = [], list(plans)
        for number, steps in enumerate(self._lengths(len(plans))):
            rounds.append([self._job(picks, number, steps) for picks in left])
            left = left[: _kept(len(left))]
        return rounds

    def _job(self, picks: Picks, number: int, steps: int) -> Job:
        return self.tuner.job(self.aim.lowered_groups(picks), seed=number, steps=steps)

    def suffices_for(self, plans: int) -> bool:
        """Whether each of so many plans can be trained for a step in every round."""
        return all(self._affordable(passes, count) > 0 for passes, count in self._shares(plans))

    def steps_for(self, plans: int) -> int:
        """The steps of all trainings of a race of so many plans."""
        lengths = zip(self._shares(plans), self._lengths(plans), strict=True)
        return sum(count * steps for (_, count), steps in lengths)

    def _shares(self, plans: int) -> list[tuple[float, int]]:
        """The passes of each round, and how many plans share them; two plans are raced once, one is not."""
        counts = [plans] if plans > 1 else []
        while len(counts) < self.rounds and counts and counts[-1] > 2:
            counts.append(_kept(counts[-1]))
        return [(self.passes / len(counts), count) for count in counts]

    def _lengths(self, plans: int) -> list[int]:
        """The steps of a plan in each round; an epoch at most."""
        task, size = self.tuner.work.task, self.tuner.recipe.batch_size
        lengths = []
        for passes, count in self._shares(plans):
            steps = self._affordable(passes, count)
            if steps < 1:
                raise InputError(
                    f"plan_racing: spend={self.spend:g} of what ALPS takes is too little to train {count} plans for a "
                    f"step of {size} samples: spend more (spend={10 * self.spend:g}), or take a smaller batch_size"
                )
            lengths.append(min(steps, max(1, task.size("train") // size)))
        return lengths

    def _affordable(self, passes: float, count: int) -> int:
        """As many steps as the passes allow each of so many plans, what is held out being judged with them."""
        task, size = self.tuner.work.task, self.tuner.recipe.batch_size
        judging = task.size("test") if measuring_split(task) == "test" else 0
        return int((passes / count - judging) / (size * _passes_of_a_sample(self.tuner)))


def _kept(plans: int) -> int:
    """How many go on to the next round."""
    return max(2, plans // 2)


def _passes_of_a_sample(tuner: Tuner) -> int:
    """One forward, one back, which costs two, and that of a teacher."""
    return 3 + tuner.recipe.distills


def _fewer(gain: Gain, samples: int) -> Gain:
    """The same method on so many samples at most."""
    most = {"samples": samples, "decide": samples}
    named = {field.name for field in fields(gain)}  # type: ignore[arg-type]
    if "decide" in named:
        most["samples"] = max(1, samples // 4)
    less = {name: min(getattr(gain, name), limit) for name, limit in most.items() if name in named}
    return replace(gain, **less)  # type: ignore[type-var]
