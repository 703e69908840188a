"""Quantizers that break one clause each: variations of steps that end at the largest weight."""

from dataclasses import dataclass

import torch

from bitplan.plugins.quantizers.ternary import LargestWeight
from bitplan.quant.methods import Quantizer
from bitplan.quant.quantizers import InputQuantizer
from bitplan.testing import check_quantizer


@dataclass(frozen=True)
class Mine(Quantizer):
    """Steps that end at the largest weight."""


def broken(weight=None, inputs=None, **parts):
    """The method with other parts, or other members of what it makes."""
    made = type("Weight", (LargestWeight,), weight or {})
    entry = type("Input", (InputQuantizer,), inputs or {})
    parts.setdefault("weight", lambda self, weight, bits, shared, options: made(weight, bits, shared))
    parts.setdefault("input", lambda self, bits, name, options, masked: entry(bits, name, masked=masked))
    return lambda: check_quantizer(dataclass(frozen=True)(type("Mine", (Mine,), parts))())


def failing(self, *given, **more):
    raise ZeroDivisionError("no such luck")


def detached(self, weight, **given):
    return LargestWeight.forward(self, weight).detach()


def infinite(self, v, low, high, times):
    made = InputQuantizer._quantized(self, v, low, high, times)
    return made + (self.step - self.step.detach()).abs().sqrt() if torch.is_grad_enabled() else made


def louder(self, weight, **given):
    return LargestWeight.forward(self, weight) * 1.001


def untrained(self, weight, **given):
    if torch.is_grad_enabled() and self.training:
        raise RuntimeError("not in training")
    return LargestWeight.forward(self, weight)


def growing(self, weight, **given):
    """Larger with every batch of a training."""
    self.count = getattr(self, "count", 0) + self.training
    return LargestWeight.forward(self, weight) * 1.2**self.count


def same_only(self, bits):
    if bits != self.bits:
        raise ValueError(f"{bits} are not {self.bits}")


def forgetting(self, *given, **more):
    LargestWeight._load_from_state_dict(self, *given, **more)
    self.offset = 0.25


def unloadable(self, *given, **more):
    raise ValueError("not with me")


def unpackable(self, weight):
    raise ValueError("not into one file")


def once_only(self, bits):
    if getattr(self, "asked", False):
        raise ValueError("not twice")
    self.asked, self.bits = True, bits


BROKEN = [
    ("it is a Quantizer with bits from 2 to 15", broken(weight_bits=(1, 2))),
    ("it quantizes a network at the bits that it has", broken(weight={"step_of": failing})),
    ("it gives codes of weights and inputs, and the level of each", broken(weight={"levels": failing})),
    (
        "codes are whole numbers of so many bits",
        broken(weight={"coded": lambda self, seen, step: (seen / step).round() * 3, "range": (-400, 400)}),
    ),
    ("a weight becomes the levels of its codes, exactly", broken(weight={"forward": louder})),
    (
        "an input becomes the levels of its codes, exactly",
        broken(inputs={"levels": lambda self: InputQuantizer.levels(self) * 1.001}),
    ),
    ("its networks can be saved and loaded", broken(weight={"_load_from_state_dict": unloadable})),
    ("where its levels are equally far apart, its networks can be packed", broken(weight={"pinned": unpackable})),
    ("loaded, it gives the same answers bit for bit", broken(weight={"_load_from_state_dict": forgetting})),
    ("EAGL counts its codes", broken(weight={"rescale_": once_only})),
    ("it trains", broken(weight={"forward": untrained})),
    ("every weight, and all that it learns, gets a gradient", broken(weight={"forward": detached})),
    ("every gradient is finite", broken(inputs={"_quantized": infinite})),
    ("the loss falls", broken(weight={"forward": growing})),
    ("what was trained can be given other bits it has, and be trained on", broken(weight={"rescale_": same_only})),
]


def right():
    broken()()
