"""What a relaxation is: precision as numbers that are trained with the weights. One loop for all of them."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from bitplan.core.errors import InputError
from bitplan.core.jobs import Learned, Relaxed
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.registry import CHOOSERS
from bitplan.core.spend import PassMeter, Spend
from bitplan.core.trials import Recipe
from bitplan.gains.aims import check_aim, check_spend, meter_for
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.gains.finetuned import Expected, Tuner, shortened
from bitplan.gains.lowering import by_first_layer
from bitplan.gains.measuring import check_task, finish
from bitplan.relaxations.halves import check_halves
from bitplan.relaxations.hardening import as_values, used_up
from bitplan.relaxations.learning import Mix as Mix
from bitplan.relaxations.learning import Relax
from bitplan.relaxations.learning import price_of as price_of
from bitplan.selection.budget_constraint import BudgetConstraint
from bitplan.tasks.choosing import samples_per_epoch
from bitplan.tune.pace import steps_of

_BATCH = 64  # of a training that nobody has given a recipe for


@dataclass(frozen=True)
class Relaxation(Gain):
    """A frozen dataclass derived from this class, whose fields are its options: what is trained, and what it means.

    θ, (G, …), is trained together with the weights of a copy of the network, in which every tensor is the mixture of
    what all choices make of it (`quant/blend.py`). θ takes plain gradient steps whatever the recipe's optimizer: at
    `rate`, which follows the recipe's schedule, without weight decay and momentum. The weights are thrown away
    afterwards; θ gives a table, from which `select` makes the plan. `spend` is what may be spent, in passes of one
    sample through the network (backwards counts 2); where it is not said, the epochs of the context, or what the recipe
    takes.
    """

    calibrates: ClassVar[bool] = True
    bound: ClassVar[bool] = True

    rate: float = 0.3
    spend: float | None = None

    def __post_init__(self) -> None:
        check_spend(self._name, self.spend)
        check_positive(self._name, rate=self.rate)

    @abstractmethod
    def start(self, aim: BudgetConstraint, seed: int) -> Tensor:
        """θ to begin with, (G, …)."""

    @abstractmethod
    def shares(self, theta: Tensor, aim: BudgetConstraint, progress: float) -> Tensor:
        """How much of each choice each group has, (G, C), not below 0, 1 in all; gradients flow to θ."""

    @abstractmethod
    def objective(self, loss: Tensor, mix: Mix, aim: BudgetConstraint) -> Tensor:
        """What is minimized: the loss, and what the mixture costs."""

    @abstractmethod
    def values(self, theta: Tensor, aim: BudgetConstraint) -> Tensor:
        """What θ says of each choice, (G, C): more is better, and the best plan within the budget has the most."""

    @property
    def in_turn(self) -> bool:
        """Whether weights learn from one half of the training data and θ from the other, in turn."""
        return False

    def computed(self, theta: Tensor, aim: BudgetConstraint) -> Tensor:
        """Which choices of each group need to be computed, (G, C): all, unless θ cannot learn from some now."""
        return theta.new_ones(len(aim.groups), len(aim.choices)) > 0

    def decided(self, shares: Tensor, progress: float) -> Tensor:
        """Which groups are from now on at the choice that has most, (G)."""
        return shares.new_zeros(len(shares)) > 0

    def confine_(self, theta: Tensor, aim: BudgetConstraint) -> None:
        """Put θ back where it may be, after each step."""

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """Train θ, and give what it says as gains."""
        aim = check_aim(context.aim, self._name, graph, choices)
        tuner, meter = self._begin(model, graph, choices, context)
        found = relax(self, tuner, aim, meter)
        told = as_values(self.values(found.theta, aim))
        rows = dict(zip(aim.groups, used_up(told, aim).tolist(), strict=True))
        size = {"steps": found.steps, "samples_per_epoch": samples_per_epoch(tuner.work.task)}
        spent = f"{found.steps:,} steps, {meter.spent.passes:,.0f} passes"
        unsaid = () if context.recipe else (f"recipe: {self._name} trained at harmless rates, since none was given",)
        return LayerGains(
            by_first_layer(graph, rows),
            counts=meter.spent.counts | size,
            work=found.seconds,
            notes=(*unsaid, f"gains: {self._name} trained for {spent}, for {', '.join(aim.budgets)} alone"),
        )

    def expected(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Expected:
        """What the training is going to take, by a few steps of the network at the highest choice."""
        tuner, _ = self._begin(model, graph, choices, context)
        return tuner.expected([tuner.job({})])

    def check_limit(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> None:
        """Refuse a limit that does not do for a step."""
        self._begin(model, graph, choices, context)

    def _begin(
        self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context
    ) -> tuple[Tuner, PassMeter]:  # fmt: skip
        """What the training starts from, by a recipe as long as may be spent, and the meter for it."""
        task = check_task(context.task, self._name, "trains precisions with the weights")
        recipe = _recipe(context, int(task.size("train")))
        one = price_of(recipe.stages[0])  # it trains one stage, as long as all
        meter = meter_for(self.spend, context, steps_of(task, recipe) * one.passes)
        least = 2 if self.in_turn else 1
        meter.check(one * least, f"{least} steps of {self._name}", less="train with a smaller batch_size in the recipe")
        recipe = shortened(recipe, steps=meter.room(one))
        if self.in_turn:
            check_halves(task, recipe.batch_size, self._name)
        return Tuner.of(self._name, model, graph, choices, context, recipe), meter

    @property
    def _name(self) -> str:
        return CHOOSERS.name_of(self)


class FoundShares(NamedTuple):
    """θ at the end, (G, …), and the steps and seconds of training."""

    theta: Tensor
    steps: int
    seconds: float


def relax(method: Relaxation, tuner: Tuner, aim: BudgetConstraint, meter: PassMeter) -> FoundShares:
    """Train θ and the weights of a copy, by the tuner's recipe; one job, which a store keeps and a killed one goes on.

    It is done in this process: there is nothing to share with others.
    """
    context, run = tuner.context, tuner.run_of_all
    job = Relaxed(
        method=tuner.method,
        options=_options(method),
        members={group.name: tuple(layer.name for layer in group.layers) for group in tuner.graph.selectable},
        choices=aim.choices,
        costs=aim.costs.tolist(),
        capacities=tuple(aim.capacities.tolist()),
        run=run,
        task_options=dict(tuner.task_options),
    )
    running = None if context.shelf is None else context.shelf.running
    work = Relax(method, tuner.work.model, tuner.work.task, aim, tuner.work.teacher, running, context.progress)
    here = dataclasses.replace(context, engine=None, progress=None)
    outcome = finish(work, [job], Learned, here, tuner.method)[job.id]
    if running is not None:
        running.clear(job.id)
    meter.charge(price_of(run.recipe), outcome.steps)
    meter.charge(Spend(trainings=1))
    like = method.start(aim, run.seed)
    return FoundShares(like.new_tensor(outcome.theta).reshape(like.shape), outcome.steps, outcome.seconds)


def check_positive(method: str, **numbers: float) -> None:
    """Refuse options that are not above 0."""
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise InputError(f"{method}: {name} must be above 0, not {value}")


def _recipe(context: Context, samples: int) -> Recipe:
    """The context's without what a network that is thrown away has no use for; an epoch at harmless rates unless said.

    The weights that score best are not kept, and quantized weights are not moved to where the loss is worst.
    """
    if context.recipe is None:
        return Recipe(epochs=1, batch_size=max(1, min(_BATCH, samples // 2)))
    return context.recipe.model_copy(update={"held_out": 0.0, "sharpness": 0.0})


def _options(method: Relaxation) -> dict[str, Any]:
    """All but how much may be spent, which the recipe says in steps."""
    return {field.name: getattr(method, field.name) for field in dataclasses.fields(method) if field.name != "spend"}
