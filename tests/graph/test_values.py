"""Models that decide by values are traced on request with some; for others the graph is the same either way."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bitplan
from bitplan.core.errors import InputError, TraceError
from nets import Net


class Decides(nn.Module):
    """Takes a way by the mean of its input, and reads as many rows as a number in it says."""

    def __init__(self):
        super().__init__()
        self.stem, self.low, self.high, self.head = (nn.Linear(*sizes) for sizes in ((4, 8), (8, 8), (8, 8), (8, 3)))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        side = self.high if x.mean() > 0 else self.low
        return self.head(side(self.stem(x[: int(x.abs().max())])))


@pytest.mark.parametrize(("sign", "taken"), [(1, "high"), (-1, "low")])
def test_the_way_is_followed_that_the_example_takes(sign, taken):
    model = Decides().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    example = sign * torch.full((5, 4), 3.0)
    with pytest.raises(
        TraceError, match=r"decides by the values of a tensor .*--input values \(in Python: .*values=True"
    ):
        bitplan.trace(model, example)
    graph = bitplan.trace(model, example, values=True)
    assert [(layer.name, layer.macs) for layer in graph.layers] == [("stem", 96), (taken, 192), ("head", 72)]
    assert graph.unreached == ({"high": "low", "low": "high"}[taken],)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(quantized, [example])
    assert bitplan.trace(quantized, example, values=True) == graph


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.packed, self.head = nn.Embedding(9, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 9)
        self.head.weight = self.words.weight
        self.matrix = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        x = self.words(x)
        x, _ = self.packed(x, x, x, need_weights=False)
        return self.head(F.linear(x, self.matrix) + torch.einsum("bij,bkj->bik", x, x) @ x)


def twins(net, x):
    return net.head(net.one(x) + net.other(x.contiguous()))


NETWORKS = {
    "convolutions": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(),
                                           nn.ConvTranspose2d(8, 4, 3, groups=2)), torch.randn(2, 3, 9, 9)),
    "attention": lambda: (Attends(), torch.ones(5, 2, dtype=torch.long)),
    "encoder": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)),
    "recurrent": lambda: (nn.LSTM(4, 6, 2, bidirectional=True, batch_first=True), torch.randn(2, 5, 4)),
    "linked": lambda: (Net(twins, one=nn.Linear(4, 4), other=nn.Linear(4, 4), head=nn.Linear(4, 2)), torch.ones(2, 4)),
}  # fmt: skip


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_values_change_nothing_for_a_model_that_does_not_ask_for_them(network, kind):
    model, example = NETWORKS[network]()
    model.to(kind)
    assert bitplan.trace(model, example, values=True) == bitplan.trace(model, example)


def test_what_has_no_values_is_refused(tmp_path):
    model = nn.Linear(4, 4)
    with pytest.raises(TraceError, match="the example has shapes only"):
        bitplan.trace(model, torch.empty(1, 4, device="meta"), values=True)
    with pytest.raises(TraceError, match="weight is on the meta device"):
        bitplan.trace(model.to("meta"), torch.empty(1, 4), values=True)
    torch.save({"a.weight": torch.ones(2, 2)}, tmp_path / "a.pth")
    with pytest.raises(InputError, match="a file of weights is not run"):
        bitplan.trace(tmp_path / "a.pth", values=True)
