"""The base of recipes: layers as a target sees them, refused by name or widened if it cannot express them."""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from bitplan.core.errors import FileError, InputError
from bitplan.core.naming import is_product, is_recurrent
from bitplan.core.parsing import explain_failures, parse_json
from bitplan.core.precision import LEFT_ALONE_BITS, Precision
from bitplan.core.records import Graph, Plan
from bitplan.core.registry import EXPORTERS
from bitplan.exporters.base import Execution, Exporter, Source
from bitplan.graph.names import Names
from bitplan.quant.sites import Site, find_sites, type_at
from bitplan.store.files import open_file, read_text

log = logging.getLogger(__name__)

_SHOWN = 4
_BY_NAME = (
    ("stack of experts", Names().stacked),
    ("parameter", r"(^|\.)(in|[qkv])_proj_weight$"),
    ("(in, out) matrix", Names().transposed),
)


class RecipeExporter(Exporter):
    """A recipe: a small text that another tool executes, recognized by its first bytes."""

    suffix: ClassVar[str] = ".json"
    starts_with: ClassVar[bytes] = b"{"

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """Return True if the file reads as such a recipe."""
        try:
            with explain_failures(path, "a recipe", "export it again"), open_file(path) as file:
                begins = file.read(len(cls.starts_with)) == cls.starts_with  # nothing large is read whole
            return begins and bool(cls().read(path))
        except FileError:
            return False

    def opened(self, path: Path, model: nn.Module) -> Execution:
        """Raise: bitplan does not execute recipes."""
        name = EXPORTERS.name_of(self)
        raise InputError(
            f"{path} is a recipe for {name}, which {name} executes and bitplan does not: make the network there and "
            "score it there"
        )


@dataclass(frozen=True)
class Part:
    """A layer of a plan: its kind, or "", and the length of a row of its weight, or 0 if unknown."""

    name: str
    precision: Precision
    kind: str = ""
    row: int = 0


@dataclass(frozen=True)
class Expressible:
    """The bits of weights (16 is always possible) and activations that a target can express.

    Layers with the same text from `one` are one layer in the target, so they need one precision.
    """

    name: str
    weight_bits: Callable[[Part], Sequence[int]]
    act_bits: Sequence[int] = ()
    kinds: Sequence[str] = ("linear", "embedding")
    one: Callable[[str], str | None] = lambda name: None

    def fit(self, part: Part) -> Precision:
        """Return the lowest precision of the target at or above the part's."""
        weights = self.weight_bits(part) if self._accepts(part) else ()
        weight = _at_least(part.precision.weight_bits, weights)
        acts = self.act_bits if weight < LEFT_ALONE_BITS else ()  # beside float weights only float
        return Precision(weight_bits=weight, act_bits=_at_least(part.precision.act_bits, acts))

    def why(self, part: Part) -> str:
        """Say why the target lacks this precision for the part."""
        if not self._accepts(part):
            article = "an" if part.kind[0] in "aeiou" else "a"
            return f"{article} {part.kind}"
        fitted, asked = self.fit(part), part.precision
        if fitted.weight_bits != asked.weight_bits:
            rows = f" in rows of {part.row}" if part.row else ""
            return f"{asked.weight_bits}-bit weights{rows}"
        beside = "" if asked.quantizes_weights else " beside float weights"
        return f"{asked.act_bits}-bit activations{beside}"

    def _accepts(self, part: Part) -> bool:
        """Return True if the target quantizes layers of this kind, or the kind is unknown."""
        return part.kind in ("", *self.kinds)


def fit(source: Source, target: Expressible, *, widen: bool) -> list[Part]:
    """Return the layers, without products, at the precisions that the target will have.

    Linked layers, and those that are one layer in the target, keep one precision: if one must be widened, all are.
    """
    parts = {part.name: part for part in _parts(source)}
    fitted, reasons = _fit_parts(parts, source.plan, target)
    changed = {name: (parts[name].precision, fitted[name], why) for name, why in reasons.items()}
    if changed and not widen:
        raise InputError(_refusal(target.name, changed))
    if all(precision.left_alone for precision in fitted.values()):
        raise InputError(f"a recipe for {target.name} would leave every layer of {source.plan.model} at 16 bits")
    if changed:
        log.warning("widened for %s: %s", target.name, _listing(changed))
    return [replace(part, precision=fitted[name]) for name, part in parts.items() if part.kind != "product"]


def _fit_parts(
    parts: Mapping[str, Part], plan: Plan, target: Expressible
) -> tuple[dict[str, Precision], dict[str, str]]:
    """Return the target's precision of each part, and the reason for each that is not the plan's."""
    fitted: dict[str, Precision] = {}
    reasons: dict[str, str] = {}
    for name, part in parts.items():
        fitted[name] = target.fit(part)
        if fitted[name] != part.precision:
            reasons[name] = target.why(part)
    families = [(link, "linked with") for link in plan.links]
    families += [(names, "one in the target with") for names in _merged_layers(parts, target.one)]
    while _lift_once_(fitted, reasons, families, parts, target):
        pass  # a layer may be in two families: lifting one can lift the other
    return fitted, reasons


def can_group(part: Part, size: int) -> bool:
    """Return True if groups of that size divide the rows of a weight, or their length is unknown."""
    if size < 1:
        raise InputError(f"group_size must be at least 1, not {size}")
    return part.row % size == 0


