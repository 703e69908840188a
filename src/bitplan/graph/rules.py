"""Which layers keep a fixed precision, and why (the paper's section 3.4.1; each rule is an option)."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

from bitplan.core.errors import InputError, suggestion
from bitplan.core.naming import PRODUCT_NAMES, function_of
from bitplan.core.precision import LEFT_ALONE, Precision
from bitplan.core.record import Value
from bitplan.core.records import Graph, Layer


class Rules(Value):
    """The paper's rules by default. None switches a precision rule off, `narrow=0` the one on width.

    `fix` and `free` hold shell wildcards on layer names. They come before the other rules, `free` before `fix`.
    """

    first: Precision | None = Precision(weight_bits=8, act_bits=8)
    last: Precision | None = Precision(weight_bits=8, act_bits=8)
    narrow: int = 128
    narrow_at: Precision = Precision(weight_bits=4, act_bits=4)
    embeddings: Precision | None = Precision(weight_bits=8, act_bits=8)
    products: Precision = Precision(weight_bits=8, act_bits=8)
    fix: dict[str, Precision] = {}
    free: tuple[str, ...] = ()


def read_rules(
    *, first: str = "w8a8", last: str = "w8a8", narrow: int = 128, fix: Iterable[str] = (), free: Iterable[str] = ()
) -> Rules:
    """The rules as people write them; `free` instead of a precision switches a rule off."""
    ends = [None if written == "free" else Precision.parse(written) for written in (first, last)]
    return Rules(
        first=ends[0],
        last=ends[1],
        narrow=narrow,
        fix=parse_fix(fix),
        free=tuple(free),
    )


def apply_rules(graph: Graph, rules: Rules, *, first: str | None = None, last: str | None = None) -> Graph:
    """Fix the layers that a rule names. `first` and `last` say which they are where the order does not."""
    names = [layer.name for layer in graph.layers]
    for pattern in [*rules.fix, *rules.free]:
        if not fnmatch.filter(names, pattern):
            raise InputError(f"the pattern {pattern!r} matches no layer{suggestion(pattern, names)}")
    weighted = [layer.name for layer in graph.layers if layer.weights]
    ends = (first or weighted[0], last or weighted[-1]) if weighted else ("", "")
    layers = {layer.name: _apply(layer, rules, ends) for layer in graph.layers}
    for link in graph.links:
        layers |= _fix_as_one([layers[name] for name in link.layers])
    return Graph(
        model=graph.model,
        layers=tuple(layers[name] for name in names),
        links=graph.links,
        unreached=graph.unreached,
    )


def parse_fix(written: Iterable[str]) -> dict[str, Precision]:
    """Read `pattern=w8a8` texts."""
    fixed: dict[str, Precision] = {}
    for text in written:
        pattern, equals, precision = text.rpartition("=")
        if not equals or not pattern:
            raise InputError(f"{text!r} is not PATTERN=PRECISION, such as 'stem.*=w8a8'")
        fixed[pattern] = Precision.parse(precision)
    return fixed


def _apply(layer: Layer, rules: Rules, ends: tuple[str, str]) -> Layer:
    fixed, why = _ruling(layer, rules, ends)
    return layer.model_copy(update={"fixed": fixed, "why": why if fixed else ""})


def _ruling(layer: Layer, rules: Rules, ends: tuple[str, str]) -> tuple[Precision | None, str]:
    """The precision that a rule gives to a layer, and the reason; the first rule that speaks decides."""
    if not layer.weights:
        function = function_of(layer.name)
        known = function in PRODUCT_NAMES
        return (rules.products, "product of activations") if known else (LEFT_ALONE, f"{function} is not quantized")
    if layer.kind == "recurrent":
        return LEFT_ALONE, "recurrent layers are not quantized"
    if any(fnmatch.fnmatchcase(layer.name, pattern) for pattern in rules.free):
        return None, ""
    for pattern, precision in rules.fix.items():
        if fnmatch.fnmatchcase(layer.name, pattern):
            return precision, f"matches {pattern!r}"
    if layer.name == ends[0] and rules.first:
        return rules.first, "first layer"
    if layer.name == ends[1] and rules.last:
        return rules.last, "last layer"
    if layer.kind == "embedding":
        return rules.embeddings, "embedding"
    if layer.in_features < rules.narrow:
        return rules.narrow_at, f"{layer.in_features} input features, fewer than {rules.narrow}"
    return None, ""


def _fix_as_one(members: list[Layer]) -> Mapping[str, Layer]:
    """A link with a fixed member is fixed as a whole, at the highest precision among its members."""
    fixed = [layer for layer in members if layer.fixed]
    if not fixed:
        return {}
    highest = max(fixed, key=lambda layer: (layer.fixed.weight_bits, layer.fixed.act_bits) if layer.fixed else (0, 0))
    return {
        layer.name: layer
        if layer.fixed == highest.fixed
        else layer.model_copy(
            update={"fixed": highest.fixed, "why": f"linked to {highest.name} ({highest.why})"},
        )
        for layer in members
    }
