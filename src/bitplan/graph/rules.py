"""Fix the layers of a graph that a rule names, each with its rule and its reason.

`amend` puts further patterns on a graph that has its rules already.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bitplan.core.errors import InputError, suggestion
from bitplan.core.naming import PRODUCT_NAMES, WEIGHTED, function_of
from bitplan.core.precision import LEFT_ALONE, Precision
from bitplan.core.records import Graph, Layer, Use
from bitplan.core.rules import RuleName, Rules


class Ruling(NamedTuple):
    """The precision that a rule gives a layer, the rule, its reason, and whether the user wrote that precision."""

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
    used = ends or Ends(frozenset(weighted[:1]), frozenset(weighted[-1:]))

    def ruled(by: Rules) -> Graph:
        return _apply_rulings(graph, {layer.name: _ruling(layer, by, used, graph) for layer in graph.layers})

    if "narrow" in rules.model_fields_set:
        return ruled(rules)
    plain, all_widths = rules.model_copy(update={"fix": {}, "free": ()}), {"narrow": 0}
    strict, wider = ruled(plain), ruled(plain.model_copy(update=all_widths))
    if len(strict.selectable) > 1 or len(wider.selectable) == len(strict.selectable):
        return ruled(rules)
    note = {"notes": (_explain_narrow(rules.narrow, strict, wider),)}
    return ruled(rules.model_copy(update=all_widths)).model_copy(update=note)


def _explain_narrow(narrow: int, strict: Graph, wider: Graph) -> str:
    """Explain which rule was left out and why; one group is no choice, since the budget alone decides."""
    left = "nothing" if not strict.selectable else "one group"
    return (
        f"rules: layers with fewer than {narrow} input features are not fixed here, since that would leave {left} of "
        f"{len(wider.selectable)} groups to choose; --rules narrow={narrow} (Rules(narrow={narrow})) fixes them"
    )


def amend(graph: Graph, rules: Rules) -> Graph:
    """Fix and free layers by the patterns of some rules, against the graph's own rules; the rest stays as it is."""
    _check_patterns(rules, graph)
    return _apply_rulings(
        graph, {layer.name: _find_pattern(_ruling_of_layer(layer), layer, rules, graph) for layer in graph.layers}
    )


def _apply_rulings(graph: Graph, rulings: Mapping[str, Ruling | None]) -> Graph:
    """Return the graph under these rulings and no others."""
    layers = {layer.name: _apply_ruling(rulings[layer.name], layer) for layer in graph.layers}
    for link in graph.links:
        members = [layers[name] for name in link.layers]
        layers |= _fix_link(members)
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
    """Raise an error for a pattern that has no effect."""
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


def _apply_ruling(ruling: Ruling | None, layer: Layer) -> Layer:
    """Return the layer with this ruling, or with none, without an earlier one."""
    said = {"fixed": None, "rule": None, "why": "", "written": False} if ruling is None else ruling._asdict()
    return layer.model_copy(update=said | {"linked_to": ""})


def _ruling_of_layer(layer: Layer) -> Ruling | None:
    """Return the ruling that fixed a layer itself, not its link, or None."""
    if layer.fixed is None or layer.rule is None or layer.linked_to:
        return None
    return Ruling(layer.fixed, layer.rule, layer.why, layer.written)


def _find_pattern(otherwise: Ruling | None, layer: Layer, rules: Rules, graph: Graph) -> Ruling | None:
    """Return the ruling of the first pattern that matches a layer, or the other ruling if none does."""
    if not _takes_patterns(layer, graph):
        return otherwise
    if any(fnmatch.fnmatchcase(layer.name, pattern) for pattern in rules.free):
        return None
    for pattern, precision in rules.fix.items():
        if fnmatch.fnmatchcase(layer.name, pattern):
            return Ruling(precision, "pattern", f"matches {pattern!r}")
    return otherwise


def _ruling(layer: Layer, rules: Rules, ends: Ends, graph: Graph) -> Ruling | None:
    """Return the ruling of the first rule that applies to a layer, or None."""
    alone = _ruling_of_uses(graph.uses_of(layer.name))
    if alone is not None:
        return alone
    if not layer.weights:
        return _ruling_of_product(layer, rules)
    return _find_pattern(_usual_ruling(layer, rules, ends), layer, rules, graph)


def _usual_ruling(layer: Layer, rules: Rules, ends: Ends) -> Ruling | None:
    said = rules.model_fields_set
    if layer.name in ends.first and rules.first:
        return Ruling(rules.first, "first", "first layer", "first" in said)
    if layer.name in ends.last and rules.last:
        return Ruling(rules.last, "last", "last layer", "last" in said)
    if layer.kind == "embedding":
        return Ruling(rules.embeddings, "embedding", "embedding", "embeddings" in said) if rules.embeddings else None
    if layer.in_features < rules.narrow:
        why = f"{layer.in_features} input features, fewer than {rules.narrow}"
        return Ruling(rules.narrow_at, "narrow", why, "narrow_at" in said)
    return None


def _ruling_of_uses(uses: Sequence[Use]) -> Ruling | None:
    """Leave a weight in float if the network uses it in a way that cannot be quantized."""
    unknown = [use.function for use in uses if use.function and use.function not in WEIGHTED]
    if unknown:
        return Ruling(LEFT_ALONE, "unquantized", f"{unknown[0]} is not quantized")
    if len({use.computed for use in uses}) > 1:
        return Ruling(LEFT_ALONE, "unquantized", "a weight used as it is and computed anew is not quantized")
    return None


