"""The first run of a quantized network proves that it executes its plan, in training and in inference."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitplan
from bitplan.core.errors import InputError
from bitplan.quant.convert import integer_weights
from nets import Net

FREE = bitplan.Rules(first=None, last=None, narrow=0, embeddings=None)
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
NEVER_QUANTIZED = "the plan quantizes layer a, which this network computes in float"


def uniform(model, precision="w4a4", example=X):
    return bitplan.Plan.uniform(bitplan.trace(model, example, rules=FREE), precision)


def unseen():
    """Multiplies below the functions that a quantized network watches; a trace sees it."""
    return Net(lambda net, x: torch.ops.aten.mm(x[0], net.a) + net.b(x[1]), a=matrix(8, 8), b=nn.Linear(8, 8))


def otherwise_in_training():
    return Net(lambda net, x: F.linear(x.sin(), net.a.weight) if net.training else net.a(x), a=nn.Linear(8, 8))


def matrix(*shape):
    return nn.Parameter(torch.randn(*shape))


@pytest.mark.parametrize("made", [unseen, otherwise_in_training])
@pytest.mark.parametrize("run", ["training", "inference", "calibration"])
def test_what_a_traced_plan_quantizes_and_the_network_does_not_is_refused(made, run):
    model = made().eval()
    quantized = bitplan.quantize(model, uniform(model)).train(run == "training")
    assert "a" in integer_weights(quantized)
    with pytest.raises(InputError, match=NEVER_QUANTIZED):
        bitplan.calibrate_(quantized, [X]) if run == "calibration" else quantized(X)


def test_what_cannot_be_reached_is_fixed_as_the_error_says():
    model = unseen()
    rules = FREE.model_copy(update={"fix": {"a": bitplan.Precision.parse("w16a16")}})
    plan = bitplan.Plan.uniform(bitplan.trace(model, X, rules=rules), "w4a4")
    quantized = bitplan.quantize(model, plan)
    bitplan.calibrate_(quantized, [X])
    assert integer_weights(quantized).keys() == {"b"}


def proves(model):
    return bool(model._forward_pre_hooks)


def test_a_network_is_proven_once_and_other_bits_need_no_other_proof():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    first = bitplan.quantize(model, uniform(model))
    assert proves(first)
    bitplan.calibrate_(first, [X])
    assert not proves(first)
    assert not proves(copy.deepcopy(first))
    plan = bitplan.plan_of(first)
    assert not proves(bitplan.quantize(first, uniform(model, "w2a2")))
    fewer = plan.model_copy(update={"precisions": plan.precisions | {"0": bitplan.Precision.parse("w16a16")}})
    assert not proves(bitplan.quantize(first, fewer))
    assert proves(bitplan.quantize(bitplan.quantize(model, fewer), plan)), "nobody has seen layer 0 quantized"
    assert proves(bitplan.quantize(first, uniform(model, "w4a16"))), "nobody has seen inputs left alone"


class Memory:
    """What a forward pass fills, like a cache of keys and values."""

    def __init__(self):
        self.kept = []


def test_a_proof_changes_no_argument_and_draws_no_lots():
    def forward(net, x, memory):
        memory.kept.append(net.a(x))
        return F.dropout(memory.kept[-1], 0.5, training=net.training)

    model = Net(forward, a=nn.Linear(8, 8))
    quantized = bitplan.quantize(model, uniform(model, example=(X, Memory()))).train()
    outputs, memories = [], [Memory(), Memory()]
    for memory in memories:  # the first run is the one that is proven
        torch.manual_seed(0)
        outputs.append(quantized(X, memory))
    assert [len(memory.kept) for memory in memories] == [1, 1]
    assert torch.equal(*outputs)


def test_a_mode_that_wants_other_arguments_is_not_held_against_a_network():
    def forward(net, x, target=None):
        return F.mse_loss(net.a(x), target) if net.training else net.a(x)

    model = Net(forward, a=nn.Linear(8, 8)).eval()
    quantized = bitplan.quantize(model, uniform(model))
    bitplan.calibrate_(quantized, [X])
    assert quantized.eval()(X).shape == X.shape
