"""Watch a forward pass and note every layer: by the tensors it multiplies, not by the class of a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bitplan.core.naming import function_name, inside, is_recurrent, layer_of, product_name
from bitplan.graph.products import Product, product_of
from bitplan.graph.values import Key, Values
from bitplan.quant.calls import is_parameter, open_attention
from bitplan.quant.recurrence import OPENED, plain

aten = torch.ops.aten

_COPIES = {aten.clone, aten._to_copy, aten.lift_fresh_copy}
# Functions whose second matrix operand is a weight even where the first does not depend on the model's input
# (learned queries, position tables); elsewhere parameter × parameter computes a weight (a low-rank update).
_CONVOLUTIONS = {f"conv{transposed}{n}d" for transposed in ("", "_transpose") for n in (1, 2, 3)}
_LAYER_FUNCTIONS = {"linear", "addmm", *_CONVOLUTIONS}


@dataclass
class SeenLayer:
    """What is known of a layer so far."""

    name: str
    kind: str
    weights: int
    in_features: int
    macs: int = 0
    inputs: list[Key] = field(default_factory=list)


@dataclass
class _ModuleCall:
    """A running call of a module, and how often it has called each function."""

    path: str
    module: nn.Module
    functions: Counter[str] = field(default_factory=Counter)


class Watch:
    """The layers of one forward pass, in the order of their first call."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self.values = Values()
        self.layers: dict[str, SeenLayer] = {}
        self.last_weighted: str | None = None
        self.touched: set[str] = set()
        self._sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            self.values.add_parameter(parameter, name)
        self._stack: list[_ModuleCall] = [_ModuleCall("", model)]
        self._function = ""
        self._product_name = ""
        for path, module in model.named_modules():
            module.register_forward_pre_hook(self._enter(path), prepend=True)
            module.register_forward_hook(self._leave, always_call=False)

    def __enter__(self) -> Watch:
        self._modes = (_Functions(self), _Operations(self))
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    @property
    def where(self) -> tuple[str, nn.Module]:
        """The module being run: path and module. After an error, the one it happened in."""
        return self._stack[-1].path, self._stack[-1].module

    def _enter(self, path: str) -> Any:
        def enter(module: nn.Module, _: Any) -> None:
            self._stack.append(_ModuleCall(path, module))

        return enter

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        while len(self._stack) > 1 and self._stack.pop().module is not module:
            pass  # calls that ended in an error which the model caught

    def call_function(self, name: str, arguments: tuple[Any, ...]) -> None:
        """A function of torch is called from Python; its operations follow.

        Calls are counted as `quant/calls.py` counts them when the network runs (`core/naming.py`).
        """
        self._function = function_name(name)
        call = self._stack[-1]
        number = call.functions[self._function]
        call.functions[self._function] += not any(map(is_parameter, arguments))
        self._product_name = inside(call.path, product_name(self._function, number))

    def run_operation(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """Note one tensor operation that has run."""
        inputs, outputs = _tensors(arguments) + _tensors(tuple(options.values())), _tensors((output,))
        for tensor in inputs:
            self.touched |= self.values.sources(tensor)
        is_layer = False
        for product in product_of(operation, arguments, output):
            is_layer |= self._note(product)
        path = self._stack[-1].path
        by = f"output of {path or 'the model'} ({operation.overloadpacket.__name__})"
        self.values.made(outputs, inputs, by, is_layer)
        self.values.wrote(_written(operation, arguments), inputs, by)
        if operation.overloadpacket in _COPIES:
            self.values.copied(inputs[0], outputs[0])

    def _note(self, product: Product) -> bool:
        """Add a product to its layer, if it belongs to one."""
        given, weight = self._roles(product)
        if weight is not None:
            seen = self._weighted_layer(product, weight)
            self.last_weighted = seen.name
            if product.kind != "embedding":  # what it reads are indices
                seen.inputs.append(self.values.key(given))
        elif self.values.is_activation(product.first) and self.values.is_activation(product.second):
            kind = "attention" if "attention" in self._function else "product"
            seen = self._layer(self._product_name, product, 0, kind)
        else:
            return False
        seen.macs += product.macs
        return True

    def _weighted_layer(self, product: Product, weight: torch.Tensor) -> SeenLayer:
        """The layer that has this weight, which one parameter is or several make together."""
        sources = sorted(self.values.sources(weight))
        largest = max(sources, key=lambda name: self._sizes[name])  # of a matrix with a low-rank update: the matrix
        size = self._sizes[largest] if len(sources) == 1 else weight.numel()
        name = layer_of(largest)
        return self._layer(name, product, size, "recurrent" if is_recurrent(name) else None)

    def _roles(self, product: Product) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Which operand is the input and which the weight (None: neither is)."""
        first, second = product.first, product.second
        only_second = product.kind == "embedding" or product.kind.startswith("conv")
        takes_weights = only_second or self._function in _LAYER_FUNCTIONS
        if self.values.sources(second) and (takes_weights or self.values.is_activation(first)):
            return first, second
        if self.values.sources(first) and self.values.is_activation(second) and not only_second:
            return second, first
        return first, None

    def _layer(self, name: str, product: Product, weights: int, kind: str | None = None) -> SeenLayer:
        seen = self.layers.get(name)
        if seen is None:
            seen = self.layers[name] = SeenLayer(name, kind or product.kind, weights, product.in_features)
        elif seen.kind == "embedding" and product.kind == "linear":  # a table that is also the output layer
            seen.kind, seen.in_features = product.kind, product.in_features
        return seen


def _tensors(tree: tuple[Any, ...]) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(operation: Any, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that an operation changes in place, as its signature marks them."""
    declared = operation._schema.arguments  # optional ones at its end may not be given
    pairs = zip(arguments, declared, strict=False)
    return _tensors(tuple(value for value, about in pairs if about.alias_info and about.alias_info.is_write))


class _Functions(TorchFunctionMode):
    """Sees calls of torch functions, before they are taken apart into operations."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:  # look inside, at the calls that a quantized network quantizes
            with self:
                return open_attention(*args, **(kwargs or {}))
        if func in OPENED:
            with self:
                return OPENED[func](plain, *args, **(kwargs or {}))
        self._watch.call_function(getattr(func, "__name__", str(func)), args)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Sees tensor operations, after they were taken apart."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._watch.run_operation(func, args, kwargs or {}, output)
        return output
