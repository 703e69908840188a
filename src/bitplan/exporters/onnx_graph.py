"""What the ONNX exporters do to a captured graph: put nodes in the place of nodes, add tensors, drop what is unused."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitplan.adapters.onnx import checked_bytes, onnx, read
from bitplan.core.errors import FileError, InputError
from bitplan.core.naming import layer_of, layer_of_quantizer, split
from bitplan.core.parsing import parsing
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
    """A graph being rewritten; only where the target knows steps of groups, weights in groups are let in."""

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
        self.weights = coded_weights(model, source.plan, groups=groups)
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
        """A new node with one output."""
        return self._onnx.helper.make_node(kind, list(inputs), [output], name=name, domain=domain or None, **attributes)

    def fresh(self, name: str) -> str:
        """A name like this one that nothing in the graph has."""
        chosen, count = name, 0
        while chosen in self._names:
            count += 1
            chosen = f"{name}_{count}"
        self._names.add(chosen)
        return chosen

    def floats(self, name: str, values: Any) -> str:
        """Add a float tensor; gives its name."""
        return self.constant(name, np.asarray(values, dtype=np.float32))

    def constant(self, name: str, values: Any) -> str:
        """Add a tensor of the type that the values have; gives its name."""
        chosen = self.fresh(name)
        self.graph.initializer.append(self._onnx.numpy_helper.from_array(np.asarray(values), chosen))
        return chosen

    def raw(self, name: str, kind: str, shape: Iterable[int], content: bytes) -> str:
        """Add a tensor of a type by its name in ONNX (INT2, UINT4, …) from its bytes; gives its name."""
        chosen, number = self.fresh(name), type_number(kind)
        self.graph.initializer.append(
            self._onnx.TensorProto(name=chosen, data_type=number, dims=list(shape), raw_data=content)
        )
        return chosen

    def codes(self, name: str, codes: Tensor, width: int) -> str:
        """Add signed codes as INT2, INT4, INT8 or INT16."""
        return self.raw(name, f"INT{width}", codes.shape, pack(codes, width, offset=False).numpy().tobytes())

    def replace(self, kind: str, rewrite: Callable[[Node, dict[str, Any]], list[Node]]) -> None:
        """Put what `rewrite(node, attributes)` gives in the place of each node of bitplan's of this kind."""
        self.rebuild(lambda node: rewrite(node, self.attributes(node)) if is_ours(node, kind) else [node])

    def rebuild(self, rewrite: Callable[[Node], list[Node]]) -> None:
        """Put what `rewrite(node)` gives in the place of each node."""
        nodes = [new for node in list(self.graph.node) for new in rewrite(node)]
        del self.graph.node[:]
        self.graph.node.extend(nodes)

    def attributes(self, node: Node) -> dict[str, Any]:
        """A node's attributes as Python values, texts as str."""
        attributes: dict[str, Any] = {}
        for attribute in node.attribute:
            value = self._onnx.helper.get_attribute_value(attribute)
            attributes[attribute.name] = value.decode() if isinstance(value, bytes) else value
        return attributes

    def readers(self, name: str) -> list[Node]:
        """The nodes that read a value."""
        return [node for node in self.graph.node if name in node.input]

    def makers(self) -> dict[str, Node]:
        """The node that makes each value."""
        return {output: node for node in self.graph.node for output in node.output}

    def rank(self, name: str) -> int | None:
        """How many dimensions a value of the captured graph has, if it is known."""
        for value in (*self.graph.value_info, *self.graph.output, *self.graph.input):
            if value.name == name and value.type.tensor_type.HasField("shape"):
                return len(value.type.tensor_type.shape.dim)
        return None

    def is_output(self, name: str) -> bool:
        """Tell whether a value leaves the graph."""
        return any(value.name == name for value in self.graph.output)

    def array(self, name: str) -> np.ndarray | None:
        """A constant of the graph by name."""
        for tensor in self.graph.initializer:
            if tensor.name == name:
                return np.asarray(self._onnx.numpy_helper.to_array(tensor))
        return None

    def bypass(self, node: Node) -> None:
        """Let everything that reads a node's output read its input instead."""
        source, target = node.input[0], node.output[0]
        for reader in self.readers(target):
            reader.input[:] = [source if name == target else name for name in reader.input]

    def leave_inputs_float_(self) -> None:
        """Take all input quantizers out."""
        for node in list(self.graph.node):
            if is_ours(node, "Quantize"):
                self.bypass(node)
        self.rebuild(lambda node: [] if is_ours(node, "Quantize") else [node])

    def save(self, source: Source, path: Path, *, exporter: str) -> None:
        """Drop what is unused, check everything, write; the file says which exporter knows it."""
        self._prune_()
        left = [node for node in self.graph.node if node.domain == DOMAIN]
        assert not left, left
        del self.graph.value_info[:], self.graph.metadata_props[:]
        for node in self.graph.node:
            del node.metadata_props[:]  # torch's stack traces
        mark_layers_(self.graph.node, self._layers, source.plan.precisions)
        self._say_versions_()
        plan = json.dumps(json.loads(source.plan.to_json()))  # in one line
        self._onnx.helper.set_model_props(self.proto, {_PLAN: plan, _EXPORTER: exporter})
        path.write_bytes(checked_bytes(self.proto))

    def _say_versions_(self) -> None:
        """Name the operator sets that are used, ONNX's own ("") always, and the oldest format that has it."""
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
        kept = []
        for node in reversed(list(self.graph.node)):
            if needed & set(node.output):
                kept.append(node)
                needed |= _reads(node)
        del self.graph.node[:]
        self.graph.node.extend(reversed(kept))
        tensors = [tensor for tensor in self.graph.initializer if tensor.name in needed]
        del self.graph.initializer[:]
        self.graph.initializer.extend(tensors)


