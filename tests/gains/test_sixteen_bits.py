"""16 bits as the highest choice: groups are lowered of the float network, whose layers have no quantizers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.registry import CHOOSERS

FREE = bitplan.Rules(first=None, last=None, narrow=0)
INPUTS = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
BATCHES = [(INPUTS, INPUTS[:, :3].argmax(dim=1))]
SMALL = {"samples": 32, "batch_size": 32}
OPTIONS = {"drift": SMALL, "drop": SMALL, "drift_in_context": SMALL | {"decide": 32}, "random_search": {"spend": 256}}


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        yield


def network():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).eval()


@pytest.mark.parametrize("choices", ["w8a8,w16a16", "w2a2,w4a4,w16a16", "w2a16,w4a16,w16a16", "w2a8,w4a16"])
@pytest.mark.parametrize("method", ["auto", *(name for name in OPTIONS if name in CHOOSERS)])
def test_methods_that_run_the_network_lower_it_from_there(method, choices):
    model = network()
    graph = bitplan.trace(model, INPUTS[:1], rules=FREE if method == "auto" else bitplan.Rules(last=None, narrow=0))
    given = {"choices": choices, "batches": BATCHES, "loss": F.cross_entropy, "budget": "memory=80%"}
    gains = bitplan.estimate(method, model, graph, **given, **OPTIONS.get(method, {}))
    assert any(abs(value) > 0 for row in gains.rows.values() for value in row)
    plan = bitplan.select(graph, gains, bitplan.price("memory", graph, choices), budget="80%")
    assert plan.limits[0].cost <= plan.limits[0].capacity


def test_drift_is_that_of_networks_with_one_group_quantized_and_calibrated():
    model = network()
    graph = bitplan.trace(model, INPUTS[:1], rules=FREE)
    gains = bitplan.estimate(
        "drift", model, graph, choices="w2a2,w4a4,w16a16", batches=BATCHES, temperature=1.0, **SMALL
    )
    float_scores = model(INPUTS).log_softmax(1).detach()
    for group in graph.selectable:
        (layer,) = group.layers
        found = []
        for bits in ("w2a2", "w4a4"):
            plan = bitplan.Plan.uniform(graph, "w16a16")
            lowered = {"precisions": plan.precisions | {layer.name: bitplan.Precision.parse(bits)}}
            made = bitplan.quantize(model, plan.model_copy(update=lowered), batches=[INPUTS]).eval()
            with torch.no_grad():
                change = float_scores - made(INPUTS).log_softmax(1)
            found.append(float((float_scores.exp() * change).sum(1).mean()))
        low, middle = found
        assert gains.rows[group.name] == pytest.approx((0, low - middle, low), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("method", [name for name in ("fisher", "moments") if name in CHOOSERS])
def test_those_that_watch_quantizers_of_the_highest_choice_say_so(method):
    model = network()
    graph = bitplan.trace(model, INPUTS[:1], rules=FREE)
    with pytest.raises(InputError, match=f"{method} cannot tell what w8a8 changes about weights, which w16a16 leaves"):
        bitplan.estimate(method, model, graph, choices="w8a8,w16a16", batches=BATCHES)
