"""The graph of a checkpoint that comes without its model: what the names and shapes of its tensors tell.

There is no forward pass, so three things are conventions instead of measurements: MACs are those of one
token (linear, recurrent) or one output position (convolution), which is the number of weights, and 0 for an embedding,
which is a look-up; links follow rules on names; the order is that of the file where it keeps one, else that of the
names, embeddings first and encoders before decoders. Which layers are the first and the last, `graph/rules.py`
finds. An
expert of a mixture counts as if every token passed it, and experts are not linked to each other.
"""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bitplan.core.errors import FileError, InputError
from bitplan.core.naming import is_handed, is_recurrent, layer_of, layer_of_quantizer, split_name
from bitplan.core.records import Graph, Layer, Link
from bitplan.core.rules import Rules
from bitplan.graph.rules import IMAGE, Ends, Sizes, apply_rules, find_ends
from bitplan.weights.opened import CheckpointLike, OpenedCheckpoint, natural_key, open_if_path
from bitplan.weights.tensors import FLOATS, Layout, Tensor

_SHOWN = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinkRule:
    """Layers whose names differ only in the part that `members` matches read one tensor, unless `unless` matches."""

    label: str
    members: str
    unless: str = "(?!)"


_CROSS = r"encoder_attn|EncDecAttention|cross_?att"
LINKS: tuple[LinkRule, ...] = (
    LinkRule("q/k/v", r"(?<=[._])[qkv](_proj|_lin)?$", unless=_CROSS),
    LinkRule("k/v", r"(?<=[._])[kv](_proj|_lin)?$"),
    LinkRule("query/key/value", r"(?<=[._])(query|key|value)(_proj)?$", unless=_CROSS),
    LinkRule("key/value", r"(?<=[._])(key|value)(_proj)?$"),
    LinkRule("wq/wk/wv", r"(?<=[._])w[qkv]$"),
    LinkRule("q/kv of latent attention", r"(?<=[._])(q_proj|q_a_proj|kv_a_proj_with_mqa)$"),
    LinkRule("gate/up", r"(?<=[._])(gate|up)_proj$"),
    LinkRule("w1/w3", r"(?<=[._])w[13]$"),
    LinkRule("wi_0/wi_1", r"(?<=[._])wi_[01]$"),
    LinkRule("forward/reverse", r"((?<=weight_ih_l\d)|(?<=weight_ih_l\d\d))(_reverse)?$"),
)


@dataclass(frozen=True)
class Names:
    """Regular expressions that tell the kinds of tensors; replace any of them, or empty `links`.

    `weight` is searched in the tensor's name, the others in the layer's (`core/naming.py`). Weights lie (out, in, …),
    those of `transposed` (in, out) as in GPT-2, those of `stacked` (experts, in, out).
    """

    weight: str = (
        r"(^|\.)weight$|(^|\.)weight_(ih|hh|hr)(_l\d+(_reverse)?)?$|(^|\.)(in|[qkv])_proj_weight$"
        r"|experts\.(gate_up|gate|up|down)_proj$"
    )
    norm: str = r"(^|[._])((layer|batch|group|rms|instance)?_?norm\w*|ln_?\w{0,5}|bn\d*)$"
    embedding: str = (
        r"(^|\.)(embed_tokens|wte|wpe|(word|position|token_type|tok|token)_embeddings?|embed_(in|positions)"
        r"|embeddings?|shared|relative_attention_bias)$"
    )
    transposed: str = r"(^|\.)h\.\d+\.(attn|mlp|crossattention)\.(c_attn|c_proj|c_fc|q_attn)$"
    stacked: str = r"(^|\.)experts\.(gate_up|gate|up|down)_proj$"
    links: tuple[LinkRule, ...] = field(default=LINKS)

    def layout(self, layer: str, shape: tuple[int, ...]) -> Layout:
        """Return the layout of the weight of a layer."""
        if len(shape) == 3 and re.search(self.stacked, layer):
            return "stacked_in_out"
        return "in_out" if len(shape) == 2 and re.search(self.transposed, layer) else "out_in"


