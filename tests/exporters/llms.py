"""Small language models as their checkpoints name them, and plans for them."""

import torch
from safetensors.torch import save_file
from torch import nn

import bitplan
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Layer, Link
from bitplan.graph.rules import Rules


def llama_shapes(blocks=2, width=256, inner=512, vocabulary=320):
    shapes = {"model.embed_tokens": (vocabulary, width), "lm_head": (vocabulary, width)}
    for i in range(blocks):
        block = f"model.layers.{i}"
        heads = zip("qkvo", (width, width // 4, width // 4, width), strict=True)
        shapes |= {f"{block}.self_attn.{name}_proj": (size, width) for name, size in heads}
        shapes |= {f"{block}.mlp.{name}_proj": (inner, width) for name in ("gate", "up")}
        shapes[f"{block}.mlp.down_proj"] = (width, inner)
    return shapes


def save_llama(path, **sizes):
    torch.manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(shape) / 16 for name, shape in llama_shapes(**sizes).items()}
    save_file(tensors, path)
    return path


def scanned(path, *, choices="w2a16,w4a16", budget="3bpw", rules=None):
    """The plan of a checkpoint scan, made as `bitplan plan model.safetensors` makes it, and its graph."""
    opened = bitplan.open_checkpoint(path)
    graph = bitplan.trace(opened, rules=rules or Rules(narrow=0))
    gains = bitplan.estimate("eagl", opened, graph, choices=choices)
    return bitplan.select(graph, gains, bitplan.price("memory", graph, choices), budget=budget), graph


def module_tree(shapes):
    """A module with linear layers and tables at these dotted names, to apply a recipe to."""
    root = nn.Module()
    for name, (out, into) in shapes.items():
        *folders, last = name.split(".")
        place = root
        for folder in folders:
            if not hasattr(place, folder):
                place.add_module(folder, nn.Module())
            place = getattr(place, folder)
        place.add_module(last, nn.Embedding(out, into) if "embed" in last else nn.Linear(into, out, bias=False))
    return root


def plan_for(precisions, links=(), *, kinds=None, rows=None):
    """A plan with these precisions, and a graph in which layers are linear with rows of 256 unless told."""
    kinds, rows = kinds or {}, rows or {}
    layers = tuple(
        Layer(
            name=name,
            kind=kinds.get(name, "linear"),
            macs=1,
            weights=0 if kinds.get(name) in ("product", "attention") else rows.get(name, 256) * 256,
            in_features=256 if kinds.get(name) == "embedding" else rows.get(name, 256),
        )
        for name in precisions
    )
    graph = Graph(model="net", layers=layers, links=tuple(Link(layers=link, through="x") for link in links))
    parsed = {name: Precision.parse(precision) for name, precision in precisions.items()}
    plan = bitplan.Plan(model="net", precisions=parsed, links=tuple(links), method="test", selector="test")
    return plan, graph
