"""onnxscript, with which torch turns a model into an ONNX graph."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from bitplan.adapters.foreign import require
from bitplan.core.errors import InputError

_NORM = "_native_batch_norm_legit_no_training"
_OPSET = 18  # the one that torch's own translations are written for


def graph_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: Any, *, opset: int) -> Any:
    """The ONNX model proto of a model in inference mode; what torch cannot translate is one line with its place."""
    require("onnxscript", "export", "writing ONNX")
    with _quiet():
        import onnxscript.version_converter

        running: list[str] = []
        try:
            with _following(model, running):
                exported = torch.export.export(model, args, dict(kwargs), dynamic_shapes=dynamic, strict=False)
        except Exception as error:  # torch raises many kinds, with pages of advice
            raise _refusal(error, running[-1] if running else "") from error
        _take_apart_where_needed_(exported)
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


def _take_apart_where_needed_(exported: Any) -> None:
    """Spare a program from being traced anew, twice, which is half of an export, where that changes only its norms.

    Its method gets a table of the operations that are taken apart, and those that ONNX has no words for are, too. Where
    a program has none of these but batch norms, and none that writes to its operands, they are put into ONNX's words in
    place. The graph is the same, but for the numbers in names of inner values.
    """
    take_apart = exported.run_decompositions

    def where_needed(table: Any = None) -> Any:
        graphs = [part.graph for part in exported.graph_module.modules() if hasattr(part, "graph")]
        nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
        norms = [node for node in nodes if node.target is torch.ops.aten.batch_norm.default]
        others = {node.target for node in nodes} - {torch.ops.aten.batch_norm.default}
        known = table is not None and len(graphs) == 1 and others.isdisjoint(table) and all(map(_has_words, others))
        if not known or any(map(_writes, others)) or not all(map(_is_plain_norm, norms)):
            return take_apart(table)
        for place, node in enumerate(norms):
            _say_norm_(node, place)
        exported.graph_module.recompile()
        return exported

    exported.run_decompositions = where_needed


def _is_plain_norm(node: Any) -> bool:
    """Whether a batch norm uses what it has learned, and something in the program reads it."""
    return len(node.args) == 9 and node.args[5] is False and all(user.op == "call_function" for user in node.users)


def _say_norm_(node: Any, place: int) -> None:
    """What taking apart makes of a batch norm in inference: an operation of three results, and the first of them."""
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


def _has_words(target: Any) -> bool:
    """Whether torch can put an operation into ONNX's words as it is."""
    if getattr(target, "__module__", "") == "_operator":
        return True
    try:
        from torch.onnx._internal.exporter import _registration

        return bool(_registration.ONNXRegistry.from_torchlib(opset_version=_OPSET).is_registered(target))
    except (ImportError, AttributeError, TypeError):  # a torch that has it elsewhere
        return False


def _writes(target: Any) -> bool:
    """Whether an operation may change its operands; of one that says nothing about itself nothing is known."""
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
    """Nothing on the terminal: torch narrates what it does."""
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
def _following(model: nn.Module, running: list[str]) -> Iterator[None]:
    """Keep the paths of the modules that are running, the innermost last."""
    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, path=path: running.append(path)))
        hooks.append(module.register_forward_hook(lambda *_: void(running.pop())))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def void(_: object) -> None:
    """Drop a value: what a hook returns would replace the output."""


def _refusal(error: BaseException, layer: str) -> InputError:
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, InputError):
        return error
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    where = f"layer {layer!r}" if layer else "this model"
    return InputError(f"ONNX cannot hold {where} ({type(error).__name__}: {line[:200]})")


def _layer_in(exported: Any, error: BaseException) -> str:
    """The path of the module whose operation could not be translated, if the error names it."""
    text = ""
    while error is not None:
        text += str(error)
        error = error.__cause__  # type: ignore[assignment]
    named = re.search(r"translating node %(\w+)", text)
    if named is None:
        return ""
    alike = [node for node in exported.graph.nodes if named[1] in node.name]  # parts of what was taken apart before
    exact = [node for node in alike if node.name == named[1]]
    if not alike:
        return ""
    node = (exact or alike)[0]
    stack = list(node.meta.get("nn_module_stack", {}).values())  # path and class of each module, from the outermost
    return str(stack[-1][0]) if stack else ""