def trace_checkpoint(path: CheckpointLike, rules: Rules | None = None, *, names: Names | None = None) -> Graph:
    """Return the graph of a checkpoint file under these rules; warn about ends that are not known."""
    checkpoint = open_if_path(path)
    graph, ends = _read(checkpoint, names or Names())
    _warn_about_left_out(checkpoint, names or Names())
    used = rules or Rules()
    lacking = [end for end in ("first", "last") if not getattr(ends, end) and getattr(used, end) is not None]
    if lacking:
        _log.warning(
            "%s does not tell which layer is the %s one, so none is fixed as that: name it, --rules 'fix=LAYER=%s' "
            "(in Python: Rules(fix=…))", checkpoint.path, " or the ".join(lacking), getattr(used, lacking[0]),
        )  # fmt: skip
    return apply_rules(graph, used, ends)


def _warn_about_left_out(checkpoint: OpenedCheckpoint, names: Names) -> None:
    """Name the matrices that may be weights: bare parameters, parametrized ones, tables of positions."""
    matrices = [one for one in checkpoint.tensors.values() if len(one.shape) > 1 and one.dtype in FLOATS]
    found = [one.name for one in matrices if not _is_weight(one, names) and layer_of_quantizer(one.name) is None]
    left = [name for name in found if not re.search(names.norm, layer_of(name)) and split_name(name)[1] != "bias"]
    if left:
        rest = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        shown = ", ".join(left[:_SHOWN])
        _log.warning("%s: not planned, since they are not named like weights: %s%s", checkpoint.path, shown, rest)


def read_graph(path: CheckpointLike, names: Names | None = None) -> Graph:
    """Return the layers and links of a checkpoint, none of them fixed."""
    checkpoint = open_if_path(path)
    return _read(checkpoint, names or Names())[0]


def _read(checkpoint: OpenedCheckpoint, names: Names) -> tuple[Graph, Ends]:
    weights = _weights(checkpoint.tensors.values(), names)
    if not weights:
        raise FileError(f"{checkpoint.path} holds no float weights under the usual names")
    single = _convolutions_of_one_channel(weights, in_order=checkpoint.in_order)
    layers = list({weight.layer: _layer(weight, names, single[:1]) for weight in weights}.values())
    linked = [name for link in _links(layers, names.links) for name in link.layers]
    ends = find_ends([_sizes(one, names, single) for one in weights], linked, in_order=checkpoint.in_order)
    if not checkpoint.in_order:
        layers.sort(key=lambda layer: _sort_key(layer, ends))
    links = _links(layers, names.links)
    return Graph(model=_name_of_file(checkpoint.path), layers=tuple(layers), links=tuple(links)), ends


class _Weight(NamedTuple):
    """The weight of a layer: its shape, and the kind of the layer."""

    layer: str
    kind: str
    shape: tuple[int, ...]


def _weights(tensors: Iterable[Tensor], names: Names) -> list[_Weight]:
    """Return the weights in their order; a tensor that occurs twice has its first name, as parameters have.

    A table that is also the output layer counts as a linear layer.
    """
    found: list[tuple[Any, _Weight]] = []
    for tensor in tensors:
        if _is_weight(tensor, names):
            place = (tensor.data.ctypes.data, tensor.shape) if tensor.data.size else tensor.name
            found.append((place, _Weight(layer_of(tensor.name), _kind(tensor, names), tensor.shape)))
    first = {place: weight.layer for place, weight in reversed(found)}
    kinds = {place: weight.kind for place, weight in found if weight.kind != "embedding"}
    return [_Weight(first[place], kinds.get(place, weight.kind), weight.shape) for place, weight in found]


def _is_weight(tensor: Tensor, names: Names) -> bool:
    """Tell whether a tensor is the weight of a layer, by shape, type and name; that of a norm is not."""
    layer = layer_of(tensor.name)
    if len(tensor.shape) < 2 or tensor.dtype not in FLOATS or not layer:
        return False
    return bool(re.search(names.weight, tensor.name)) and not re.search(names.norm, layer)


