"""The contract of relaxations."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import torch

from bitplan.core.precision import parse_choices
from bitplan.core.records import Gains
from bitplan.core.registry import RELAXATIONS
from bitplan.core.trials import Recipe
from bitplan.costs.base import price
from bitplan.gains.base import Context, estimate
from bitplan.plugins.methods.relaxations.base import Relaxation, price_of
from bitplan.selection.base import select
from bitplan.selection.budget_constraint import BudgetConstraint
from bitplan.tasks.base import load_task
from bitplan.testing.contract import Contract
from bitplan.testing.networks import Made, branching

_CHOICES = parse_choices("w2a2,w3a3,w4a4")  # the network is at the highest
_RECIPE = Recipe(steps=2, batch_size=16)
_STEPS = 4


def check_relaxation(relaxation: Relaxation) -> None:
    """Hold a relaxation to its contract, on a small quantized network and a few steps of digits."""
    contract = Contract(f"relaxation {RELAXATIONS.name_of(relaxation)}")
    contract.clause("it is derived from Relaxation", isinstance(relaxation, Relaxation), type(relaxation).__name__)
    limited = dataclasses.replace(relaxation, spend=_STEPS * price_of(_RECIPE).passes + 1)
    made, setting = branching(), Context(task=load_task("digits"), recipe=_RECIPE, seed=1)
    for budget in ("50%", "70%", "100%"):
        aim = BudgetConstraint.of(made.graph, _CHOICES, price("bmac", made.graph, _CHOICES), budget)
        _check_numbers(contract, limited, aim)
        with contract.leaves_as_it_was(made.model):
            _check(contract, limited, made, dataclasses.replace(setting, aim=aim))


def _check_numbers(contract: Contract, relaxation: Relaxation, aim: BudgetConstraint) -> None:
    """Shares and values at the start: of numbers alone, without a network."""
    with contract.works("it begins somewhere"):
        theta = relaxation.start(aim, 1).requires_grad_()
        shares = [relaxation.shares(theta, aim, progress) for progress in (0.0, 0.5, 0.99)]
        values = relaxation.values(theta, aim)
    shape = (len(aim.groups), len(aim.choices))
    for one in shares:
        sound = one.shape == shape and bool((one >= 0).all()) and bool(((one.sum(1) - 1).abs() < 1e-5).all())
        contract.clause("shares of a group are not below 0, and 1 in all", sound, one.tolist())
        contract.clause("shares follow from θ, by a gradient", one.requires_grad)
    told = values.shape == shape and bool(torch.isfinite(values).all())
    contract.clause("every group has one finite value for each choice", told, values.tolist())


def _check(contract: Contract, relaxation: Relaxation, made: Made, context: Context) -> None:
    assert context.aim is not None

    def once(**more: Any) -> Gains:
        with contract.works("it learns"):
            return estimate(
                relaxation, made.model, made.graph, choices=_CHOICES, context=dataclasses.replace(context, **more)
            )  # fmt: skip

    with tempfile.TemporaryDirectory() as store:
        gains, again = once(), once(store=store)
        contract.clause("the same seed learns the same", gains.id == again.id, f"{gains.rows}, then {again.rows}")
        found = once(store=store)
        contract.clause("what is in the store is taken", found.id == gains.id, f"{gains.rows}, then {found.rows}")
    spent, allowed = gains.counts["spend"], relaxation.spend or 0.0
    contract.clause("no more is spent than is allowed", 0 < spent <= allowed, f"{spent} passes")
    plan = select(made.graph, gains, price("bmac", made.graph, _CHOICES), budget=context.aim.budgets)
    picks = tuple(_CHOICES.index(plan.precisions[name]) for name in context.aim.groups)
    most = context.aim.raised(picks, range(len(picks)))
    contract.clause("the best selection uses the budget up", picks == most, f"{picks}, and {most} fits")
