"""Rewrite a captured ONNX graph: replace nodes, add tensors, drop unused ones, say which layer a node belongs to."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitplan.adapters.onnx import checked_bytes, onnx, read
from bitplan.core.errors import FileError, InputError
from bitplan.core.naming import layer_of, layer_of_quantizer, split_name
from bitplan.core.parsing import explain_failures
from bitplan.core.records import Plan
from bitplan.exporters.base import Source
from bitplan.exporters.bit_packing import pack, packed_bytes, unpack
from bitplan.exporters.capture import DOMAIN, capture
from bitplan.quant.convert import integer_weights, quantizers_of, weight_steps, weights_of
from bitplan.quant.weight_groups import GroupedWeight

Node = Any  # onnx.NodeProto
LARGEST = 2**31 - 2**20  # bytes: protocol buffers end at 2 GB
_PLAN = "bitplan.plan"
_EXPORTER = "bitplan.exporter"


class Draft:
    """An ONNX graph that an exporter rewrites; `groups` lets in weights whose groups have scales of their own."""

    def __init__(self, source: Source, opset: int, *, groups: bool = False) -> None:
        model = source.model
        assert model is not None
        if source.example is None:
            raise InputError(
                "an ONNX graph is found by running the model: give an example of its input, --input 1x3x224x224 "
                "(in Python: example=…)"
            )
        _refuse_other_types(model)
        _refuse_large(model)
        bits = source.plan.precisions
        self.weights = _read_weights(model, source.plan, groups=groups)
        self.proto = capture(model, source.example, opset=opset)
        self.graph = self.proto.graph
        self._layers = layers_of_nodes(self.graph.node, bits)
        self.written: dict[str, str] = {}  # layer → the value that is its weight
        self._onnx = onnx()
        self._names = {value.name for value in (*self.graph.initializer, *self.graph.input)}
        self._names |= {name for node in self.graph.node for name in node.output}

    def node(
        self, kind: str, inputs: Iterable[str], output: str, name: str, *, domain: str = "", **attributes: Any
    ) -> Node:
        """Return a new node with one output."""
        return self._onnx.helper.make_node(kind, list(inputs), [output], name=name, domain=domain or None, **attributes)

    def fresh(self, name: str) -> str:
        """Return this name, numbered if the graph has it already."""
        chosen, count = name, 0
        while chosen in self._names:
            count += 1
            chosen = f"{name}_{count}"
        self._names.add(chosen)
        return chosen

    def floats(self, name: str, values: Any) -> str:
        """Add a float32 tensor and return its name."""
        return self.constant(name, np.asarray(values, dtype=np.float32))

    def constant(self, name: str, values: Any) -> str:
        """Add a tensor of the type of the values and return its name."""
        chosen = self.fresh(name)
        self.graph.initializer.append(self._onnx.numpy_helper.from_array(np.asarray(values), chosen))
        return chosen

    def raw(self, name: str, kind: str, shape: Iterable[int], content: bytes) -> str:
        """Add a tensor of an ONNX type (INT2, UINT4, …) from its bytes and return its name."""
        chosen, number = self.fresh(name), type_number(kind)
        self.graph.initializer.append(
            self._onnx.TensorProto(name=chosen, data_type=number, dims=list(shape), raw_data=content)
        )
        return chosen

    def codes(self, name: str, codes: Tensor, width: int) -> str:
        """Add signed codes as INT2, INT4, INT8 or INT16 and return the name of the tensor."""
        return self.raw(name, f"INT{width}", codes.shape, pack(codes, width, offset=False).numpy().tobytes())

    def replace(self, kind: str, rewrite: Callable[[Node, dict[str, Any]], list[Node]]) -> None:
        """Replace each of bitplan's nodes of this kind by the nodes that `rewrite(node, attributes)` returns."""
        self.rebuild(lambda node: rewrite(node, self.attributes(node)) if is_ours(node, kind) else [node])

    def rebuild(self, rewrite: Callable[[Node], list[Node]]) -> None:
        """Replace each node by the nodes that `rewrite(node)` returns."""
        nodes = [new for node in list(self.graph.node) for new in rewrite(node)]
        del self.graph.node[:]
        self.graph.node.extend(nodes)

    def attributes(self, node: Node) -> dict[str, Any]:
        """Return a node's attributes as Python values, texts as str."""
        attributes: dict[str, Any] = {}
        for attribute in node.attribute:
            value = self._onnx.helper.get_attribute_value(attribute)
            attributes[attribute.name] = value.decode() if isinstance(value, bytes) else value
        return attributes

    def readers(self, name: str) -> list[Node]:
        """Return the nodes that read a value."""
        return [node for node in self.graph.node if name in node.input]

    def makers(self) -> dict[str, Node]:
        """Return the node that makes each value."""
        return {output: node for node in self.graph.node for output in node.output}

    def rank(self, name: str) -> int | None:
        """Return the number of dimensions of a value of the captured graph, or None if it is unknown."""
        for value in (*self.graph.value_info, *self.graph.output, *self.graph.input):
            if value.name == name and value.type.tensor_type.HasField("shape"):
                return len(value.type.tensor_type.shape.dim)
        return None

    def is_output(self, name: str) -> bool:
        """Return True if a value is an output of the graph."""
        return any(value.name == name for value in self.graph.output)

    def array(self, name: str) -> np.ndarray | None:
        """Return a constant of the graph, or None if the value is computed."""
        for tensor in self.graph.initializer:
            if tensor.name == name:
                return np.asarray(self._onnx.numpy_helper.to_array(tensor))
        return None

    def bypass(self, node: Node) -> None:
        """Let the readers of a node's output read its input instead."""
        source, target = node.input[0], node.output[0]
        for reader in self.readers(target):
            reader.input[:] = [source if name == target else name for name in reader.input]

    def leave_inputs_float_(self) -> None:
        """Remove all input quantizers."""
        for node in list(self.graph.node):
            if is_ours(node, "Quantize"):
                self.bypass(node)
        self.rebuild(lambda node: [] if is_ours(node, "Quantize") else [node])

    def save(self, source: Source, path: Path, *, exporter: str) -> None:
        """Drop unused nodes, check the graph and write it, with the plan and the name of its exporter."""
        self._prune_()
        assert not any(node.domain == DOMAIN for node in self.graph.node)
        del self.graph.value_info[:], self.graph.metadata_props[:]
        for node in self.graph.node:
            del node.metadata_props[:]  # torch's stack traces
        mark_layers_(self.graph.node, self._layers, source.plan.precisions)
        self._say_versions_()
        plan = json.dumps(json.loads(source.plan.to_json()))  # in one line
        self._onnx.helper.set_model_props(self.proto, {_PLAN: plan, _EXPORTER: exporter})
        path.write_bytes(checked_bytes(self.proto))

    def _say_versions_(self) -> None:
        """Declare the operator sets in use, always ONNX's own (""), and the oldest file format that has them."""
        make = self._onnx.helper.make_opsetid
        used = {node.domain for node in self.graph.node} | {""}
        versions = [make(entry.domain, entry.version) for entry in self.proto.opset_import if entry.domain in used]
        if "com.microsoft" in used:
            versions.append(make("com.microsoft", 1))
        del self.proto.opset_import[:]
        self.proto.opset_import.extend(versions)
        own = [entry for entry in versions if not entry.domain]
        self.proto.ir_version = self._onnx.helper.find_min_ir_version_for(own)

    def _prune_(self) -> None:
        """Drop nodes and tensors that no output of the graph depends on, from the last node to the first."""
        needed = {value.name for value in self.graph.output}
        nodes = []
        for node in reversed(list(self.graph.node)):
            if needed & set(node.output):
                nodes.append(node)
                needed |= _names_read(node)
        del self.graph.node[:]
        self.graph.node.extend(reversed(nodes))
        tensors = [tensor for tensor in self.graph.initializer if tensor.name in needed]
        del self.graph.initializer[:]
        self.graph.initializer.extend(tensors)