def escape_name(name: str) -> str:
    """Return a name for a target that also takes class names and "re:" patterns: itself if it can be neither."""
    plain = ("." in name or name == name.lower()) and not name.startswith("re:") and name != "_default"
    return name if plain else f"re:{re.escape(name)}\\Z"


def unescape_name(written: str) -> str:
    """Return the name that `literal` wrote."""
    if not written.startswith("re:"):
        return written
    return re.sub(r"\\(.)", r"\1", written.removeprefix("re:").removesuffix("\\Z"), flags=re.DOTALL)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Return the value in a JSON file."""
    with explain_failures(path, "JSON", "export it again"):
        return parse_json(read_text(path))


def parsing_recipe(path: Path, target: str) -> AbstractContextManager[None]:
    """Turn errors inside the block into one line: the file is not a recipe of that target."""
    return explain_failures(path, f"a recipe for {target} as bitplan writes it", "export it again")


def _parts(source: Source) -> list[Part]:
    plan = source.plan
    kinds = _from_graph(source.graph, plan) | _from_model(source.model, plan)
    if not kinds:
        log.warning("without its graph or model, every layer of %s is taken to be linear", plan.model)
    parts: list[Part] = []
    for name, precision in plan.precisions.items():
        kind, row = kinds.get(name, ("", 0))
        if is_recurrent(name):
            kind = "recurrent layer"
        elif kind in ("", "linear"):
            kind = _kind_by_name(name, kind)
        if kind == "embedding":  # what it reads are indices
            precision = Precision.weights_only(precision.weight_bits)
        parts.append(Part(name, precision, kind, row))
    return parts


def _kind_by_name(name: str, kind: str) -> str:
    """Return a kind that the name of a layer tells beyond "linear" or ""."""
    if is_product(name):
        return "product"
    patterns = _BY_NAME if kind else (*_BY_NAME, ("embedding", Names().embedding))
    for better_kind, pattern in patterns:
        if re.search(pattern, name):
            return better_kind
    return kind


def _from_graph(graph: Graph | None, plan: Plan) -> dict[str, tuple[str, int]]:
    if graph is None:
        return {}
    layers = {layer.name: layer for layer in graph.layers}
    kinds_and_rows: dict[str, tuple[str, int]] = {}
    for name in plan.precisions:
        if name not in layers:
            raise InputError(f"the graph {graph.model} has no layer {name!r}: give the one that the plan was made from")
        layer = layers[name]
        kind, row = layer.kind if layer.weights else "product", layer.in_features
        if kind == "embedding" and row:  # its inputs are the rows of the table
            row = layer.weights // row
        kinds_and_rows[name] = (kind, row)
    return kinds_and_rows


def _from_model(model: nn.Module | None, plan: Plan) -> dict[str, tuple[str, int]]:
    if model is None:
        return {}
    return {name: _describe_site(site) for name, site in find_sites(model, plan.precisions, plan.uses).items()}


def _describe_site(site: Site) -> tuple[str, int]:
    """Return the kind of a layer and the length of a row of its weight, which other tools cut into groups."""
    weight, layer_type = site.weight, type_at(site)
    if weight is None:
        return "product", 0
    if layer_type is None:
        return "parameter", 0
    inputs = 0 if layer_type.layout == "in_out" else -1  # the axis that a row runs along: (in, out), or (…, in)
    return layer_type.kind, int(weight.shape[inputs])


def _merged_layers(names: Iterable[str], one: Callable[[str], str | None]) -> list[tuple[str, ...]]:
    """Return the groups of layers that are one layer in the target."""
    members_of: dict[str, list[str]] = defaultdict(list)
    for name in names:
        merged = one(name)
        if merged is not None:
            members_of[merged].append(name)
    return [tuple(members) for members in members_of.values() if len(members) > 1]


def _lift_once_(
    fitted: dict[str, Precision],
    reasons: dict[str, str],
    families: Sequence[tuple[Sequence[str], str]],
    parts: Mapping[str, Part],
    target: Expressible,
) -> bool:
    """Give each family the highest precision of its members; return True if that changed anything."""
    changed = False
    for names, how in families:
        weight = max(fitted[name].weight_bits for name in names)
        act = max(fitted[name].act_bits for name in names)
        top = Precision(weight_bits=weight, act_bits=act)
        widest = next(name for name in names if fitted[name].weight_bits == weight)
        for name in names:
            if fitted[name] != top:
                fitted[name] = target.fit(replace(parts[name], precision=top))
                changed = True
                reasons.setdefault(name, f"{how} {widest} at {top}")
    return changed


def _at_least(bits: int, among: Sequence[int]) -> int:
    return min(each for each in (*among, LEFT_ALONE_BITS) if each >= bits)


Changes = Mapping[str, tuple[Precision, Precision, str]]


def _refusal(target: str, changed: Changes) -> str:
    shown = ", ".join(f"{name} at {asked} ({why})" for name, (asked, _, why) in list(changed.items())[:_SHOWN])
    more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    advice = "plan other precisions for them, or widen them with --widen (widen=True)"
    return f"{target} cannot express {shown}{more}: {advice}"


def _listing(changed: Changes) -> str:
    """Return one text of all widened layers, those with the same change together."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name, (asked, given, why) in changed.items():
        alike[f"{asked} → {given} ({why})"].append(name)
    return "; ".join(f"{how}: {', '.join(names)}" for how, names in alike.items())
