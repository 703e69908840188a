"""Capture a quantized model as an ONNX graph in which every quantizer is one node, for an exporter to replace.

`bitplan::Quantize(v)` stands for an input quantizer (attributes `path`, `scale`, `low`, `high`), `bitplan::Weight()`
for a quantized weight (attribute `layer`). Both take and give floats.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.onnx.ops
from torch import Tensor, nn

from bitplan.adapters.foreign import require
from bitplan.core.errors import InputError
from bitplan.quant.convert import quantizers_of
from bitplan.quant.integer import write_rounded_
from bitplan.quant.layers import Adopted, adopt_, release_, type_for_forward
from bitplan.quant.lsq import MASK, positive_scale
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer, why_not_uniform

DOMAIN = "bitplan"


def capture(model: nn.Module, example: Any, *, opset: int) -> Any:
    """Return the ONNX proto of a calibrated model with a free batch dimension; the model stays unchanged."""
    marked = copy.deepcopy(model).cpu().eval()
    write_rounded_(marked)
    layers = {id(both.weight): layer for layer, both in quantizers_of(marked).items() if both.weight is not None}
    for path, module in marked.named_modules():
        if isinstance(module, InputQuantizer):
            _mark_input_(module, path)
        elif isinstance(module, WeightQuantizer):
            if id(module) not in layers:
                raise InputError(f"{path} belongs to no layer of the plan: quantize the model again")
            module.__class__ = _WeightMarker
            cast(_WeightMarker, module).layer = layers[id(module)]
        elif isinstance(module, Adopted):
            _show_whole_weights_(module, path)
    args, kwargs = batch_inputs(example)
    names: list[str] = []
    marked.register_forward_hook(lambda _, __, outputs: names.extend(_name_outputs(outputs)))
    with torch.no_grad():
        proto = translate_to_onnx(marked, args, kwargs, _free_batch_dims(args, kwargs), opset=opset)
    _rename_outputs_(proto, names)
    return proto


class _Input(InputQuantizer):
    """An input quantizer as a node."""

    path: str
    scale: float
    limits: tuple[int, int]

    def forward(self, v: Tensor, *, times: int = 1) -> Tensor:
        """Return one node, and around it the mask of attention scores."""
        if not v.is_floating_point():
            return v
        if not self.masked:
            return self._node(v)
        return torch.where(v < MASK, v, self._node(v.clamp_min(MASK)))

    def _node(self, v: Tensor) -> Tensor:
        low, high = self.limits
        attributes: dict[str, Any] = {"path": self.path, "scale": self.scale, "low": low, "high": high}
        return torch.onnx.ops.symbolic(f"{DOMAIN}::Quantize", (v,), attributes, dtype=v.dtype, shape=v.shape, version=1)


class _WeightMarker(WeightQuantizer):
    """A quantized weight as a node."""

    layer: str

    def forward(self, weight: Tensor, *, numel: int | None = None, step: Tensor | None = None) -> Tensor:
        """Return one node without the float weight as an input, so that it is not written."""
        shape, kind = tuple(weight.shape), weight.dtype
        return torch.onnx.ops.symbolic(
            f"{DOMAIN}::Weight", (), {"layer": self.layer}, dtype=kind, shape=shape, version=1
        )


def _show_whole_weights_(module: Adopted, path: str) -> None:
    """Let a layer quantize its weight as a whole, so that one node stands for it."""
    layer_type = type_for_forward(module)
    if layer_type is not None and layer_type.quantized is not None and isinstance(module, layer_type.quantized):
        captured = layer_type.captured(module, path)
        if captured is not layer_type.quantized:
            release_(module)
            adopt_(module, captured)


def _mark_input_(module: InputQuantizer, path: str) -> None:
    limits = module.range
    if limits is None:
        raise InputError(
            f"the input scale of layer {module.name!r} is not set: call calibrate_(model, batches), or train for one "
            "batch, before the model is exported"
        )
    why = why_not_uniform(module)
    if why:
        raise InputError(
            f"the input of layer {module.name!r} is not rounded to multiples of a step, as other programs do it: {why}"
            "; quantize with another method, or keep a checkpoint (save_checkpoint)"
        )
    scale = positive_scale(module.step.detach()).item()
    module.__class__ = _Input
    marked = cast(_Input, module)
    marked.path, marked.limits, marked.scale = path, limits, scale


def batch_inputs(example: Any, batch: int = 2) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments for a batch; of two by default, since torch takes one for a constant."""
    if isinstance(example, Mapping):
        return (), {name: _repeat(value, batch) for name, value in example.items()}
    values = example if isinstance(example, tuple | list) else (example,)
    return tuple(_repeat(value, batch) for value in values), {}


