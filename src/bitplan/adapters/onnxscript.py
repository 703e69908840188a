"""onnxscript, with which torch turns a model into an ONNX graph."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from bitplan.adapters.foreign import require
from bitplan.core.errors import InputError

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
        try:
            program = torch.onnx.export(exported, (), dynamo=True, opset_version=_OPSET, verbose=False, optimize=True)
        except Exception as error:
            raise _refusal(error, _layer_in(exported, error)) from error
        assert program is not None
        if opset != _OPSET:
            onnxscript.version_converter.convert_version(program.model, opset)
        return program.model_proto


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