def _ruling_of_product(layer: Layer, rules: Rules) -> Ruling:
    """Fix a product of activations, which has no weights to choose for."""
    function = function_of(layer.name)
    if function in PRODUCT_NAMES:
        return Ruling(rules.products, "product", "product of activations", "products" in rules.model_fields_set)
    return Ruling(LEFT_ALONE, "unquantized", f"{function} is not quantized")


def _fix_link(members: list[Layer]) -> Mapping[str, Layer]:
    """Fix a link with a fixed member as a whole, at the highest precision among its members."""
    leader = max(members, key=lambda layer: layer.fixed.height() if layer.fixed else (0, 0))
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


# Which layer of a file is the first and which the last, where its order or its shapes tell.

IMAGE = 4
"""The most channels that an image has."""

_READ_IN_PARTS = ("embedding", "recurrent", "parameter")


class Ends(NamedTuple):
    """The names of the layers that read a network's input, and of its heads; empty if they are not known."""

    first: frozenset[str]
    last: frozenset[str]


class Sizes(NamedTuple):
    """The number of features that a layer of a file reads and returns, by its shape; a table reads rows."""

    name: str
    kind: str
    inputs: int
    outputs: int

    @property
    def is_table(self) -> bool:
        """True if it looks rows up instead of multiplying."""
        return self.kind == "embedding"

    @property
    def widths(self) -> set[int]:
        """The widths that a layer behind it may read; of a recurrent layer several gates make one output."""
        gates = (1, 3, 4) if self.kind == "recurrent" else (1,)
        return {width for gate in gates for width in (self.outputs // gate, 2 * self.outputs // gate)[: len(gates)]}


def find_ends(layers: Sequence[Sizes], linked: Iterable[str], *, in_order: bool) -> Ends:
    """Return the ends of these layers; `linked` layers share their input, so none of them is the last."""
    if in_order:
        return Ends(_as_set(_find_first(layers)), _as_set(_find_last(layers)))
    names = [layer.name for layer in layers]
    first, last = _readers_of_the_input(layers), _makers_of_the_output(layers, frozenset(linked))
    return Ends(_as_set(_single(first, _lowest_numbers(names))), _as_set(_single(last, _highest_numbers(names))))


def _as_set(end: str | None) -> frozenset[str]:
    return frozenset() if end is None else frozenset({end})


def _find_first(layers: Sequence[Sizes]) -> str | None:
    """Return the first layer of a file, unless the network reads both tokens and images, in whatever order."""
    both = layers[0].is_table and _readers_of_images(layers)
    return None if both else layers[0].name


def _find_last(layers: Sequence[Sizes]) -> str | None:
    """Return the last layer of a file, unless other layers can read its output and a table may follow."""
    last = layers[-1]
    tables = any(layer.is_table for layer in layers)
    return None if last.is_table or (tables and last.outputs in _widths_read(layers)) else last.name


def _readers_of_the_input(layers: Sequence[Sizes]) -> list[str]:
    rows = max((layer.inputs for layer in layers if layer.is_table), default=0)
    tables = [layer.name for layer in layers if layer.is_table and layer.inputs == rows]
    made = set[int]().union(*(layer.widths for layer in layers))
    readers = [layer.name for layer in layers if not layer.is_table and layer.inputs not in made]
    return tables + (_readers_of_images(layers) or _drop_repeated(readers))


def _readers_of_images(layers: Sequence[Sizes]) -> list[str]:
    """Return the convolutions over the fewest channels that are not in a repeated part."""
    for channels in range(1, IMAGE + 1):
        found = [layer.name for layer in layers if layer.kind.startswith("conv") and layer.inputs == channels]
        if _drop_repeated(found):
            return _drop_repeated(found)
    return []


def _makers_of_the_output(layers: Sequence[Sizes], linked: frozenset[str]) -> list[str]:
    """Return layers whose outputs no layer can read whole.

    Gates and packed projections (q, k and v) are read in parts.
    """
    read = _widths_read(layers)
    unread = [layer for layer in layers if layer.outputs not in read and layer.kind not in _READ_IN_PARTS]
    unread = [layer for layer in unread if layer.outputs not in (2 * layer.inputs, 3 * layer.inputs)]
    return _drop_repeated([layer.name for layer in unread if layer.name not in linked])


def _widths_read(layers: Sequence[Sizes]) -> set[int]:
    return {layer.inputs for layer in layers if not layer.is_table}


def _drop_repeated(names: Sequence[str]) -> list[str]:
    """Return the names that differ from all others by more than numbers: those in no repeated part."""
    families: dict[str, list[str]] = defaultdict(list)
    for name in names:
        families[_family(name)].append(name)
    return [family[0] for family in families.values() if len(family) == 1]


def _single(found: Sequence[str], possible: set[str]) -> str | None:
    return found[0] if len(found) == 1 and found[0] in possible else None


def _lowest_numbers(names: Sequence[str]) -> set[str]:
    """Return the lowest of names that differ only in numbers, in natural order: a later one is not the first."""
    return set({_family(name): name for name in reversed(names)}.values())


def _highest_numbers(names: Sequence[str]) -> set[str]:
    return set({_family(name): name for name in names}.values())


def _family(name: str) -> str:
    return re.sub(r"\d+", "#", name)
