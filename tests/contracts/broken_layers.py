"""Layer types that break one clause each: variations of a gated product."""

from dataclasses import replace

import torch
from torch import nn

from bitplan.quant.layers import Channels, LayerType
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.testing import check_layer
from nets import Gated, GatedType, QuantizedGated


class Loud(Gated):
    def forward(self, x):
        return super().forward(x) + 1


class Idle(Gated):
    def forward(self, x):
        return x


def broken(forward=None, **parts):
    """The type with other parts, or another forward of its counterpart."""
    if forward is not None:
        parts["quantized"] = type("Counterpart", (QuantizedGated,), {"forward": forward})
    return lambda: check_layer(type("Mine", (GatedType,), parts))


def of(module):
    return lambda self: (module(), torch.randn(5, 6))


def second_axis(self, module):
    return Channels((1,))


def failing(self, *given):
    raise ZeroDivisionError("no such luck")


def plain(self, x):
    """Its weight as it is, though the quantizer is asked."""
    self.weight_quantizer(self.weight)
    return (self.input_quantizer(x) @ self.weight) * self.gate.sigmoid()


def deaf(self, x):
    """Its input as it is."""
    return (x @ self.weight_quantizer(self.weight)) * self.gate.sigmoid()


def untrained(self, x):
    if self.training and x.requires_grad is False and torch.is_grad_enabled():
        raise RuntimeError("not in training")
    return QuantizedGated.forward(self, x)


def detached(self, x):
    return (self.input_quantizer(x) @ self.weight_quantizer(self.weight)) * self.gate.detach().sigmoid()


def rough(self, x):
    """Nothing is added, with a gradient that is not a number."""
    nothing = (self.gate * 0).sqrt() * 0
    return QuantizedGated.forward(self, x) + (nothing if self.training else 0)


def remembering(self, x):
    """What it saw in calibration is in no state dictionary."""
    both = isinstance(self.weight_quantizer, WeightQuantizer) and isinstance(self.input_quantizer, InputQuantizer)
    if both and self.input_quantizer.observation is not None:
        self.shift = 1.0
    return QuantizedGated.forward(self, x) + self.__dict__.get("shift", 0.0)


def ungated(self, module, operands):
    """A kernel that forgets the gate."""
    return replace(operands, codes=operands.codes.t().contiguous()).linear()


class Noted(Gated):
    """Has more to say than tensors, once it is quantized."""

    def get_extra_state(self):
        return {"note": "mine"}

    def set_extra_state(self, state):
        pass


BROKEN = [
    ("it is made without arguments", lambda: check_layer(LayerType)),
    ("its example is a module and an input that it takes", broken(example=lambda self: (Gated(), torch.randn(5, 7)))),
    ("it can stand beside the other layer types", broken(modules=(nn.Linear,))),
    ("its example is of this type", broken(example=of(lambda: nn.Linear(6, 4)))),
    ("`weights` are names of its parameters", broken(weights="kernel")),
    ("`channels` are axes of its weights", broken(channels=lambda self, module: Channels((2,)))),
    ("its example multiplies by its weights", broken(modules=(Idle,), example=of(Idle))),
    ("it knows the forward of its example", broken(example=of(Loud))),
    ("its example can be quantized and calibrated", broken(failing)),
    ("quantized, it does with its codes what it did with its weights", broken(plain)),
    ("with its input quantized it does what it did with such an input", broken(deaf)),
    ("it trains", broken(untrained)),
    ("every parameter and every step gets a gradient", broken(detached)),
    ("every gradient is finite", broken(rough)),
    ("it can be saved and packed, and loaded", broken(modules=(Noted,), example=of(Noted))),
    ("loaded, it gives the same answers bit for bit", broken(remembering)),
    ("its integer kernel, if it has one, computes the same", broken(integer=ungated)),
    ("EAGL counts its weights, with one step and with one per channel", broken(layout="out_in", channels=second_axis)),
]  # fmt: skip


def right():
    check_layer(GatedType)
