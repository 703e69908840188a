"""apply_rules: a Graph → the same with the layers fixed that a rule names, each with its rule and its reason.

`amend` puts further patterns on a graph that has its rules already.
"""

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
from bitplan.graph.ends import Ends


class Ruling(NamedTuple):
    """What a rule says of a layer: its precision, which rule it is, why in words; and if that precision was written."""

    fixed: Precision
    rule: RuleName
    why: str
    written: bool = False


def apply_rules(graph: Graph, rules: Rules, ends: Ends | None = None) -> Graph:
    """Fix the layers that a rule names; `ends` says which are the first and the last where the order does not.

    The rule on narrow layers is left out, and a note says so, where it would leave no choice and nobody wrote it;
    whether that is so depends on the network and not on patterns, so that `amend` does what they do here.
    """
    _check_patterns(rules, graph)
    weighted = [layer.name for layer in graph.layers if layer.weights]
    used = ends or (Ends(weighted[0], weighted[-1]) if weighted else Ends(None, None))

    def ruled(by: Rules) -> Graph:
        return _ruled(graph, {layer.name: _ruling(layer, by, used, graph) for layer in graph.layers})

    if "narrow" in rules.model_fields_set:
        return ruled(rules)
    plain, all_widths = rules.model_copy(update={"fix": {}, "free": ()}), {"narrow": 0}
    strict, wider = ruled(plain), ruled(plain.model_copy(update=all_widths))
    if len(strict.selectable) > 1 or len(wider.selectable) == len(strict.selectable):
        return ruled(rules)
    told = {"notes": (_left_out(rules.narrow, strict, wider),)}
    return ruled(rules.model_copy(update=all_widths)).model_copy(update=told)


def _left_out(narrow: int, strict: Graph, wider: Graph) -> str:
    """Which rule was left out, and what it would have left; one group is no choice, since the budget alone decides."""
    left = "nothing" if not strict.selectable else "one group"
    return (
        f"rules: layers with fewer than {narrow} input features are not fixed here, since that would leave {left} of "
        f"{len(wider.selectable)} groups to choose; --rules narrow={narrow} (Rules(narrow={narrow})) fixes them"
    )


def amend(graph: Graph, rules: Rules) -> Graph:
    """Fix and free by the patterns of some rules what a graph's own rules say otherwise; the rest stays as it is."""
    _check_patterns(rules, graph)
    return _ruled(graph, {layer.name: _pattern_or(_own_ruling(layer), layer, rules, graph) for layer in graph.layers})


def _ruled(graph: Graph, rulings: Mapping[str, Ruling | None]) -> Graph:
    """The graph under these rulings and no others."""
    layers = {layer.name: _with(rulings[layer.name], layer) for layer in graph.layers}
    for link in graph.links:
        members = [layers[name] for name in link.layers]
        layers |= _fix_as_one(members)
    return Graph(
        model=graph.model,
        layers=tuple(layers.values()),
        links=graph.links,
        unreached=graph.unreached,
        uses=graph.uses,
        integers=graph.integers,
        notes=graph.notes,
    )


def _check_patterns(rules: Rules, graph: Graph) -> None:
    """Refuse a pattern that has no effect."""
    names = [layer.name for layer in graph.layers]
    ruled = {layer.name for layer in graph.layers if _takes_patterns(layer, graph)}
    for pattern in [*rules.fix, *rules.free]:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise InputError(f"the pattern {pattern!r} matches no layer{suggestion(pattern, names)}")
        if ruled.isdisjoint(found):
            raise InputError(f"the pattern {pattern!r} matches only {found[0]}, which is not chosen for")


def _takes_patterns(layer: Layer, graph: Graph) -> bool:
    return bool(layer.weights) and _ruling_of_uses(graph.uses_of(layer.name)) is None


def _with(ruling: Ruling | None, layer: Layer) -> Layer:
    """The layer with what a ruling says, or with nothing, whatever an earlier one said."""
    said = {"fixed": None, "rule": None, "why": "", "written": False} if ruling is None else ruling._asdict()
    return layer.model_copy(update=said | {"linked_to": ""})


def _own_ruling(layer: Layer) -> Ruling | None:
    """What fixed a layer itself; None where nothing did, or only its link."""
    if layer.fixed is None or layer.rule is None or layer.linked_to:
        return None
    return Ruling(layer.fixed, layer.rule, layer.why, layer.written)


def _pattern_or(otherwise: Ruling | None, layer: Layer, rules: Rules, graph: Graph) -> Ruling | None:
    """What the first pattern says that matches a layer; where none does, what is said otherwise."""
    if not _takes_patterns(layer, graph):
        return otherwise
    if any(fnmatch.fnmatchcase(layer.name, pattern) for pattern in rules.free):
        return None
    for pattern, precision in rules.fix.items():
        if fnmatch.fnmatchcase(layer.name, pattern):
            return Ruling(precision, "pattern", f"matches {pattern!r}")
    return otherwise


def _ruling(layer: Layer, rules: Rules, ends: Ends, graph: Graph) -> Ruling | None:
    """What the first rule says that speaks of a layer; None where none does."""
    alone = _ruling_of_uses(graph.uses_of(layer.name))
    if alone is not None:
        return alone
    if not layer.weights:
        return _ruling_of_product(layer, rules)
    return _pattern_or(_usual_ruling(layer, rules, ends), layer, rules, graph)


def _usual_ruling(layer: Layer, rules: Rules, ends: Ends) -> Ruling | None:
    said = rules.model_fields_set
    if layer.name == ends.first and rules.first:
        return Ruling(rules.first, "first", "first layer", "first" in said)
    if layer.name == ends.last and rules.last:
        return Ruling(rules.last, "last", "last layer", "last" in said)
    if layer.kind == "embedding":
        return Ruling(rules.embeddings, "embedding", "embedding", "embeddings" in said) if rules.embeddings else None
    if layer.in_features < rules.narrow:
        why = f"{layer.in_features} input features, fewer than {rules.narrow}"
        return Ruling(rules.narrow_at, "narrow", why, "narrow_at" in said)
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
        return Ruling(rules.products, "product", "product of activations", "products" in rules.model_fields_set)
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
        "written": leader.written,
        "linked_to": leader.name,
        "why": f"linked to {leader.name} ({leader.why})",
    }
    others = [layer for layer in members if layer.fixed != leader.fixed]
    return {layer.name: layer.model_copy(update=shared) for layer in others}
