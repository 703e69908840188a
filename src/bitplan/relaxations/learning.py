"""The training of a relaxation: θ as a part of the network, by the training loop that there is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from bitplan.core.jobs import Learned, Relaxed
from bitplan.core.places import Places
from bitplan.core.progress import Progress
from bitplan.core.spend import Spend, charge, uncharged
from bitplan.core.trials import Recipe
from bitplan.quant.blend import Shares, blended
from bitplan.relaxations.halves import InTurn
from bitplan.selection.budget_constraint import BudgetConstraint
from bitplan.tasks.base import Task
from bitplan.tune.anew import begun_anew
from bitplan.tune.log import TrainLog
from bitplan.tune.loop import finetune_

if TYPE_CHECKING:
    from bitplan.relaxations.base import Relaxation

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
    """The work of a job: train a copy of the network with all choices at once, and say where θ ended."""

    method: Relaxation
    model: nn.Module
    task: Task
    aim: BudgetConstraint
    teacher: nn.Module | None = None
    running: Places | None = None
    progress: Progress | None = None

    def __call__(self, job: Relaxed) -> Learned:
        """Train by the job's recipe and seed; what a killed training left is where it goes on."""
        start = time.perf_counter()
        with uncharged():  # what a killed training took counts too: all steps are charged below
            model, log = self._run(job)
        theta = learned(model).theta.detach().cpu()
        rows = tuple(tuple(row) for row in theta.reshape(len(theta), -1).tolist())
        charge(price_of(job.run.recipe) * len(log.lines) + Spend(trainings=1, evaluations=1))
        return Learned(theta=rows, steps=len(log.lines), seconds=time.perf_counter() - start)

    def made(self, job: Relaxed) -> nn.Module:
        """The copy."""
        shares = LearnedShares(self.method, self.aim, self.method.start(self.aim, job.seed))
        return blended(self.model, list(job.members.values()), job.choices, shares)

    def _run(self, job: Relaxed) -> tuple[nn.Module, TrainLog]:
        if self.running is None:
            model = self.made(job)
            return model, self._trained(model, job)
        return begun_anew(lambda model: self._trained(model, job), lambda: self.made(job), self.running, job.id)

    def _trained(self, model: nn.Module, job: Relaxed) -> TrainLog:
        recipe = job.run.recipe
        task = InTurn.of(self.task, recipe.batch_size) if self.method.in_turn else self.task
        folder = None if self.running is None else self.running.path(job.id)
        return finetune_(
            model, task, recipe, teacher=self.teacher, seed=job.seed, folder=folder, progress=self.progress
        )  # fmt: skip


def price_of(recipe: Recipe) -> Spend:
    """One step: each sample there and back, and once through a teacher."""
    taught = recipe.batch_size if recipe.distills else 0
    return Spend(forwards=recipe.batch_size + taught, backwards=recipe.batch_size, labels=recipe.distill < 1)


def learned(model: nn.Module) -> LearnedShares:
    """The shares of a blended model."""
    return next(module for module in model.modules() if isinstance(module, LearnedShares))
