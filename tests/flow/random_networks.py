"""Random small networks that use their weights in every way, and an interpreter that tells which layers were executed.

The interpreter looks below torch's functions at the products that are computed. It knows a layer only by the numbers
that its plan and its steps allow: nothing of how bitplan finds, quantizes or proves layers.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from bitplan.core.codes import code_range
from bitplan.quant.convert import quantizers_of

WIDTH, TOKENS = 8, 5
PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "linear": 0, "convolution": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}


def matrix(*shape):
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


def linear():
    return nn.Linear(WIDTH, WIDTH)


def looped(cell, x):
    state, outputs = None, []
    for step in x.unbind(1):
        state = cell(step, state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outputs, 1)


# What a block is made of, given a layer that others have too; and what it does with (B, T, WIDTH).
BLOCKS = {
    "called": (lambda shared: {"l": shared}, lambda net, x: net.l(x)),
    "handed out": (lambda shared: {"l": shared}, lambda net, x: F.linear(x, net.l.weight, net.l.bias)),
    "both": (lambda shared: {"l": shared}, lambda net, x: net.l(x) + F.linear(x.tanh(), net.l.weight)),
    "sliced": (
        lambda shared: {"l": shared},
        lambda net, x: torch.cat([F.linear(x, net.l.weight[:3]), F.linear(x.relu(), net.l.weight[3:])], -1),
    ),
    "transposed": (lambda shared: {"l": shared}, lambda net, x: net.l(x) + x.sin() @ net.l.weight.t().contiguous()),
    "flipped": (lambda shared: {"l": shared}, lambda net, x: F.linear(x, net.l.weight.flip(0))),
    "tied": (lambda shared: {"l": linear(), "other": shared}, lambda net, x: net.l(x)),
    "bare": (lambda shared: {"w": matrix(WIDTH, WIDTH)}, lambda net, x: x @ net.w),
    "einsum": (
        lambda shared: {"w": matrix(2, 4, 4)},
        lambda net, x: torch.einsum("btgi,gio->btgo", x.unflatten(-1, (2, 4)), net.w).flatten(2),
    ),
    "side by side": (
        lambda shared: {"a": matrix(3, WIDTH), "b": matrix(5, WIDTH)},
        lambda net, x: F.linear(x, torch.cat([net.a, net.b])),
    ),
    "parametrized": (lambda shared: {"l": weight_norm(linear())}, lambda net, x: net.l(x)),
    "scaled": (lambda shared: {"l": linear()}, lambda net, x: F.linear(x, net.l.weight * 0.7)),
    "multiplied": (
        lambda shared: {"u": matrix(WIDTH, 6), "v": matrix(6, WIDTH)},
        lambda net, x: F.linear(x, net.u @ net.v),
    ),
    "low rank": (
        lambda shared: {"l": linear(), "u": matrix(WIDTH, 2), "v": matrix(2, WIDTH)},
        lambda net, x: F.linear(x, net.l.weight + net.u @ net.v),
    ),
    "convolution": (lambda shared: {"c": nn.Conv1d(WIDTH, WIDTH, 3, padding=1)}, lambda net, x: net.c(x.mT).mT),
    "lstm": (lambda shared: {"r": nn.LSTM(WIDTH, WIDTH, batch_first=True)}, lambda net, x: net.r(x)[0]),
    "gru": (
        lambda shared: {"r": nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)},
        lambda net, x: net.r(x)[0],
    ),
    "lstm cell": (lambda shared: {"r": nn.LSTMCell(WIDTH, WIDTH)}, lambda net, x: looped(net.r, x)),
    "product": (lambda shared: {"q": linear(), "k": shared}, lambda net, x: net.q(x) @ (net.k(x).mT @ x)),
    "attention": (
        lambda shared: {"q": linear(), "k": linear()},
        lambda net, x: (net.q(x) @ net.k(x).mT / 3).softmax(-1) @ x,
    ),
    "torch's attention": (
        lambda shared: {"m": nn.MultiheadAttention(WIDTH, 2, batch_first=True)},
        lambda net, x: net.m(x, x, x)[0],
    ),
}


class Block(nn.Module):
    def __init__(self, kind, shared):
        super().__init__()
        parts, self._forward = BLOCKS[kind]
        for name, part in parts(shared).items():
            setattr(self, name, part)
        if kind == "tied":
            self.l.weight = self.other.weight

    def forward(self, x):
        return self._forward(self, x)


class Random(nn.Module):
    """Blocks one after the other, some around a shortcut, some of which share a layer; the first may run twice."""

    def __init__(self, kinds, shortcuts, again, seed):
        super().__init__()
        torch.manual_seed(seed)
        shared = linear()
        self.blocks = nn.ModuleList(Block(kind, shared) for kind in kinds)
        self.shortcuts, self.again = shortcuts, again

    def forward(self, x):
        blocks = [*self.blocks, self.blocks[0]] if self.again else [*self.blocks]
        for place, block in enumerate(blocks):
            y = block(x)
            x = x + y if self.shortcuts[place % len(self.shortcuts)] else y
        return x


class Interpreter(TorchDispatchMode):
    """Counts, for each layer of a plan, the products whose operands are on the two grids that the plan gives it."""

    def __init__(self, model, plan):
        super().__init__()
        self.parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.layers = {
            name: list(_pairs(plan.precisions[name], both, plan.uses, name))
            for name, both in quantizers_of(model).items()
        }
        self.executed = dict.fromkeys(self.layers, 0)
        self.unexplained = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        place = PRODUCTS.get(func.overloadpacket.__name__)
        if place is not None:
            self._explain(args[place], args[place + 1])
        return func(*args, **(kwargs or {}))

    def _explain(self, first, second):
        if all(one.untyped_storage().data_ptr() in self.parameters for one in (first, second)):
            return  # a weight is computed from parameters
        grids = [(name, pair) for name, pairs in self.layers.items() for pair in pairs]
        orders = ((first, second), (second, first))
        found = [name for name, (a, b) in grids for x, y in orders if a.holds(x) and b.holds(y)]
        if not found:  # several weights side by side
            wanted = [(name, pair) for name, pair in grids if any(pair[1].holds(x) for x, _ in orders)]
            for x, y in orders:
                beside = [(name, a) for name, (a, b) in wanted if b.holds(x) and a.holds_some(y)]
                if beside and all_held(y, [grid for _, grid in beside]):
                    found = [name for name, _ in beside]
        for name in dict.fromkeys(found):
            self.executed[name] += 1
        if not found:
            self.unexplained.append((tuple(first.shape), tuple(second.shape)))


class Grid:
    """The numbers that codes of some bits have at a step; without a step, any."""

    def __init__(self, step=None, low=0, high=0):
        self.any = step is None
        if step is not None:
            self.values = torch.arange(low, high + 1, dtype=torch.float64) * step.detach().abs().double().item()
            self.near = step.detach().abs().double().item() / 1000

    def member(self, tensor):
        """Which of the numbers of a tensor it has."""
        distances = (tensor.detach().double().flatten()[:, None] - self.values).abs()
        return distances.amin(1) <= self.near

    def holds(self, tensor):
        return self.any or bool(self.member(tensor).all())

    def holds_some(self, tensor):
        return not self.any and bool((self.member(tensor) & (tensor.detach().flatten() != 0)).any())


def all_held(tensor, grids):
    return bool(torch.stack([grid.member(tensor) for grid in grids]).any(0).all())


def _pairs(precision, both, uses, name):
    """The grids of a layer's two operands: weight and input, or those of a product of activations."""
    inputs = [Grid(one.step, *_range(one, precision.act_bits)) for one in both.inputs]
    if both.weight is not None:
        weight = Grid(both.weight.step, *code_range(precision.weight_bits))
        yield weight, inputs[0] if inputs else Grid()
    elif len(inputs) == 5:  # query, key, scores, weights, value
        yield inputs[0], inputs[1]
        yield inputs[3], inputs[4]
    else:
        yield inputs[0], inputs[1]


def _range(quantizer, bits):
    """The codes of an input: signed, or from zero, as calibration saw it; so many bits as the plan says."""
    assert quantizer.range is not None
    return code_range(bits) if quantizer.range[0] < 0 else (0, 2**bits - 1)
