"""Networks run again with some groups lowered in place: bit for bit what a copy lowered by `quantize` gives."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitplan
from bitplan.core.registry import QUANTIZERS
from bitplan.gains.lowering import layers_of, lower
from bitplan.gains.rerun import Rerun
from bitplan.models.resnet import CifarResNet
from bitplan.quant.convert import plan_of, quantizers_of
from bitplan.quant.other_precisions import can_switch, with_precisions
from bitplan.quant.proof import PROVEN, prove_when_run_


class Attention(nn.Module):
    """Tokens (B, T, 16): packed projections, products of activations, a softmax, then a block that is used twice."""

    def __init__(self):
        super().__init__()
        self.inside, self.heads = nn.Linear(12, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.shared = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16))
        self.out = nn.Linear(16, 5)

    def forward(self, x):
        x = self.inside(x)
        x = x + self.heads(x, x, x, need_weights=False)[0]
        x = x + self.shared(x)
        scores = torch.matmul(x, x.transpose(1, 2)).softmax(dim=-1)
        x = x + self.shared(torch.matmul(scores, x))
        return self.out(x.mean(1))


class Remembering(nn.Module):
    """A block that hands something on beside what it returns, and one that writes into what it is given."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(4))
        self.head = nn.Linear(6, 5)
        self.side, self.writes, self.lists = Leaves(self.convs[1]), Writes(self.convs[2]), Appends(self.convs[3])

    def forward(self, x):
        x = self.convs[0](x).relu()
        x = self.side(x)
        x += self.side.left
        self.writes(x)
        found = []
        self.lists(x, found)
        return self.head((x + found[0]).mean((2, 3)))


class Leaves(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv, self.left = conv, None

    def forward(self, x):
        x = self.conv(x)
        self.left = x.sigmoid()
        return x.relu_()


class Writes(Leaves):
    def forward(self, x):
        x.add_(self.conv(x))


class Appends(Leaves):
    def forward(self, x, found):
        found.append(self.conv(x))


class Skips(nn.Module):
    """Skips in a list that blocks share, in a dictionary of an object, or in a buffer that one writes and one reads."""

    def __init__(self, way):
        super().__init__()
        kept = {"list": [], "object": SimpleNamespace(found={}), "buffer": nn.Module()}[way]
        if way == "buffer":
            kept.register_buffer("seen", torch.zeros(3, 6, 12, 12))
        self.body = nn.Sequential(*(Keeps(kept, way) for _ in range(3)))
        self.end, self.head, self.kept, self.way = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 5), kept, way

    def forward(self, x):
        x = self.end(self.body(x))
        if self.way == "buffer":
            return self.head((x + self.kept.seen).mean((2, 3)))
        seen = self.kept.pop() if self.way == "list" else self.kept.found["last"]
        return self.head((x + seen).mean((2, 3)))


class Keeps(nn.Module):
    def __init__(self, kept, way):
        super().__init__()
        self.conv, self.kept, self.way = nn.Conv2d(6, 6, 3, padding=1), kept, way

    def forward(self, x):
        x = self.conv(x).relu()
        if self.way == "list":
            self.kept.append(x)
        elif self.way == "object":
            self.kept.found["last"] = x
        else:
            self.kept.seen.copy_(x)
        return x


