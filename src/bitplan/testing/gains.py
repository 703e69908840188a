"""The contract of gains."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from bitplan.core.precision import parse_choices
from bitplan.core.records import Gains, Graph
from bitplan.core.registry import GAINS, SELECTORS
from bitplan.core.trials import Recipe
from bitplan.gains.base import Context, Gain, LayerGains, add_budget, estimate, is_bound, make_record, needs_model
from bitplan.tasks.base import load_task
from bitplan.testing.contract import Contract
from bitplan.testing.networks import branching, hand_made_graph

_STRUCTURAL_CHOICES = ("w2a2,w4a4", "w2a2,w3a3,w4a4,w8a8")
_CHOICES = ("w2a2,w4a4", "w2a2,w3a3,w4a4")  # the network is at the highest
_BUDGET = "70%"  # for those that hold for one


def check_gain(
    gain: Gain, *, model: nn.Module | None = None, graph: Graph | None = None, context: Context | None = None
) -> None:
    """Hold a gain to its contract, on a small quantized network and two steps of digits unless others are given.

    A structural gain is given no model. A model of your own comes with its graph, and is at w4a4.
    """
    contract = Contract(f"gain {GAINS.name_of(gain)}")
    contract.has_all_of(gain, Gain, "a gain")
    contract.clause("its selector is one that is registered", gain.selector in SELECTORS, gain.selector)
    if needs_model(gain):
        start = branching()
        model, graph = (start.model, start.graph) if model is None or graph is None else (model, graph)
        setting = context or Context(task=load_task("digits"), recipe=Recipe(steps=2, batch_size=16), seed=1)
        for choices in _CHOICES:
            budget = _BUDGET if is_bound(gain) and setting.aim is None else None
            with contract.leaves_as_it_was(model):
                _check(
                    contract, gain, model, graph, choices, add_budget(setting, graph, parse_choices(choices), budget)
                )
        return
    for choices in _STRUCTURAL_CHOICES:
        _check(contract, gain, None, graph or hand_made_graph(), choices, context or Context(seed=3))


def _check(
    contract: Contract, gain: Gain, model: nn.Module | None, graph: Graph, written: str, context: Context
) -> None:
    choices = parse_choices(written)
    with contract.works("it estimates what it is asked for"):
        found = gain.layer_gains(model, graph, choices, context)
    contract.clause("it gives LayerGains", isinstance(found, LayerGains), type(found).__name__)
    layers = [layer.name for group in graph.selectable for layer in group.layers]
    _check_rows(contract, found.values, layers, len(choices))
    for name, row in (found.errors or {}).items():
        sound = len(row) == len(choices) and all(math.isfinite(error) and error >= 0 for error in row)
        contract.clause("errors are finite and not below 0, one for each choice", sound, f"{name} has {row}")
    clause = "what it found, and its options, can be written down"
    with contract.works(clause):
        first = make_record(gain, GAINS.name_of(gain), found, graph, choices, context.seed, found.work)
        if is_bound(gain) and context.aim is not None:
            first = first.model_copy(update={"budgets": context.aim.budgets})
        again = Gains.from_json(first.to_json())
    contract.clause(clause, again == first, "it reads back other than it was")
    with contract.works("it estimates what it is asked for"):
        second = estimate(gain, model, graph, choices=choices, context=context)
    contract.clause("the same seed gives the same gains", first.id == second.id, _difference(first, second))


def _check_rows(contract: Contract, values: Mapping[str, tuple[float, ...]], layers: list[str], choices: int) -> None:
    for name in layers:
        contract.clause("every selectable layer gets values", name in values, f"{name} has none")
        row = values[name]
        contract.clause("every layer gets one value for each choice", len(row) == choices, f"{name} has {row}")
        contract.clause("every value is a finite number", all(map(math.isfinite, row)), f"{name} has {row}")
        contract.clause("the value at the lowest choice is 0", row[0] == 0, f"{name} has {row}")


def _difference(first: Gains, second: Gains) -> str:
    parts = [
        part for part in ("rows", "errors", "histograms", "counts") if getattr(first, part) != getattr(second, part)
    ]
    return f"other {' and '.join(parts)}"
