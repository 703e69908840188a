"""Exporters that break one clause each: variations of one that keeps plan and codes in a pickled file."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import nn

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.precision import LEFT_ALONE, Precision
from bitplan.exporters.base import Execution, Exporter, ReadBack
from bitplan.testing import check_exporter


@dataclass(frozen=True)
class Right(Exporter):
    """Precisions and codes as they are."""

    needs_model: ClassVar[bool] = True
    suffix: ClassVar[str] = ".mine"

    def write(self, source, path):
        precisions = {layer: str(one) for layer, one in source.plan.precisions.items()}
        torch.save({"precisions": precisions, "codes": bitplan.integer_weights(source.model)}, path)

    def read(self, path):
        held = torch.load(path)
        precisions = {layer: Precision.parse(one) for layer, one in held["precisions"].items()}
        return ReadBack(precisions, held["codes"])

    @classmethod
    def recognizes(cls, path):
        return path.suffix == ".mine"

    def opened(self, path, model):
        return Execution(model)


@dataclass(frozen=True)
class Widening(Exporter):
    """A recipe that has four bits and none: what is not w4a16 is left alone where it may be."""

    widen: bool = False

    def write(self, source, path):
        others = [layer for layer, one in source.plan.precisions.items() if not self.holds(one)]
        if others and not self.widen:
            raise InputError(self.refusal(others[0]))
        lines = [
            f"{layer} {one if layer not in others else self.instead()}" for layer, one in source.plan.precisions.items()
        ]
        path.write_text("\n".join(lines))

    def holds(self, precision):
        return str(precision) == "w4a16"

    def instead(self):
        return LEFT_ALONE

    def refusal(self, layer):
        return f"mine cannot express {layer}: give --widen"

    def read(self, path):
        return ReadBack({layer: Precision.parse(one) for layer, one in map(str.split, path.read_text().splitlines())})


def broken(base=Right, **parts):
    """The exporter with other parts."""
    kind = dataclass(frozen=True)(type("Mine", (base,), parts))
    return lambda: check_exporter(kind())


def reading(change):
    return lambda self, path: change(Right.read(self, path))


def narrow(found):
    layer = next(iter(found.precisions))
    return replace(found, precisions={**found.precisions, layer: Precision.parse("w2a2")})


def first_lost(found):
    return replace(found, precisions=dict(list(found.precisions.items())[1:]))


def turned(found):
    return replace(found, codes={layer: -codes for layer, codes in found.codes.items()})


def some_codes(found):
    return replace(found, codes=dict(list(found.codes.items())[1:]))


def failing(self, *given):
    raise ZeroDivisionError("no such luck")


def refusing(words):
    def write(self, source, path):
        raise InputError(words.format(layer=next(iter(source.plan.precisions))))

    return write


def unwilling(self, source, path):
    (Widening.write if self.widen else refusing("no {layer}"))(self, source, path)


def always_willing(self, source, path):
    Widening.write(Widening(widen=True), source, path)


def beside(self, source, path):
    Right.write(self, source, path)
    path.with_name("more").write_text("")


@dataclass(frozen=True)
class Demanding(Right):
    option: int = field(kw_only=True)


class Doubled(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return -2 * self.model(x)


class Failing(nn.Module):
    forward = failing


BROKEN = [
    ("it has all that an exporter has", lambda: check_exporter(object())),
    ("all its options have defaults", lambda: check_exporter(Demanding(option=1))),
    ("what it cannot write it refuses with an InputError", broken(write=failing)),
    ("it writes one file and leaves nothing beside it", broken(write=beside)),
    ("a refusal is one line", broken(write=refusing("no {layer}\nat all"))),
    ("a refusal names a layer", broken(write=refusing("no"))),
    ("it reads what it wrote", broken(read=failing)),
    ("it reads back every layer of the plan", broken(read=reading(first_lost))),
    ("it reads back the plan's precisions", broken(read=reading(narrow))),
    ("it reads back the model's codes", broken(read=reading(turned))),
    ("it reads back the codes of every layer", broken(read=reading(some_codes))),
    ("to widen is never to narrow", broken(Widening, instead=lambda self: "w2a2")),
    ("without widen it writes what needs no widening", broken(Widening, write=unwilling, holds=lambda *_: True)),
    ("without widen it refuses what it would widen", broken(Widening, write=always_willing)),
    ("a refusal is one line", broken(Widening, refusal=lambda self, layer: f"{layer}:\ngive --widen")),
    ("a refusal says that widen would help", broken(Widening, refusal=lambda self, layer: f"no {layer}")),
    ("a refusal names a layer that would be widened", broken(Widening, refusal=lambda self, layer: "give --widen")),
    ("it recognizes its own file", broken(recognizes=classmethod(lambda cls, path: False))),
    ("its file runs", broken(opened=lambda self, path, model: Execution(Failing()))),
    ("its file does what the model does", broken(opened=lambda self, path, model: Execution(Doubled(model)))),
]  # fmt: skip


def right():
    broken()()
    broken(Widening)()
