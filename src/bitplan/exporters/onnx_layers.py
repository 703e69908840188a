"""Which layer a node of an ONNX file belongs to: found as the graph is captured, written into the file, read back."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from bitplan.core.naming import layer_of, layer_of_quantizer, split

Node = Any  # onnx.NodeProto
LAYER = "bitplan.layer"
_SCOPES = "pkg.torch.onnx.name_scopes"  # the modules around an operation, from the outermost, and its own name
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum"})
_JOINTS = "./"  # where the name of a node that was made of another goes on


def layers_of_nodes(nodes: Iterable[Node], layers: Collection[str]) -> dict[str, str]:
    """The layer of each captured node that is inside one, by the node's name.

    A node lies in a layer's module, or in its quantizers; torch merges some and forgets where they were, but not the
    names of weights. A layer that is a call in a module, such as a product of
    activations, has no place of its own where it is left float: those of a module are taken in the order of the calls.
    """
    found: dict[str, str] = {}
    calls: dict[str, dict[str, list[str]]] = {}  # module → its calls that multiply → their nodes
    entered: set[str] = set()
    for node in nodes:
        scopes = _scopes(node)
        entered.update(scopes[:-1])
        layer = _layer_around(scopes[:-1], layers) or _layer_of_weight(node, layers)
        if layer is not None:
            found[node.name] = layer
        elif node.op_type in _PRODUCTS and len(scopes) > 1:
            calls.setdefault(scopes[-2], {}).setdefault(scopes[-1], []).append(node.name)
    for module, ordered in calls.items():
        own = [layer for layer in layers if split(layer)[0] == module and layer not in entered]
        if own and len(ordered) % len(own) == 0:
            for place, nodes_of_call in enumerate(ordered.values()):
                found |= dict.fromkeys(nodes_of_call, own[place % len(own)])
    return found


def mark_layers_(nodes: Iterable[Node], known: Mapping[str, str], layers: Collection[str]) -> None:
    """Write into each node which layer it belongs to, where that is known by its name or by what its name begins with.

    Nodes that an exporter made are named after those whose place they take, or after the quantizer they stand for.
    """
    named = {layer: layer for layer in layers} | dict(known)
    for node in nodes:
        layer = longest(node.name, named, _JOINTS)
        quantizer = layer_of_quantizer(node.name)
        layer = quantizer if quantizer in layers else layer
        if layer is not None:
            entry = node.metadata_props.add()
            entry.key, entry.value = LAYER, layer


def layers_of_names(graph: Any) -> dict[str, str]:
    """The layer that each node and each value of a file's graph counts for: the one it is in, or the one before it."""
    found: dict[str, str] = {}
    order: dict[str, int] = {}  # when each value is made
    for number, node in enumerate(graph.node):
        order |= dict.fromkeys(node.output, number)
        own = next((entry.value for entry in node.metadata_props if entry.key == LAYER), None)
        before = max((name for name in node.input if name in found), key=order.__getitem__, default=None)
        layer = own or (found[before] if before is not None else None)
        if layer is not None:
            found |= dict.fromkeys((node.name, *node.output), layer)
    return found


def longest(name: str, known: Mapping[str, str], joints: str) -> str | None:
    """What is known of a name, or else of the longest beginning of it that ends before one of these characters."""
    end = len(name)
    while end > 0:
        if name[:end] in known:
            return known[name[:end]]
        end = max(name.rfind(joint, 0, end) for joint in joints)
    return None


def _scopes(node: Node) -> list[str]:
    written = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "[]")
    scopes: list[str] = ast.literal_eval(written)
    return scopes


def _layer_of_weight(node: Node, layers: Collection[str]) -> str | None:
    return next((layer for layer in map(layer_of, node.input) if layer in layers), None)


def _layer_around(modules: list[str], layers: Collection[str]) -> str | None:
    """The innermost module that is a layer, or the layer whose quantizer one is."""
    for path in reversed(modules):
        if path in layers:
            return path
        owner = layer_of_quantizer(f"{path}.")
        if owner in layers:
            return owner
    return None