class Hooked(nn.Module):
    """Features that a hook gathers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Conv2d(6, 6, 3, padding=1) for _ in range(4)))
        self.head, self.found = nn.Linear(6, 5), {}
        self.body[1].register_forward_hook(self.gather)

    def gather(self, _, __, out):
        self.found["a"] = out

    def forward(self, x):
        x = self.body(x).relu()
        return self.head((x + self.found.pop("a")).mean((2, 3)))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )  # fmt: skip

    def forward(self, x):
        return self.features(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.lstm, self.head = nn.Linear(12, 12), nn.LSTM(12, 10, batch_first=True), nn.Linear(10, 5)

    def forward(self, x):
        return self.head(self.lstm(self.before(x))[0][:, -1])


IMAGES, TOKENS = (3, 6, 12, 12), (3, 7, 12)
NETWORKS = {
    "residual": (lambda: CifarResNet(2), (3, 3, 16, 16)), "attention": (Attention, TOKENS), "plain": (Plain, IMAGES),
    "side effects": (Remembering, IMAGES), "recurrent": (Recurrent, TOKENS), "hook": (Hooked, IMAGES),
    "list": (lambda: Skips("list"), IMAGES), "object": (lambda: Skips("object"), IMAGES),
    "buffer": (lambda: Skips("buffer"), IMAGES),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """As much of a task as is asked for."""

    def forward(self, model, batch):
        return model(batch)


def made(name, choice="w4a4", **options):
    factory, shape = NETWORKS[name]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, batches = factory(), [torch.randn(shape) for _ in range(2)]
    graph = bitplan.trace(model, batches[0], rules=bitplan.Rules(narrow=0))
    model = bitplan.quantize(model, bitplan.Plan.uniform(graph, choice), **options)
    bitplan.calibrate_(model, batches)
    return model.eval(), graph, batches


def rerun(model, batches):
    return Rerun(model, Run(), batches, nn.Module.eval, lambda outputs, _: outputs)


def check(model, graph, batches, lowerings, run=None):
    """In an order in which every network is run after one that changed more."""
    run = run or rerun(model, batches)
    with torch.no_grad():
        as_it_is = [model(batch) for batch in batches]
        for lowered in lowerings:
            layers = layers_of(graph, lowered)
            copy = lower(model, layers).eval()
            for batch, reference, (before, after) in zip(batches, as_it_is, run.pairs(layers), strict=True):
                assert torch.equal(before, reference)
                assert torch.equal(after, copy(batch))
            assert all(map(torch.equal, run.lowered(layers), map(copy, batches)))


def each(graph, choice="w2a2"):
    choice = bitplan.Precision.parse(choice)
    single = [{group.name: choice} for group in graph.selectable]
    return [*single, {}, {name: choice for lowered in single[1::2] for name in lowered}, *single[::-1]]


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_lowered_in_place_is_what_a_copy_would_be(name):
    model, graph, batches = made(name)
    check(model, graph, batches, each(graph))


@pytest.mark.parametrize("method", sorted(QUANTIZERS))
def test_so_it_is_with_every_quantizer(method):
    choice = "w2a8" if method.startswith("ternary") else "w4a4"
    model, graph, batches = made("plain", choice, method=method)
    check(model, graph, batches, each(graph, "w2a4" if method.startswith("ternary") else "w3a3"))


def test_around_a_softmax_bits_stay():
    model, graph, batches = made("attention", "w8a8")
    check(model, graph, batches, each(graph, "w4a4"))


@pytest.mark.parametrize(("before", "after", "in_place"), [("w4a4", "w2a16", False), ("w8a16", "w4a16", True)])
def test_what_is_left_alone_has_no_quantizer_to_switch(before, after, in_place):
    model, graph, batches = made("plain", before)
    assert can_switch(model, layers_of(graph, each(graph, after)[0])) is in_place
    check(model, graph, batches, each(graph, after))


def test_without_room_nothing_is_kept_and_all_is_equal(monkeypatch):
    monkeypatch.setattr("bitplan.gains.rerun.free_memory", lambda device: 10)
    model, graph, batches = made("residual")
    run = rerun(model, batches)
    check(model, graph, batches, each(graph), run)
    assert run._reference == {}


def test_a_network_is_as_it_was_when_a_run_fails():
    model, graph, (batch, _) = made("plain")
    network = lower(model, {}).eval()
    before = network(batch)
    quantizers = quantizers_of(network)
    layers = layers_of(graph, each(graph)[0])
    with with_precisions(network, quantizers, layers):
        assert plan_of(network).precisions.items() >= layers.items()
    with pytest.raises(RuntimeError, match="stop"), with_precisions(network, quantizers, layers):
        raise RuntimeError("stop")
    assert torch.equal(network(batch), before)
    assert plan_of(network) == plan_of(model)


@pytest.mark.parametrize("method", ["drift", "drop"])
def test_methods_give_what_copies_give(method, monkeypatch):
    model, graph, batches = made("residual")
    data = [(batch, torch.arange(len(batch)) % 10) for batch in batches]
    ask = {"choices": "w2a2,w3a3,w4a4", "batches": data, "loss": F.cross_entropy, "batch_size": 3}
    quick = bitplan.estimate(method, model, graph, **ask)
    monkeypatch.setattr("bitplan.gains.rerun.can_switch", lambda model, layers: False)
    assert bitplan.estimate(method, model, graph, **ask).rows == quick.rows


def test_a_network_that_its_first_run_is_to_prove_is_proven_first():
    model, graph, batches = made("residual")
    fresh = bitplan.quantize(model, plan_of(model).model_copy(update={"uses": None}))
    vars(fresh).pop(PROVEN, None)
    prove_when_run_(fresh)
    check(model, graph, batches, each(graph)[:2], rerun(fresh, batches))
