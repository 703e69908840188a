"""What a relaxation is: precision as numbers that are trained with the weights. One loop for all of them."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.core.jobs import Job, Numbers
from bitplan.core.precision import Precision
from bitplan.core.progress import Progress
from bitplan.core.records import Graph
from bitplan.core.registry import CHOOSERS
from bitplan.core.spend import PassMeter, Spend, charge, pause_charging
from bitplan.core.trials import Recipe
from bitplan.gains.base import Context, Gain, LayerGains, check_constraint, check_spend, meter_for
from bitplan.gains.finetuning import Trainings, Tuner, recipe_of, shorten
from bitplan.gains.jobs import do_jobs, members_of
from bitplan.gains.lowering import check_task, rows_by_layer
from bitplan.quant.blend import Shares, blended
from bitplan.selection.budget_constraint import BudgetConstraint
from bitplan.selection.exact import exact
from bitplan.selection.problem import Problem, to_integers
from bitplan.store.record_store import FolderStore
from bitplan.tasks.base import Batch, Split, Task, samples_per_epoch
from bitplan.tune.length import steps_of
from bitplan.tune.log import TrainLog
from bitplan.tune.loop import finetune_
from bitplan.tune.resume import train_or_restart

# --- What a relaxation is: precision as numbers that are trained with the weights. One loop for all of them.

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
        aim = check_constraint(context.aim, self._name, graph, choices)
        tuner, meter = self._begin(model, graph, choices, context)
        found = train_shares(self, tuner, aim, meter)
        told = as_values(self.values(found.theta, aim))
        rows = dict(zip(aim.groups, used_up(told, aim).tolist(), strict=True))
        size = {"steps": found.steps, "samples_per_epoch": samples_per_epoch(tuner.work.task)}
        spent = f"{found.steps:,} steps, {meter.spent.passes:,.0f} passes"
        unsaid = () if context.recipe else (f"recipe: {self._name} trained at harmless rates, since none was given",)
        return LayerGains(
            rows_by_layer(graph, rows),
            counts=meter.spent.counts | size,
            work=found.seconds,
            notes=(*unsaid, f"gains: {self._name} trained for {spent}, for {', '.join(aim.budgets)} alone"),
        )

    def trainings(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Trainings:
        """Return the training, timed as that of the network at the highest choice."""
        tuner, _ = self._begin(model, graph, choices, context)
        return Trainings(tuner, [tuner.first])

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
        recipe = shorten(recipe, steps=meter.room(one))
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


def train_shares(method: Relaxation, tuner: Tuner, aim: BudgetConstraint, meter: PassMeter) -> FoundShares:
    """Train θ and the weights of a copy, by the tuner's recipe; one job, which a store keeps and a killed one goes on.

    It is done in this process: there is nothing to share with others.
    """
    context = tuner.context
    limits = {"costs": aim.costs.tolist(), "capacities": aim.capacities.tolist()}
    job = tuner.first.model_copy(
        update={
            "work": tuner.method, "options": _options(method) | limits, "members": members_of(tuner.graph),
            "choices": aim.choices, "label": f"all of {', '.join(map(str, aim.choices))} at once",
        }
    )  # fmt: skip
    running = None if context.shelf is None else context.shelf.running
    work = Relax(method, tuner.work.model, tuner.work.task, aim, tuner.work.teacher, running, context.progress)
    here = dataclasses.replace(context, engine=None, progress=None)
    outcome = do_jobs(work, [job], here, tuner.method)[job.id]
    if running is not None:
        running.clear(job.id)
    steps = int(outcome.value("steps"))
    meter.charge(price_of(tuner.recipe), steps)
    meter.charge(Spend(trainings=1))
    start = method.start(aim, job.seed)
    rows = [outcome.numbers[f"theta {row}"] for row in range(len(start))]
    return FoundShares(start.new_tensor(rows).reshape(start.shape), steps, outcome.seconds)


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


# --- The training of a relaxation: θ as a part of the network, by the training loop that there is.

_OPEN = -1  # what a group is fixed at that is not


class Mix(NamedTuple):
    """What a step trains: shares of the choices, (G, C), what they cost, (K), and how far the training is, from 0 to 1.

    A cost of 1 just meets its budget.
    """

    shares: Tensor
    cost: Tensor
    progress: float


class LearnedShares(Shares):
    """Shares that follow from θ, (G, …), by a relaxation; groups that are decided stay `fixed` at one choice."""

    fixed: Tensor

    def __init__(self, method: Relaxation, aim: BudgetConstraint, theta: Tensor) -> None:
        super().__init__()
        self.method, self.aim, self.rate = method, aim, method.rate
        self.theta = nn.Parameter(theta.detach().clone())
        self.register_buffer("fixed", torch.full((len(aim.groups),), _OPEN))
        self.progress, self._step = 0.0, 0
        self._now: tuple[Tensor, list[list[bool]]] | None = None
        self._before: Tensor | None = None

    def shares(self) -> Tensor:
        """How much of each choice each group has, (G, C)."""
        return self._all()[0]

    def of_group(self, group: int) -> tuple[Tensor, Sequence[bool]]:
        """A group's shares of the choices, (C), and which of these are to be computed."""
        shares, computed = self._all()
        return shares[group], computed[group]

    def begin_(self, step: int, total: int) -> None:
        """All groups and tensors of a pass see the same shares."""
        self.progress, self._step, self._now = step / total, step, None
        self._now = self._all()

    def objective(self, loss: Tensor) -> Tensor:
        """As the relaxation says."""
        shares = self.shares()
        return self.method.objective(loss, Mix(shares, self.aim.expected(shares), self.progress), self.aim)

    def spare_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Where both learn in turn, weights learn in even steps and θ in odd ones."""
        self._before = self.theta.detach().clone()
        if not self.method.in_turn:
            return
        for parameter in parameters:
            if (parameter is self.theta) == (self._step % 2 == 0):
                parameter.grad = None

    @torch.no_grad()
    def end_(self, part: float = 1.0) -> None:
        """Step θ; keep it where it may be, that of fixed groups where it was, and fix what is decided."""
        assert self._before is not None
        super().end_(part)
        self._now = None
        is_fixed = (self.fixed != _OPEN).view(-1, *[1] * (self.theta.dim() - 1))
        self.theta.copy_(torch.where(is_fixed, self._before, self.theta))
        self.method.confine_(self.theta, self.aim)
        shares = self.shares()
        decided = self.method.decided(shares, self.progress) & (self.fixed == _OPEN)
        self.fixed.copy_(torch.where(decided, shares.argmax(1), self.fixed))
        self._now = None

    def _all(self) -> tuple[Tensor, list[list[bool]]]:
        """Shares, (G, C), and which choices are to be computed."""
        if self._now is not None:
            return self._now
        shares = self.method.shares(self.theta, self.aim, self.progress)
        is_fixed = (self.fixed != _OPEN)[:, None]
        alone = nn.functional.one_hot(self.fixed.clamp_min(0), shares.shape[1])
        shares = torch.where(is_fixed, alone.to(shares.dtype), shares)
        computed = torch.where(is_fixed, alone > 0, self.method.computed(self.theta, self.aim))
        return shares, computed.tolist()


@dataclass(frozen=True)
class Relax:
    """Train a copy of the network with all choices at once, and return θ at the end: for each group a row."""

    method: Relaxation
    model: nn.Module
    task: Task
    aim: BudgetConstraint
    teacher: nn.Module | None = None
    running: FolderStore | None = None
    progress: Progress | None = None

    def __call__(self, job: Job) -> Numbers:
        """Train by the job's recipe and seed; a killed training goes on where it was."""
        with pause_charging():  # what a killed training took counts too: all steps are charged below
            model, log = self._run(job)
        theta = find_shares(model).theta.detach().cpu()
        charge(price_of(recipe_of(job)) * len(log.lines) + Spend(trainings=1, evaluations=1))
        rows = theta.reshape(len(theta), -1).tolist()
        return {f"theta {row}": numbers for row, numbers in enumerate(rows)} | {"steps": (len(log.lines),)}

    def made(self, job: Job) -> nn.Module:
        """The copy."""
        shares = LearnedShares(self.method, self.aim, self.method.start(self.aim, job.seed))
        return blended(self.model, list(job.members.values()), job.choices, shares)

    def _run(self, job: Job) -> tuple[nn.Module, TrainLog]:
        if self.running is None:
            model = self.made(job)
            return model, self._trained(model, job)
        return train_or_restart(lambda model: self._trained(model, job), lambda: self.made(job), self.running, job.id)

    def _trained(self, model: nn.Module, job: Job) -> TrainLog:
        recipe = recipe_of(job)
        task = InTurn.of(self.task, recipe.batch_size) if self.method.in_turn else self.task
        folder = None if self.running is None else self.running.path(job.id)
        return finetune_(
            model, task, recipe, teacher=self.teacher, seed=job.seed, folder=folder, progress=self.progress
        )  # fmt: skip


