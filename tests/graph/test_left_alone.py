"""What no quantizer fits is seen all the same, left alone by the rule that says so, and runs as it did."""

import pytest
import torch
from torch import nn

import bitplan
from bitplan.core.errors import InputError
from nets import Net

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def matrix(*shape, dtype=torch.float32):
    return nn.Parameter(torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1)))


IN_PLACE = {
    "addmm_": (lambda net, x: x.new_zeros(4, 3).addmm_(x, net.part), matrix(8, 3), 96),
    "addmv_": (lambda net, x: x.new_zeros(4).addmv_(x, net.part[0]), matrix(3, 8), 32),
    "baddbmm_": (lambda net, x: x.new_zeros(2, 2, 3).baddbmm_(x.view(2, 2, 8), net.part), matrix(2, 8, 3), 96),
    "addbmm_": (lambda net, x: x.new_zeros(2, 3).addbmm_(x.view(2, 2, 8), net.part), matrix(2, 8, 3), 96),
}
OTHERS = {
    "bilinear": (lambda net, x: net.part(x, x[:, :7]), nn.Bilinear(8, 7, 3), 4 * 8 * 7 * 3),
    "conv_tbc": (lambda net, x: torch.conv_tbc(x.view(4, 1, 8), net.part, x.new_zeros(3)), matrix(2, 8, 3), 144),
    "vdot": (lambda net, x: torch.vdot(x[0], net.part[0]), matrix(2, 8), 8),
}
COMPLEX = {
    "complex einsum": (
        lambda net, x: torch.einsum("bi,io->bo", torch.complex(x, x), net.part).abs(),
        matrix(8, 3, dtype=torch.complex64),
        96,
    ),
    "complex matmul": (
        lambda net, x: torch.fft.irfft(torch.fft.rfft(x) @ torch.view_as_complex(net.part)),
        matrix(5, 3, 2),
        60,
    ),
    "complex linear": (
        lambda net, x: net.part(torch.complex(x, x)).abs(),
        nn.Linear(8, 3, dtype=torch.complex64),
        96,
    ),
}


@pytest.mark.parametrize("function", [*IN_PLACE, *OTHERS, *COMPLEX])
def test_it_is_a_layer_that_is_left_alone(function):
    forward, part, macs = (IN_PLACE | OTHERS | COMPLEX)[function]
    net = Net(lambda net, x: forward(net, net.stem(x)), stem=nn.Linear(8, 8), part=part)
    graph = bitplan.trace(net, X, rules=bitplan.Rules(narrow=0, first=None))
    _, layer = graph.layers
    assert (layer.name, layer.macs, str(layer.fixed), layer.rule) == ("part", macs, "w16a16", "unquantized")
    assert layer.why == f"{function} is not quantized"
    quantized = bitplan.quantize(net, bitplan.Plan.uniform(graph, "w8a8"))
    bitplan.calibrate_(quantized, [X])
    expected = forward(net, quantized.stem(X))
    assert torch.equal(quantized(X), expected)


def test_a_product_of_complex_activations_is_left_alone():
    def forward(net, x):
        spectrum = torch.fft.fft(net.stem(x))
        return net.head((spectrum @ spectrum.t()).abs() @ x)

    net = Net(forward, stem=nn.Linear(8, 8), head=nn.Linear(8, 2))
    graph = bitplan.trace(net, X)
    assert {layer.name: str(layer.fixed) for layer in graph.layers if not layer.weights} == {
        "matmul": "w16a16",
        "matmul_1": "w8a8",
    }
    quantized = bitplan.quantize(net, bitplan.Plan.uniform(graph, "w8a8"))
    bitplan.calibrate_(quantized, [X])  # which proves what runs as planned
    assert quantized(X).isfinite().all()


def test_a_layer_that_reads_what_a_bilinear_one_reads_is_chosen_for():
    net = Net(lambda net, x: net.pair(x, x) + net.line(x), pair=nn.Bilinear(8, 8, 3), line=nn.Linear(8, 3))
    graph = bitplan.trace(net, X, rules=bitplan.Rules(narrow=0, first=None, last=None))
    assert [group.name for group in graph.selectable] == ["line"]


def test_complex_weights_in_a_plan_by_hand_are_one_line():
    plan = bitplan.Plan(model="net", precisions={"part": "w4a4"}, method="by hand", selector="none")
    with pytest.raises(InputError, match="complex numbers, which have no steps: make it from a graph of this model"):
        bitplan.quantize(Net(COMPLEX["complex linear"][0], part=nn.Linear(8, 3, dtype=torch.complex64)), plan)
