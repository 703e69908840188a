"""Quantized networks on the `meta` device: a tensor left on the CPU is found here, without a GPU."""

import pytest
import torch
import torch.nn.functional as F
from test_uses import COMPUTED, FREE, NETWORKS, X, parts
from torch import nn
from torch.utils._pytree import tree_map

import bitplan
from bitplan.adapters.transformers import transformers
from nets import Net


def attention():
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), X


def scores():
    net = Net(
        lambda net, x: (net.q(x) @ net.k(x).mT).softmax(-1) @ F.scaled_dot_product_attention(x, x, x),
        q=nn.Linear(8, 8),
        k=nn.Linear(8, 8),
    )
    return net, X


def convolutions():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, groups=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4),
        nn.ConvTranspose2d(8, 4, 2, groups=2), nn.Flatten(), nn.LazyLinear(5),
    )  # fmt: skip
    images = torch.randn(2, 3, 8, 8)
    net(images)
    return net, images


def table():
    table, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    head.weight = table.weight
    return Net(lambda net, i: net.head(net.table(i).tanh()), table=table, head=head), torch.arange(10).view(2, 5)


def recurrent():
    return nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True), X


def bert():
    library = transformers("this test")
    small = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = library.BertConfig(**small, num_attention_heads=2, attn_implementation="eager")
    return library.BertForSequenceClassification(config), {"input_ids": torch.randint(0, 50, (2, 6))}


BUILT = {"attention": attention, "scores": scores, "convolutions": convolutions, "table": table, "lstm": recurrent}
BUILT |= {name: (lambda name=name: (Net((NETWORKS | COMPUTED)[name][0], **parts()), X)) for name in NETWORKS | COMPUTED}
BUILT["bert"] = bert


def outputs(model, example):
    out = model(**example) if isinstance(example, dict) else model(example)
    out = out["logits"] if isinstance(example, dict) else out
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", BUILT)
def test_forward_and_backward_leave_nothing_on_the_cpu(name, per_channel):
    torch.manual_seed(0)
    model, example = BUILT[name]()
    graph = bitplan.trace(model, example, rules=FREE)
    per_channel = per_channel and name != "resized"  # which has no channels of its own
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"), per_channel=per_channel)
    bitplan.calibrate_(quantized, [example])
    moved = tree_map(lambda tensor: tensor.to("meta"), example)
    for training in (True, False):
        there = quantized.to("meta").train(training)
        out = outputs(there, moved)
        assert out.is_meta
        out.sum().backward()
    used = [parameter for parameter in there.parameters() if parameter.grad is not None]
    assert used
    assert all(parameter.grad.is_meta for parameter in used)
    assert all(tensor.is_meta for tensor in there.state_dict().values())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["attention", "scores", "convolutions", "lstm", "bert", "scaled"])
def test_uncalibrated_too(name, training):
    model, example = BUILT[name]()
    graph = bitplan.trace(model, example, rules=FREE)
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4")).to("meta").train(training)
    out = outputs(quantized, tree_map(lambda tensor: tensor.to("meta"), example))
    assert out.is_meta
    out.sum().backward()