def price_of(recipe: Recipe) -> Spend:
    """One step: each sample there and back, and once through a teacher."""
    taught = recipe.batch_size if recipe.distills else 0
    return Spend(forwards=recipe.batch_size + taught, backwards=recipe.batch_size, labels=recipe.distill < 1)


def find_shares(model: nn.Module) -> LearnedShares:
    """The shares of a blended model."""
    return next(module for module in model.modules() if isinstance(module, LearnedShares))


# --- The training data in two halves, batches from each in turn: weights learn from one, shares from the other.


@dataclass(frozen=True)
class InTurn(Task):
    """A task whose training batches come from two halves of another's: `batch` samples from one, then from the other.

    An epoch has as many steps on one half as on the other. What the second half's task calls its test split is that
    half: as samples of its own they are not augmented.
    """

    whole: Task
    first: Task
    second: Task
    batch: int

    @classmethod
    def of(cls, task: Task, batch: int) -> Self:
        """The halves are the same for all seeds."""
        return cls(task, *task.hold_out(0.5), batch)

    @property
    def name(self) -> str:  # type: ignore[override]
        """That of the task."""
        return self.whole.name

    @property
    def version(self) -> int:  # type: ignore[override]
        """That of the task."""
        return self.whole.version

    @property
    def metric(self) -> str:  # type: ignore[override]
        """That of the task."""
        return self.whole.metric

    @property
    def higher_is_better(self) -> bool:  # type: ignore[override]
        """As of the task."""
        return self.whole.higher_is_better

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterator[Batch]:
        """Pieces of a batch from one half, then as many from the other."""
        if split != "train":
            yield from self.whole.batches(split, batch_size, seed)
            return
        halves = [
            iter(self.first.batches("train", batch_size, seed)),
            iter(self.second.batches("test", batch_size, seed)),
        ]
        for _ in range(self.size("train") // (2 * self.batch)):
            for half in halves:
                yield from islice(half, self.batch // batch_size)

    def size(self, split: Split) -> int:
        """As many as make whole batches, of both halves alike."""
        if split != "train":
            return self.whole.size(split)
        return 2 * self.batch * (min(self.first.size("train"), self.second.size("test")) // self.batch)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """As the task does."""
        return self.whole.forward(model, batch)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """As the task does."""
        return self.whole.loss(outputs, batch)

    def batch_score(self, outputs: Any, batch: Batch) -> float:
        """As the task does."""
        return self.whole.batch_score(outputs, batch)

    def logits(self, outputs: Any) -> tuple[Tensor, ...]:
        """As the task does."""
        return self.whole.logits(outputs)

    def example(self) -> Any:
        """That of the task."""
        return self.whole.example()

    def score(self, model: nn.Module) -> float:
        """As the task does."""
        return self.whole.score(model)


def check_halves(task: Task, batch: int, method: str) -> None:
    """Refuse a task that cannot be cut, and batches that a half does not have samples for."""
    try:
        halves = InTurn.of(task, batch)
    except (InputError, AttributeError) as error:
        raise InputError(
            f"{method} trains weights and shares on different halves of the data ({error}); or halves=false"
        ) from None
    if not halves.size("train"):
        raise InputError(
            f"batch_size {batch} is more than half of the {task.size('train')} training samples of task {task.name}, "
            f"and {method} trains weights and shares on different halves: lower it, or halves=false"
        )


# --- From what was learned to a table of gains: differences from the lowest choice, and a budget that is used up.

Values = NDArray[np.float64]
"""(G, C): what each choice of each group is worth."""

_FIRST, _TIMES = 1e-6, 30  # the first that is added, as a share of what values come to; how often it grows
_FINEST = 1.02  # the ratio of two that count as one


def as_values(told: Tensor) -> Values:
    """What a relaxation says of each choice, less what it says of the lowest."""
    values: Values = told.detach().cpu().double().numpy()
    return values - values[:, :1]


def used_up(values: Values, aim: BudgetConstraint) -> Values:
    """The same, and as much for every choice more as it takes that the best selection leaves nothing of the budgets.

    A penalty pushes groups that are alike past the middle between two choices, all of them: the plan that is nearest
    to where they are would be the lowest, and much would be left. What is added is the same for all groups, so that
    their order stays, as with the offset by which FracBits rounds. Nothing is left where no group can have one choice
    more.
    """
    more = np.arange(values.shape[1], dtype=np.float64)
    if _leaves_nothing(values, aim):
        return values
    low, high = 0.0, _FIRST * (float(np.abs(values).max()) or 1.0)
    for _ in range(_TIMES):
        if _leaves_nothing(values + high * more, aim):
            break
        low, high = high, 4 * high
    while low and high / low > _FINEST:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _leaves_nothing(values + middle * more, aim) else (middle, high)
    return values + high * more


def _leaves_nothing(values: Values, aim: BudgetConstraint) -> bool:
    """Whether no group of the best selection could have one choice more."""
    codes = to_integers([tuple(row) for row in values.tolist()]).values
    picks = exact(Problem(aim.groups, aim.choices, codes, aim.costs, aim.capacities)).picks
    return aim.raised(picks, range(len(picks))) == tuple(picks)