def _repeat(value: Any, batch: int) -> Any:
    """Repeat the first sample; a tensor without data (device meta) becomes zeros, or ones for indices and masks."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    shape = (batch, *value.shape[1:])
    if value.device.type == "meta":
        fill = torch.zeros if value.is_floating_point() else torch.ones
        return fill(shape, dtype=value.dtype)
    return value.detach().cpu()[:1].expand(shape).contiguous()


def _name_outputs(outputs: Any) -> list[str]:
    """Return names for the outputs: their keys, or numbers."""
    if isinstance(outputs, Mapping):
        return [str(name) for name, value in outputs.items() if isinstance(value, Tensor)]
    if isinstance(outputs, tuple | list):
        return [f"output_{place}" for place in range(len(outputs))]
    return ["output"]


def _rename_outputs_(proto: Any, names: list[str]) -> None:
    """Rename the outputs of the graph, unless a name belongs to another value or an output is an input."""
    graph = proto.graph
    outputs = [value.name for value in graph.output]
    computed = {name for node in graph.node for name in node.output}
    given = {value.name for value in (*graph.input, *graph.initializer)}
    others = given | (computed - set(outputs))
    if len(names) != len(outputs) or not others.isdisjoint(names):
        return
    if not others.isdisjoint(outputs):  # an output that is an input: its name stays
        return
    new = dict(zip(outputs, names, strict=True))
    for node in graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
    for value in graph.output:
        value.name = new[value.name]


def _free_batch_dims(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    batch = torch.export.Dim("batch")

    def free(value: Any) -> Any:
        return {0: batch} if isinstance(value, Tensor) and value.dim() else None

    if kwargs:
        return {name: free(value) for name, value in kwargs.items()}
    return tuple(free(value) for value in args)


_NORM = "_native_batch_norm_legit_no_training"
_OPSET = 18  # the one that torch's own translations are written for


def translate_to_onnx(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: Any, *, opset: int
) -> Any:
    """Return the ONNX proto of a model in inference mode; raise with the layer that torch cannot translate."""
    require("onnxscript", "export", "writing ONNX")
    with _quiet():
        import onnxscript.version_converter

        running: list[str] = []
        try:
            with _track_modules(model, running):
                exported = torch.export.export(model, args, dict(kwargs), dynamic_shapes=dynamic, strict=False)
        except Exception as error:  # torch raises many kinds, with pages of advice
            raise _refusal(error, running[-1] if running else "") from error
        _decompose_if_needed_(exported)
        try:
            with _one_registry():
                program = torch.onnx.export(
                    exported, (), dynamo=True, opset_version=_OPSET, verbose=False, optimize=True
                )
        except Exception as error:
            raise _refusal(error, _layer_in(exported, error)) from error
        assert program is not None
        if opset != _OPSET:
            onnxscript.version_converter.convert_version(program.model, opset)
        return program.model_proto


def _decompose_if_needed_(exported: Any) -> None:
    """Skip the decomposition of a program if it would only change its batch norms; it takes half of an export.

    torch traces the program twice to decompose operations, those in a table and those that ONNX lacks. If only batch
    norms are among them, and nothing writes to its operands, these are replaced in place. The graph is the same but for
    the numbers in names of inner values.
    """
    decompose = exported.run_decompositions

    def decompose_if_needed(table: Any = None) -> Any:
        graphs = [part.graph for part in exported.graph_module.modules() if hasattr(part, "graph")]
        nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
        norms = [node for node in nodes if node.target is torch.ops.aten.batch_norm.default]
        others = {node.target for node in nodes} - {torch.ops.aten.batch_norm.default}
        known = (
            table is not None and len(graphs) == 1 and others.isdisjoint(table) and all(map(_has_translation, others))
        )
        if not known or any(map(_writes, others)) or not all(map(_is_plain_norm, norms)):
            return decompose(table)
        for place, node in enumerate(norms):
            _replace_norm_(node, place)
        exported.graph_module.recompile()
        return exported

    exported.run_decompositions = decompose_if_needed


def _is_plain_norm(node: Any) -> bool:
    """Return True if a batch norm uses its learned statistics and is read inside the program."""
    return len(node.args) == 9 and node.args[5] is False and all(user.op == "call_function" for user in node.users)


def _replace_norm_(node: Any, place: int) -> None:
    """Replace a batch norm as decomposition does: an operation of three results, and the first of them."""
    graph, (x, weight, bias, mean, variance, _, momentum, eps, _) = node.graph, node.args
    target, given = torch.ops.aten._native_batch_norm_legit_no_training.default, (x, weight, bias, mean, variance)
    names = (f"{_NORM}_{place}", f"getitem_{3 * place}") if place else (_NORM, "getitem")  # as tracing would call them
    with graph.inserting_before(node):
        norm = graph.create_node("call_function", target, (*given, momentum, eps), name=names[0])
        first = graph.create_node("call_function", operator.getitem, (norm, 0), name=names[1])
    none = node.meta["val"].new_empty(0)
    norm.meta = node.meta | {"val": (node.meta["val"], none, none)}
    first.meta = dict(node.meta)
    node.replace_all_uses_with(first)
    graph.erase_node(node)


def _has_translation(target: Any) -> bool:
    """Return True if torch can translate an operation to ONNX as it is."""
    if getattr(target, "__module__", "") == "_operator":
        return True
    try:
        from torch.onnx._internal.exporter import _registration

        return bool(_registration.ONNXRegistry.from_torchlib(opset_version=_OPSET).is_registered(target))
    except (ImportError, AttributeError, TypeError):  # a torch that has it elsewhere
        return False


def _writes(target: Any) -> bool:
    """Return True if an operation may change its operands, or has no schema that says so."""
    if getattr(target, "__module__", "") == "_operator":  # of sizes, or an item of a tuple
        return False
    schema = getattr(target, "_schema", None)
    return schema is None or bool(schema.is_mutable)


@contextlib.contextmanager
def _one_registry() -> Iterator[None]:
    """Let torch read its list of translations, which takes a second, once per process and not at every export."""
    try:
        from torch.onnx._internal.exporter import _registration

        owner: Any = _registration.ONNXRegistry
        read, own = owner.from_torchlib, vars(owner)["from_torchlib"]
    except (ImportError, AttributeError, KeyError):  # a torch that has it elsewhere
        yield
        return
    owner.from_torchlib = staticmethod(lambda opset_version: _registry(read, opset_version))
    try:
        yield
    finally:
        owner.from_torchlib = own


@functools.lru_cache(maxsize=2)
def _registry(read: Callable[..., Any], opset: int) -> Any:
    return read(opset_version=opset)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the terminal: torch narrates its steps."""
    silence = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