def is_ours(node: Node, kind: str) -> bool:
    """Return True if a node stands for one of bitplan's quantizers: "Quantize" or "Weight"."""
    return bool(node.domain == DOMAIN and node.op_type == kind)


def exporter_in(path: Path) -> str | None:
    """Return the exporter that an ONNX file names, "" if it names none, and None if the file is not ONNX by its ending.

    Every exporter of ONNX asks, so the answer is kept for as long as the file stays as it is.
    """
    if path.suffix != ".onnx":
        return None
    about = path.stat()
    return _read_exporter(path, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=8)
def _read_exporter(path: Path, changed: int, size: int) -> str:
    return _properties(read(path)).get(_EXPORTER, "")


def _properties(proto: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


@contextmanager
def reading_plan(path: Path) -> Iterator[tuple[Any, Plan]]:
    """Yield the graph and the plan of a file that bitplan wrote; errors inside the block say that it is damaged."""
    proto = read(path)
    plan = _properties(proto).get(_PLAN)
    if plan is None:
        raise FileError(f"{path} is an ONNX file, but not one that bitplan wrote")
    with explain_failures(path, "an ONNX file as bitplan writes it", "export it again"):
        yield proto, Plan.from_json(plan)


def read_codes(tensor: Any) -> Tensor:
    """Return the codes in an INT2, INT4, INT8 or INT16 tensor."""
    width = width_of(tensor.data_type)
    count = math.prod(tensor.dims)
    packed = torch.frombuffer(bytearray(tensor.raw_data), dtype=torch.uint8) if tensor.raw_data else torch.empty(0)
    return unpack(packed.to(torch.uint8), width, count, offset=False).view(*tensor.dims)


def type_number(name: str) -> int:
    """Return ONNX's number of a type."""
    return int(onnx().TensorProto.DataType.Value(name))


def width_of(number: int) -> int:
    """Return the bits of an integer type."""
    name: str = onnx().TensorProto.DataType.Name(number)
    return int(name.removeprefix("U").removeprefix("INT"))


def _names_read(node: Node) -> set[str]:
    """Return the values that a node reads, also in the bodies of its loops and branches."""
    names = set(node.input)
    for attribute in node.attribute:
        for inner in attribute.g.node:
            names |= _names_read(inner)
        names |= {value.name for value in attribute.g.output}
    return names


def _refuse_other_types(model: nn.Module) -> None:
    for name, value in model.named_parameters():
        if value.is_floating_point() and value.dtype != torch.float32:
            kind = str(value.dtype).removeprefix("torch.")
            raise InputError(f"{name} is {kind}: bitplan writes ONNX in float32, so call model.float() first")


def _refuse_large(model: nn.Module) -> None:
    quantized = {id(weight): weight for weight in weights_of(model).values()}  # a shared one is stored once
    rest = [parameter for parameter in model.parameters() if id(parameter) not in quantized]
    float_bytes = sum(parameter.numel() * parameter.element_size() for parameter in rest)
    code_bytes = sum(packed_bytes(weight.numel(), 8) for weight in quantized.values())
    size = float_bytes + code_bytes
    if size > LARGEST:
        raise InputError(
            f"this model takes {size / 2**30:.1f} GB as ONNX, and a single ONNX file ends at 2 GB: quantize more of "
            "its layers, or export it as packed"
        )


# The layer of a node is found as the graph is captured, written into the file, and read back.

LAYER = "bitplan.layer"
_SCOPES = "pkg.torch.onnx.name_scopes"  # the modules around an operation, from the outermost, and its own name
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum"})
_JOINTS = "./"  # behind these the name of a node goes on that was made of another


def layers_of_nodes(nodes: Iterable[Node], layers: Collection[str]) -> dict[str, str]:
    """Return the layer of each captured node that is inside one, by the node's name.

    A node lies in a layer's module or in its quantizers. For nodes that torch merges, the names of weights tell the
    layer. A call in a module, such as a product of activations, has no scope of its own if it is left float: such
    calls are matched to the module's layers in their order.
    """
    layer_by_node: dict[str, str] = {}
    calls: dict[str, dict[str, list[str]]] = {}  # module → its calls that multiply → their nodes
    entered: set[str] = set()
    for node in nodes:
        scopes = _scopes(node)
        entered.update(scopes[:-1])
        layer = _layer_around(scopes[:-1], layers) or _layer_of_weight(node, layers)
        if layer is not None:
            layer_by_node[node.name] = layer
        elif node.op_type in _PRODUCTS and len(scopes) > 1:
            calls.setdefault(scopes[-2], {}).setdefault(scopes[-1], []).append(node.name)
    for module, ordered in calls.items():
        module_layers = [layer for layer in layers if split_name(layer)[0] == module and layer not in entered]
        if module_layers and len(ordered) % len(module_layers) == 0:
            for place, nodes_of_call in enumerate(ordered.values()):
                layer_by_node |= dict.fromkeys(nodes_of_call, module_layers[place % len(module_layers)])
    return layer_by_node


def mark_layers_(nodes: Iterable[Node], known: Mapping[str, str], layers: Collection[str]) -> None:
    """Write into each node the layer that its name, or the beginning of its name, belongs to.

    An exporter names its nodes after those that they replace, or after the quantizer they stand for.
    """
    named = {layer: layer for layer in layers} | dict(known)
    for node in nodes:
        layer = find_longest_prefix(node.name, named, _JOINTS)
        quantizer = layer_of_quantizer(node.name)
        layer = quantizer if quantizer in layers else layer
        if layer is not None:
            entry = node.metadata_props.add()
            entry.key, entry.value = LAYER, layer


def layers_of_names(graph: Any) -> dict[str, str]:
    """Return the layer of each node and value of a file's graph by name: its own layer, or the one before it."""
    layer_by_name: dict[str, str] = {}
    order: dict[str, int] = {}  # the place of the node that makes each value
    for number, node in enumerate(graph.node):
        order |= dict.fromkeys(node.output, number)
        own = next((entry.value for entry in node.metadata_props if entry.key == LAYER), None)
        before = max((name for name in node.input if name in layer_by_name), key=order.__getitem__, default=None)
        layer = own or (layer_by_name[before] if before is not None else None)
        if layer is not None:
            layer_by_name |= dict.fromkeys((node.name, *node.output), layer)
    return layer_by_name


def find_longest_prefix(name: str, known: Mapping[str, str], joints: str) -> str | None:
    """Look up a name, or else its longest beginning in `known` that ends before one of the characters `joints`."""
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
    """Return the innermost module that is a layer, or the layer that an inner quantizer belongs to."""
    for path in reversed(modules):
        if path in layers:
            return path
        owner = layer_of_quantizer(f"{path}.")
        if owner in layers:
            return owner
    return None


@dataclass(frozen=True)
class Weight:
    """The codes of a layer's weight, its steps (broadcasting against them) and its bits.

    With `as_matrix` a weight (N, C, 1, 1) is stored so and used as a matrix (C, N). If groups of `size` inputs have
    steps of their own, these are (rows, groups), and so are the `zeros`, codes that stand for zero.
    """

    layer: str
    codes: Tensor
    steps: Tensor
    bits: int
    as_matrix: bool = False
    size: int = 0
    zeros: Tensor | None = None


def _read_weights(model: nn.Module, plan: Plan, *, groups: bool) -> dict[str, Weight]:
    """Return the weights by layer, their codes in the network's own layout."""
    grouped = {
        layer: both.weight
        for layer, both in quantizers_of(model).items()
        if groups and isinstance(both.weight, GroupedWeight)
    }
    steps, stored = weight_steps(model, but=grouped), {}
    for layer, codes in integer_weights(model).items():
        bits, quantizer = plan.precisions[layer].weight_bits, grouped.get(layer)
        if quantizer is None:
            stored[layer] = Weight(layer, codes.cpu(), steps[layer].cpu(), bits)
            continue
        levels, row = quantizer.in_levels, quantizer.blocks.rows(codes).shape[1]
        zeros = None if levels.zero is None else levels.zero.cpu()
        size = quantizer.blocks.width(row)
        stored[layer] = Weight(layer, codes.cpu(), levels.step.cpu(), bits, size=size, zeros=zeros)
    return stored