def is_ours(node: Node, kind: str) -> bool:
    """Tell whether a node stands for one of bitplan's quantizers: "Quantize" or "Weight"."""
    return bool(node.domain == DOMAIN and node.op_type == kind)


@dataclass(frozen=True)
class Dialect:
    """Whom an ONNX file is for, as it says itself ("" where it says nothing), and the operators in it."""

    exporter: str
    operators: frozenset[str]

    def is_for(self, exporter: str, *, otherwise: bool) -> bool:
        """Tell whether the file names this exporter; `otherwise` decides where it names none, as files once did."""
        return self.exporter == exporter if self.exporter else otherwise


def dialect_of(path: Path) -> Dialect | None:
    """The dialect of an ONNX file, None for a file of another name; a damaged one is refused.

    All exporters of ONNX ask in turn, so the answer is kept for as long as the file stays as it is.
    """
    if path.suffix != ".onnx":
        return None
    about = path.stat()
    return _read_dialect(path, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=8)
def _read_dialect(path: Path, changed: int, size: int) -> Dialect:
    proto = read(path)
    with _own(path):
        return Dialect(_properties(proto).get(_EXPORTER, ""), frozenset(node.op_type for node in proto.graph.node))


def _properties(proto: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


@contextmanager
def reading_plan(path: Path) -> Iterator[tuple[Any, Plan]]:
    """An ONNX file of bitplan's, and the plan in it; what the block cannot make of them is the file's fault."""
    proto = read(path)
    written = _properties(proto).get(_PLAN)
    if written is None:
        raise FileError(f"{path} is an ONNX file, but not one that bitplan wrote")
    with _own(path):
        yield proto, Plan.from_json(written)


def _own(path: Path) -> AbstractContextManager[None]:
    return parsing(path, "an ONNX file as bitplan writes it", "export it again")


def read_codes(tensor: Any, *, offset: bool = False) -> Tensor:
    """The codes in an INT2, INT4, INT8 or INT16 tensor."""
    width = width_of(tensor.data_type)
    count = math.prod(tensor.dims)
    packed = torch.frombuffer(bytearray(tensor.raw_data), dtype=torch.uint8) if tensor.raw_data else torch.empty(0)
    return unpack(packed.to(torch.uint8), width, count, offset=offset).view(*tensor.dims)


def type_number(name: str) -> int:
    """ONNX's number of a type."""
    return int(onnx().TensorProto.DataType.Value(name))


def width_of(number: int) -> int:
    """The bits of an integer type."""
    name: str = onnx().TensorProto.DataType.Name(number)
    return int(name.removeprefix("U").removeprefix("INT"))


def _reads(node: Node) -> set[str]:
    """What a node reads, the bodies of its loops and branches included."""
    names = set(node.input)
    for attribute in node.attribute:
        for inner in attribute.g.node:
            names |= _reads(inner)
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
    of_floats = sum(parameter.numel() * parameter.element_size() for parameter in rest)
    of_codes = sum(packed_bytes(weight.numel(), 8) for weight in quantized.values())
    size = of_floats + of_codes
    if size > LARGEST:
        raise InputError(
            f"this model takes {size / 2**30:.1f} GB as ONNX, and a single ONNX file ends at 2 GB: quantize more of "
            "its layers, or export it as packed"
        )


# --- Which layer a node of an ONNX file belongs to: found as the graph is captured, written into the file, read
# back.
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


# --- The weights of a network as codes and steps, as ONNX files store them.


@dataclass(frozen=True)
class Weight:
    """The codes of a layer's weight, its steps (broadcasting against them) and its bits.

    `as_matrix` has a weight (N, C, 1, 1), stored so, used as a matrix (C, N). Where groups of `size` inputs have steps
    of their own, these are (rows, groups), and so are the `zeros`, codes that stand for zero, if there are any.
    """

    layer: str
    codes: Tensor
    steps: Tensor
    bits: int
    as_matrix: bool = False
    size: int = 0
    zeros: Tensor | None = None


def coded_weights(model: nn.Module, plan: Plan, *, groups: bool) -> dict[str, Weight]:
    """The weights by layer, their codes in the network's own layout."""
    cut = {
        layer: both.weight
        for layer, both in quantizers_of(model).items()
        if groups and isinstance(both.weight, GroupedWeight)
    }
    steps, found = weight_steps(model, but=cut), {}
    for layer, codes in integer_weights(model).items():
        bits, quantizer = plan.precisions[layer].weight_bits, cut.get(layer)
        if quantizer is None:
            found[layer] = Weight(layer, codes.cpu(), steps[layer].cpu(), bits)
            continue
        levels, row = quantizer.in_levels, quantizer.blocks.rows(codes).shape[1]
        zeros = None if levels.zero is None else levels.zero.cpu()
        size = quantizer.blocks.width(row)
        found[layer] = Weight(layer, codes.cpu(), levels.step.cpu(), bits, size=size, zeros=zeros)
    return found