@contextlib.contextmanager
def _track_modules(model: nn.Module, running: list[str]) -> Iterator[None]:
    """Keep the paths of the running modules in a list, the innermost last."""
    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, path=path: running.append(path)))
        hooks.append(module.register_forward_hook(lambda *_: _discard(running.pop())))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _discard(_: object) -> None:
    """Drop a value: a hook that returns one would replace the output."""


def _refusal(error: BaseException, layer: str) -> InputError:
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, InputError):
        return error
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    where = f"layer {layer!r}" if layer else "this model"
    return InputError(f"ONNX cannot hold {where} ({type(error).__name__}: {line[:200]})")


def _layer_in(exported: Any, error: BaseException) -> str:
    """Return the path of the module whose operation could not be translated, or ""."""
    text = ""
    while error is not None:
        text += str(error)
        error = error.__cause__  # type: ignore[assignment]
    named = re.search(r"translating node %(\w+)", text)
    if named is None:
        return ""
    alike = [node for node in exported.graph.nodes if named[1] in node.name]  # parts of a decomposed operation
    exact = [node for node in alike if node.name == named[1]]
    if not alike:
        return ""
    node = (exact or alike)[0]
    stack = list(node.meta.get("nn_module_stack", {}).values())  # path and class of each module, from the outermost
    return str(stack[-1][0]) if stack else ""
