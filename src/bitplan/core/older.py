"""Files of older formats: their content as today's has it. The only place that reads what was once said in prose."""

from __future__ import annotations

import re
from typing import Any

from bitplan.core.rules import RuleName

_LINKED = re.compile(r"linked to (?P<leader>.+?) \((?P<why>.*)\)")
_REASONS: tuple[tuple[str, RuleName], ...] = (
    (r"first layer", "first"),
    (r"last layer", "last"),
    (r"\d+ input features, fewer than \d+", "narrow"),
    (r"embedding", "embedding"),
    (r"product of activations", "product"),
    (r".* not quantized", "unquantized"),
)


def graph_of_format_1(content: dict[str, Any]) -> dict[str, Any]:
    """A graph from before a layer said which rule fixed it: its reason told."""
    layers = content.get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        return content  # what is wrong with it is said where it is checked
    return content | {"layers": [_with_rule(layer) for layer in layers]}


def _with_rule(layer: dict[str, Any]) -> dict[str, Any]:
    why = str(layer.get("why", ""))
    if not why:
        return layer
    linked = _LINKED.fullmatch(why)
    if linked is None:
        return layer | {"rule": _rule(why)}
    return layer | {"rule": _rule(linked["why"]), "linked_to": linked["leader"]}


def _rule(why: str) -> RuleName:
    """The rule of a reason; one that none of ours gave was written by hand, as a pattern is."""
    return next((rule for pattern, rule in _REASONS if re.fullmatch(pattern, why)), "pattern")
