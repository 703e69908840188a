"""The contract of costs."""

from __future__ import annotations

from bitplan.core.precision import parse_choices
from bitplan.core.records import Graph
from bitplan.costs.base import Cost, CostWithUnit
from bitplan.testing.contract import Contract
from bitplan.testing.networks import hand_made_graph

_CHOICES = ("w2a2,w4a4", "w2a2,w3a3,w4a4,w8a8")


def check_cost(cost: Cost, *, graph: Graph | None = None) -> None:
    """Hold a cost to its contract, on a graph made by hand unless one is given (a table knows only its own layers)."""
    contract = Contract(f"cost {getattr(cost, '__name__', type(cost).__name__)}")
    contract.clause("it says its unit (@measured_in)", isinstance(cost, CostWithUnit) and bool(cost.unit))
    graph = graph or hand_made_graph()
    for choices in map(parse_choices, _CHOICES):
        for layer in graph.layers:
            for precision in (layer.fixed,) if layer.fixed else choices:
                with contract.works("it prices every layer at every choice"):
                    value, again = cost(layer, precision), cost(layer, precision)
                found = f"{value!r} for {layer.name} at {precision}"
                contract.clause("a cost repeats", value == again, f"{found}, then {again!r}")
                if value is None and layer.fixed:  # it has no number for a layer that no choice depends on
                    continue
                whole = isinstance(value, int) and not isinstance(value, bool)
                contract.clause("a cost is a whole number", whole, found)
                contract.clause("a cost is not below 0", value is not None and value >= 0, found)
