"""apply_rules: a Graph → the same with the layers fixed that a rule names, each with its rule and its reason."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bitplan.core.errors import InputError, suggestion
from bitplan.core.naming import PRODUCT_NAMES, WEIGHTED, function_of
from bitplan.core.precision import LEFT_ALONE, Precision
from bitplan.core.records import Graph, Layer
from bitplan.core.rules import RuleName, Rules
from bitplan.core.uses import Use


class Ruling(NamedTuple):
    """What a rule says of a layer: its precision, which rule it is, and why in words."""

    fixed: Precision
    rule: RuleName
    why: str


def apply_rules(graph: Graph, rules: Rules, *, first: str | None = None, last: str | None = None) -> Graph:
    """Fix the layers that a rule names. `first` and `last` say which they are where the order does not."""
    names = [layer.name for layer in graph.layers]
    _check_patterns(rules, names)
    weighted = [layer.name for layer in graph.layers if layer.weights]
    ends = (first or weighted[0], last or weighted[-1]) if weighted else ("", "")
    layers = {layer.name: _apply(layer, rules, ends, graph.uses_of(layer.name)) for layer in graph.layers}
    for link in graph.links:
        members = [layers[name] for name in link.layers]
        layers |= _fix_as_one(members)
    return Graph(
        model=graph.model,
        layers=tuple(layers[name] for name in names),
        links=graph.links,
        unreached=graph.unreached,
        uses=graph.uses,
    )


def _check_patterns(rules: Rules, names: list[str]) -> None:
    for pattern in [*rules.fix, *rules.free]:
        if not fnmatch.filter(names, pattern):
            raise InputError(f"the pattern {pattern!r} matches no layer{suggestion(pattern, names)}")


def _apply(layer: Layer, rules: Rules, ends: tuple[str, str], uses: Sequence[Use]) -> Layer:
    """The layer with what its rule says, or with nothing, whatever an earlier set of rules said."""
    ruling = _ruling_of_uses(uses) if layer.weights else None
    ruling = ruling or _ruling(layer, rules, ends)
    said = {"fixed": None, "rule": None, "why": ""} if ruling is None else ruling._asdict()
    return layer.model_copy(update=said | {"linked_to": ""})


def _ruling(layer: Layer, rules: Rules, ends: tuple[str, str]) -> Ruling | None:
    """What the first rule says that speaks of a layer; None where none does."""
    if not layer.weights:
        return _ruling_of_product(layer, rules)
    if any(fnmatch.fnmatchcase(layer.name, pattern) for pattern in rules.free):
        return None
    for pattern, precision in rules.fix.items():
        if fnmatch.fnmatchcase(layer.name, pattern):
            return Ruling(precision, "pattern", f"matches {pattern!r}")
    if layer.name == ends[0] and rules.first:
        return Ruling(rules.first, "first", "first layer")
    if layer.name == ends[1] and rules.last:
        return Ruling(rules.last, "last", "last layer")
    if layer.kind == "embedding":
        return Ruling(rules.embeddings, "embedding", "embedding") if rules.embeddings else None
    if layer.in_features < rules.narrow:
        why = f"{layer.in_features} input features, fewer than {rules.narrow}"
        return Ruling(rules.narrow_at, "narrow", why)
    return None


def _ruling_of_uses(uses: Sequence[Use]) -> Ruling | None:
    """What cannot be quantized because of what the network does with it is left alone, whatever else is said."""
    unknown = [use.function for use in uses if use.function and use.function not in WEIGHTED]
    if unknown:
        return Ruling(LEFT_ALONE, "unquantized", f"{unknown[0]} is not quantized")
    if len({use.computed for use in uses}) > 1:
        return Ruling(LEFT_ALONE, "unquantized", "a weight used as it is and computed anew is not quantized")
    return None


def _ruling_of_product(layer: Layer, rules: Rules) -> Ruling:
    """Products of activations have no weights to choose for: quantized at one precision, or not at all."""
    function = function_of(layer.name)
    if function in PRODUCT_NAMES:
        return Ruling(rules.products, "product", "product of activations")
    return Ruling(LEFT_ALONE, "unquantized", f"{function} is not quantized")


def _fix_as_one(members: list[Layer]) -> Mapping[str, Layer]:
    """A link with a fixed member is fixed as a whole, at the highest precision among its members."""

    def height(layer: Layer) -> tuple[int, int]:
        return (layer.fixed.weight_bits, layer.fixed.act_bits) if layer.fixed else (0, 0)

    leader = max(members, key=height)
    if leader.fixed is None:
        return {}
    shared = {
        "fixed": leader.fixed,
        "rule": leader.rule,
        "linked_to": leader.name,
        "why": f"linked to {leader.name} ({leader.why})",
    }
    others = [layer for layer in members if layer.fixed != leader.fixed]
    return {layer.name: layer.model_copy(update=shared) for layer in others}