def _kind(tensor: Tensor, names: Names) -> str:
    """Return the kind of a layer by the shape of its weight and its name."""
    name, dimensions = layer_of(tensor.name), len(tensor.shape)
    if is_handed(tensor.name):
        return "parameter"
    if is_recurrent(name):
        return "recurrent"
    if dimensions > 2 and names.layout(name, tensor.shape) != "stacked_in_out":
        return f"conv{dimensions - 2}d"
    return "embedding" if dimensions == 2 and re.search(names.embedding, name) else "linear"


def _convolutions_of_one_channel(weights: list[_Weight], *, in_order: bool) -> list[str]:
    """Return the convolutions that may read an image of one channel; others over one channel are depthwise."""
    channels = {one.layer: one.shape[1] for one in weights[: 1 if in_order else None] if one.kind.startswith("conv")}
    if any(1 < count <= IMAGE for count in channels.values()):
        return []  # the image has more channels
    return [layer for layer, count in channels.items() if count == 1]


def _layer(weight: _Weight, names: Names, single: list[str]) -> Layer:
    """Return kind, MACs and inputs by shape and name.

    Groups of a convolution that is not depthwise do not show in its shape: there `in_features` is that of one group.
    """
    sizes, count = _sizes(weight, names, single), math.prod(weight.shape)
    macs = 0 if sizes.is_table else count
    return Layer(name=sizes.name, kind=sizes.kind, macs=macs, weights=count, in_features=sizes.inputs)


def _sizes(weight: _Weight, names: Names, single: list[str]) -> Sizes:
    """Return the widths that a layer reads and returns; only layers in `single` read one channel."""
    layer, kind, shape = weight
    if kind == "embedding":
        return Sizes(layer, kind, *shape)
    inputs, outputs = shape[:2][::-1] if names.layout(layer, shape) == "out_in" else shape[-2:]
    depthwise = kind.startswith("conv") and inputs == 1 and layer not in single
    return Sizes(layer, kind, outputs if depthwise else inputs, outputs)


def _sort_key(layer: Layer, ends: Ends) -> tuple[int, list[tuple[int, int, str]]]:
    """Return the place of a layer in a file without order: ends, embeddings, names, encoders before decoders."""
    by_name = natural_key(layer.name.replace("decoder", "encoder~"))
    rank = 0 if layer.name in ends.first else 3 if layer.name in ends.last else 1 if layer.kind == "embedding" else 2
    return rank, by_name


def _links(layers: list[Layer], rules: tuple[LinkRule, ...]) -> list[Link]:
    """Link each layer by the first rule that brings it together with another one of as many inputs."""
    links: list[Link] = []
    taken: set[str] = set()
    for rule in rules:
        families: dict[tuple[str, int], list[str]] = defaultdict(list)
        for layer in layers:
            stem = _stem(rule, layer.name) if layer.name not in taken else None
            if stem is not None and layer.kind != "embedding":
                families[stem, layer.in_features].append(layer.name)
        for family in families.values():
            if len(family) > 1:
                links.append(Link(layers=tuple(family), through=f"names (rule {rule.label})"))
                taken.update(family)
    order = {layer.name: index for index, layer in enumerate(layers)}
    return sorted(links, key=lambda link: order[link.layers[0]])


def _stem(rule: LinkRule, name: str) -> str | None:
    """Return a name with a star for the part in which members differ, or None if the rule does not apply."""
    try:
        member = None if re.search(rule.unless, name) else re.search(rule.members, name)
    except re.error as error:
        raise InputError(f"the rule {rule.label!r} for links is not a regular expression: {error}") from None
    return f"{name[: member.start()]}*{name[member.end() :]}" if member else None


def _name_of_file(path: Path) -> str:
    """Return the name of the folder that a checkpoint is or whose index it is, or the stem of the file."""
    place = path.resolve()
    if place.name.endswith(".index.json"):
        return place.parent.name
    return place.name if place.is_dir() else place.stem
