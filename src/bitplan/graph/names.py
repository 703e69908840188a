"""The graph of a checkpoint that comes without its model: what the names and shapes of its tensors tell.

There is no forward pass, so three things are conventions instead of measurements: MACs are those of one
token (linear, recurrent) or one output position (convolution), which is the number of weights, and 0 for an embedding,
which is a look-up; links follow rules on names; the order is that of the names (or of the file, where it
keeps one), embeddings first and the head last. An expert of a mixture counts as if every token passed it,
and experts are not linked to each other.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bitplan.core.errors import FileError, InputError
from bitplan.core.naming import is_handed, is_recurrent, layer_of
from bitplan.core.records import Graph, Layer, Link
from bitplan.core.rules import Rules
from bitplan.graph.rules import apply_rules
from bitplan.weights.opened import OpenedCheckpoint, open_checkpoint
from bitplan.weights.tensors import FLOATS, Layout, Tensor


@dataclass(frozen=True)
class LinkRule:
    """Layers whose names differ only in what `members` matches read one tensor, unless `unless` matches."""

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
    """Regular expressions that say what a tensor is; replace any of them, or empty `links`.

    `weight` is searched in the tensor's name, the others in the layer's (`core/naming.py`).
    Weights lie (out, in, …), those of `transposed` (in, out) as in GPT-2, those of `stacked` (experts, in,
    out).
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
    head: str = (
        r"^((model|module|backbone)\.)?"
        r"(lm_head|embed_out|classifier|fc|head|score|qa_outputs|output|linear)(\.\d+)?$"
    )
    transposed: str = r"(^|\.)h\.\d+\.(attn|mlp|crossattention)\.(c_attn|c_proj|c_fc|q_attn)$"
    stacked: str = r"(^|\.)experts\.(gate_up|gate|up|down)_proj$"
    links: tuple[LinkRule, ...] = field(default=LINKS)

    def layout(self, layer: str, shape: tuple[int, ...]) -> Layout:
        """How the weight of a layer lies."""
        if len(shape) == 3 and re.search(self.stacked, layer):
            return "stacked_in_out"
        return "in_out" if len(shape) == 2 and re.search(self.transposed, layer) else "out_in"


def trace_checkpoint(
    path: str | Path | OpenedCheckpoint, rules: Rules | None = None, *, names: Names | None = None
) -> Graph:
    """The graph of a checkpoint file, with the layers fixed that the rules fix."""
    graph = read_graph(path, names)
    return apply_rules(graph, rules or Rules(), first=graph.layers[0].name, last=graph.layers[-1].name)


def read_graph(path: str | Path | OpenedCheckpoint, names: Names | None = None) -> Graph:
    """The layers and links of a checkpoint, none of them fixed."""
    checkpoint = path if isinstance(path, OpenedCheckpoint) else open_checkpoint(path)
    names = names or Names()
    layers = _layers(checkpoint.tensors.values(), names)
    if not layers:
        raise FileError(f"{checkpoint.path} holds no float weights under the usual names")
    return Graph(model=_title(checkpoint.path), layers=tuple(layers), links=tuple(_links(layers, names.links)))


def _layers(tensors: Iterable[Tensor], names: Names) -> list[Layer]:
    layers: list[Layer] = []
    for tensor in tensors:
        if not _is_weight(tensor, names):
            continue
        name = layer_of(tensor.name)
        first_conv = not any("conv" in layer.kind for layer in layers)
        layer = _layer(name, tensor.shape, names, first=first_conv)
        if is_handed(tensor.name):
            layer = layer.model_copy(update={"kind": "parameter"})
        layers.append(layer)
    return sorted(layers, key=lambda layer: _place(layer, names))


def _is_weight(tensor: Tensor, names: Names) -> bool:
    """Whether a tensor is the weight of a layer, by its shape, its type and its name; that of a norm is not."""
    layer = layer_of(tensor.name)
    if len(tensor.shape) < 2 or tensor.dtype not in FLOATS or not layer:
        return False
    return bool(re.search(names.weight, tensor.name)) and not re.search(names.norm, layer)


def _place(layer: Layer, names: Names) -> int:
    """Embeddings first, the head last, the others in between."""
    if layer.kind == "embedding":
        return 0
    return 2 if re.search(names.head, layer.name) else 1


def _layer(name: str, shape: tuple[int, ...], names: Names, *, first: bool) -> Layer:
    """Kind, MACs and inputs by shape and name.

    A convolution with one input channel is depthwise, unless it is the first one. Other groups do not show
    in the shape of a weight: there `in_features` is that of one group.
    """
    weights, layout = math.prod(shape), names.layout(name, shape)
    if len(shape) == 2 and re.search(names.embedding, name):
        return Layer(name=name, kind="embedding", macs=0, weights=weights, in_features=shape[0])
    stacked = layout == "stacked_in_out"
    kind = "linear" if len(shape) == 2 or stacked else f"conv{len(shape) - 2}d"
    kind = "recurrent" if is_recurrent(name) else kind
    inputs = shape[0] if layout == "in_out" else shape[1]
    if kind != "linear" and inputs == 1 and not first:
        inputs = shape[0]
    return Layer(name=name, kind=kind, macs=weights, weights=weights, in_features=inputs)


def _links(layers: list[Layer], rules: tuple[LinkRule, ...]) -> list[Link]:
    """The first rule that brings a layer together with another, of as many inputs, links it."""
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
    """A name with a star for what the rule's members differ in; None where the rule does not speak of it."""
    try:
        member = None if re.search(rule.unless, name) else re.search(rule.members, name)
    except re.error as error:
        raise InputError(f"the rule {rule.label!r} for links is not a regular expression: {error}") from None
    return f"{name[: member.start()]}*{name[member.end() :]}" if member else None


def _title(path: Path) -> str:
    """The name of the folder that a checkpoint is or whose index it is, or of the file without its suffix."""
    place = path.resolve()
    if place.name.endswith(".index.json"):
        return place.parent.name
    return place.name if place.is_dir() else place.stem
