"""Where no choice quantizes inputs, no fixed layer does that nobody wrote a precision for."""

import pytest
import torch
from torch import nn

import bitplan
from bitplan.core.precision import Precision
from nets import Net

WEIGHTS_ONLY = "w2a16,w4a16"


def network():
    def forward(self, ids):
        x = self.head(torch.relu(self.narrow(self.stem(self.embed(ids)))))
        return self.out(self.inner(x @ (x.transpose(1, 2) @ x)))

    wide = {"stem": nn.Linear(200, 200), "narrow": nn.Linear(200, 64), "head": nn.Linear(64, 200)}
    return Net(forward, embed=nn.Embedding(10, 200), **wide, inner=nn.Linear(200, 200), out=nn.Linear(200, 3))


def traced(**rules):
    return bitplan.trace(network(), torch.ones(1, 4, dtype=torch.long), rules=bitplan.Rules(**rules))


def planned(graph, choices=WEIGHTS_ONLY, cost="bops"):
    gains = bitplan.estimate("uniform", None, graph, choices=choices)
    plan = bitplan.select(graph, gains, bitplan.price(cost, graph, choices), budget="80%")
    return {name: str(plan.precisions[name]) for name in plan.precisions if name not in ("stem", "narrow", "inner")}


def test_rules_that_nobody_wrote_leave_inputs_alone():
    expected = {"embed": "w8a16", "head": "w4a16", "out": "w8a16", "matmul": "w16a16", "matmul_1": "w16a16"}
    assert planned(traced()) == expected
    again = bitplan.Graph.from_json(traced().to_json())
    assert planned(again) == expected
    uniform = bitplan.Plan.uniform(again, "w4a16").precisions
    assert {name: str(uniform[name]) for name in expected} == expected


def test_beside_choices_that_quantize_inputs_they_are_as_ever():
    expected = {"embed": "w8a8", "head": "w4a4", "out": "w8a8", "matmul": "w8a8", "matmul_1": "w8a8"}
    assert planned(traced(), "w2a2,w4a4") == expected
    assert planned(traced(), "w2a2,w4a16") == expected | {"head": "w4a16"}  # narrow layers get the highest choice


@pytest.mark.parametrize("reread", [False, True])
def test_what_was_written_stays(reread):
    graph = traced(last="w8a8", products="w6a6", fix={"head": "w4a4"})
    graph = bitplan.Graph.from_json(graph.to_json()) if reread else graph
    expected = {"embed": "w8a16", "head": "w4a4", "out": "w8a8", "matmul": "w6a6", "matmul_1": "w6a6"}
    assert planned(graph) == expected


def test_a_link_with_a_usual_member_is_fixed_as_one():
    model = Net(lambda self, x: self.last(self.a(x) + self.b(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    model.last = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    rules = bitplan.Rules(narrow=0, fix={"b": "w8a8"})
    graph = bitplan.trace(model, torch.ones(1, 8), rules=rules)
    assert len(graph.links) == 1
    plan = bitplan.Plan.uniform(graph, "w4a16")
    assert str(plan.precisions["a"]) == str(plan.precisions["b"]) == "w8a16"
    beside = bitplan.trace(model, torch.ones(1, 8), rules=rules.for_choices(["w4a16"]))
    assert bitplan.Plan.uniform(beside, "w4a16").precisions == plan.precisions


@pytest.mark.parametrize("cost", ["bops", "memory"])
def test_fixed_layers_cost_what_the_plan_gives_them(cost):
    graph = traced()
    priced = bitplan.price(cost, graph, WEIGHTS_ONLY)
    beside = traced(first="w8a16", last="w8a16", narrow_at="w4a16", embeddings="w8a16", products="w16a16")
    assert priced.fixed == bitplan.price(cost, beside, WEIGHTS_ONLY).fixed
    assert Precision.parse("w8a16") in graph.fixed_beside(priced.choices).values()
