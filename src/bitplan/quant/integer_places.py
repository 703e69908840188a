"""Find what an integer kernel computes beside the layers: the norms that follow convolutions, and residual additions.

Like layers they are found by what a forward pass does: a norm by the tensor that it reads, an addition by the tensors
that it adds. `quantize(…, integer=True)` then reaches both (docs/decisions/integer-training.md).
"""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitplan.core.naming import join_names, layer_of, product_name
from bitplan.core.records import Addition, Integers
from bitplan.forward.operations import Key, ModuleCall, Observer, Values, find_products, tensors_in, written_tensors
from bitplan.forward.shadow import Shadow
from bitplan.quant.functions import ADDITION, find_sum
from bitplan.quant.layers import original_class


def find_integers(model: nn.Module, example: Any) -> Integers:
    """Run a model once, without data, and return what it found; `example` is what `trace` takes."""
    shadow = Shadow(model)
    positional, keyword = shadow.example(example)
    watch = IntegerObserver(shadow.model)
    watch.add_inputs((positional, keyword))
    with shadow.running(), watch:
        watch.add_outputs(shadow.model(*positional, **keyword))
    return watch.found


class IntegerObserver(Observer):
    """Find norms behind convolutions and residual additions in one forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._values = Values()
        for name, parameter in model.named_parameters():
            self._values.add_parameter(parameter, name)
        self._arguments: dict[ModuleCall, dict[Key, str]] = {}  # the values of a call's arguments, and their names
        self._made_by: dict[Key, str] = {}  # the convolution that made a value, directly or with its norm
        self._readers: Counter[Key] = Counter()
        self._norms: dict[str, list[tuple[Key, str]]] = {}
        self._convolved: dict[str, set[Key]] = {}
        self._additions: dict[str, list[Addition]] = {}
        self._floats: dict[str, None] = {}
        self._sums: set[Key] = set()  # what residual additions made
        self._flows: dict[Key, str] = {}  # the convolution that made a value, or what it was picked from
        self._fed: dict[str, set[str]] = {}  # layer → those that it read of, "" for anything else
        super().__init__(model)

    def add_inputs(self, given: Any) -> None:
        """Tell what the model is given."""
        for tensor in tensors_in(given):
            self._values.add_input(tensor, "")

    def add_outputs(self, made: Any) -> None:
        """Tell what the model gives: whoever called it reads that."""
        self._readers.update(self._values.key(tensor) for tensor in tensors_in(made))

    @property
    def found(self) -> Integers:
        """What was seen."""
        norms = {layer: self._norm_of(layer) for layer in self._norms}
        additions = [_agreed(seen) for seen in self._additions.values()]
        floats = [name for name in self._floats if name not in self._additions]
        return Integers(
            additions=tuple(additions),
            norms={layer: path for layer, path in norms.items() if path},
            floats=tuple(floats),
            feeds={layer: next(iter(made)) for layer, made in self._fed.items() if len(made) == 1 and "" not in made},
        )

    def _norm_of(self, layer: str) -> str:
        """The one norm that reads whatever a convolution makes, and that reads of no other; empty if there is none."""
        seen = self._norms[layer]
        paths = {path for _, path in seen}
        others = {path for other, found in self._norms.items() if other != layer for _, path in found}
        alone = {key for key, _ in seen} == self._convolved[layer] and all(self._readers[key] == 1 for key, _ in seen)
        return paths.pop() if alone and len(paths) == 1 and paths.isdisjoint(others) else ""

    def enter_module(self, call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the values of a call's arguments."""
        names = self._arguments[call] = {}
        for name, value in name_arguments(call.module, args, kwargs).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                names.setdefault(self._values.key(value), name)

    def call_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of torch that the model calls, and note it if it normalizes or adds."""
        addends = find_sum(func, args, kwargs)
        is_residual = addends is not None and self._note_sum(addends.left, addends.right)
        read = self._values.key(args[0]) if func is F.batch_norm and args else None
        out = func(*args, **kwargs)
        if is_residual:
            self._sums.add(self._values.key(out))
        layer = self._made_by.get(read) if read is not None else None
        if read is not None and layer is not None:
            self._norms.setdefault(layer, []).append((read, self._norm_at(args)))
            self._made_by[self._values.key(out)] = layer
        return out

    def _norm_at(self, args: tuple[Any, ...]) -> str:
        """The module that normalizes by statistics and figures of its own; empty if it is none."""
        call = self.calls[-1]
        own = call.module._buffers.get("running_mean")
        affine = all(call.module._parameters.get(name) is not None for name in ("weight", "bias"))
        return call.path if own is not None and len(args) > 1 and args[1] is own and affine else ""

    def _note_sum(self, left: Tensor, right: Tensor) -> bool:
        """Note an addition; tell whether it adds something to what its module was given, at once or in the end."""
        call = self.calls[-1]
        name = product_name(ADDITION, call.functions[ADDITION])
        call.functions[ADDITION] += 1
        both = self._values.is_activation(left) and self._values.is_activation(right)
        if not both or left.shape != right.shape:
            return False
        keys = self._values.key(left), self._values.key(right)
        first, second = (self._arguments.get(call, {}).get(key, "") for key in keys)
        made = [key for key, argument in zip(keys, (first, second), strict=True) if not argument]
        layers = tuple(dict.fromkeys(self._made_by[key] for key in made if key in self._made_by))
        is_residual = bool(first or second) or not self._sums.isdisjoint(keys)
        if not layers:
            self._floats |= {join_names(call.path, name): None} if is_residual else {}
            return is_residual
        fed = [self._flows[key] for key in keys if key in self._flows]  # an argument may be one's output as well
        makers = tuple(dict.fromkeys((*layers, *fed)))
        seen = Addition(module=call.path, call=name, left=first, right=second, layers=makers)
        self._additions.setdefault(seen.name, []).append(seen)
        return is_residual

    def run_operation(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """Note the convolutions, and the values that layers read."""
        inputs, outputs = tensors_in((arguments, options)), tensors_in(output)
        if outputs:  # others only ask for a device or a shape
            self._readers.update({self._values.key(tensor) for tensor in inputs} & self._made_by.keys())
        picks = operation.overloadpacket in _PICKING and inputs  # looked at before it may be written to
        picked_from = self._flows.get(self._values.key(inputs[0])) if picks else None
        products = find_products(operation, arguments, output)
        weighted = [product for product in products if product.kind != "embedding"]
        layers = [(self._values.sources(product.second), product.kind) for product in weighted]
        self._values.made(outputs, inputs, "", layer=bool(layers))
        self._values.wrote(written_tensors(operation, arguments), inputs, "")
        if picked_from is not None:
            self._flows[self._values.key(outputs[0])] = picked_from
        for (sources, kind), product in zip(layers, weighted, strict=True):
            if len(sources) != 1:
                continue
            (layer,) = map(layer_of, sources)
            self._fed.setdefault(layer, set()).add(self._flows.get(self._values.key(product.first), ""))
            if kind in _CONVOLUTIONS:
                key = self._values.key(outputs[0])
                self._made_by[key] = self._flows[key] = layer
                self._convolved.setdefault(layer, set()).add(key)


_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
_PICKING = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit_no_training", "relu", "relu_", "hardtanh",
        "hardtanh_", "clamp", "clamp_", "clamp_min", "clamp_min_", "max_pool2d_with_indices",
    )
)  # fmt: skip
"""Operations after which a value can be rounded as well as before: they cut off, pick, or belong to the kernel."""


def name_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a module's forward by their names there; those that have no name of their own are left out."""
    names = argument_names(module)
    return dict(zip(names, args, strict=False)) | {name: value for name, value in kwargs.items() if name in names}


def argument_names(module: nn.Module) -> list[str]:
    """What the forward of a module's own class calls its arguments, in their order."""
    try:
        parameters = list(inspect.signature(original_class(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):  # of scripted or builtin code, which does not say
        return []
    return [one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _agreed(seen: list[Addition]) -> Addition:
    """What all runs of one addition have in common: an operand is an argument only if it always is."""
    first = seen[0]
    left, right = ({one.left for one in seen}, {one.right for one in seen})
    layers = tuple(dict.fromkeys(layer for one in seen for layer in one.layers))
    return Addition(
        module=first.module,
        call=first.call,
        left=first.left if len(left) == 1 else "",
        right=first.right if len(right) == 1 else "",
        layers=layers,
    )
