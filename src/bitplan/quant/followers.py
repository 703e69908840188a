"""Which batch normalizations directly follow a layer: they read all that it makes, and nothing else reads it."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.modules.batchnorm import _BatchNorm

from bitplan.forward.operations import Operations, tensors_in, written
from bitplan.forward.shadow import Shadow, arguments_of
from bitplan.forward.values import Key, Values
from bitplan.quant.layers import Adopted


def norms_after(model: nn.Module, example: Any) -> dict[str, str]:
    """Layers and the batch normalizations that directly follow them in a forward pass, both by their paths.

    `example` is what `trace` takes; the model itself is neither run nor changed.
    """
    given = arguments_of(example)
    shadow = Shadow(model)
    try:
        return _Readers(shadow.model).watch(shadow.running(), *shadow.arguments(given))
    except (DataDependentOutputException, DynamicOutputShapeException):
        shadow = Shadow(model, values=True)
        return _Readers(shadow.model).watch(nullcontext(), *shadow.arguments(given))


def scale_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    """k = γ/√(σ² + ε) and β − μ·k of a batch normalization in inference, in double precision."""
    scale = torch.rsqrt(norm.running_var.double() + norm.eps)
    scale = scale if norm.weight is None else scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().double()


class _Readers:
    """Notes what layers make and who reads it, in a forward pass of a copy that is its own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values = Values()
        self._reads: Counter[Key] = Counter()
        self._made: list[tuple[str, Key]] = []
        self._normed: list[tuple[str, Key]] = []
        for path, module in model.named_modules():
            if _is_plain_norm(module):
                module.register_forward_pre_hook(partial(self._note_input, path))
            elif isinstance(module, Adopted):
                module.register_forward_hook(partial(self._note_output, path))

    def watch(
        self, context: AbstractContextManager[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, str]:
        """Run the copy."""
        with torch.no_grad(), context, Operations(self._note):
            outputs = self._model(*args, **kwargs)
        self._reads.update(self._values.key(tensor) for tensor in tensors_in(outputs))
        read_by = {key: path for path, key in self._normed if self._reads[key] == 1}
        made_by = {key: path for path, key in self._made}
        followers: dict[str, set[str | None]] = {}
        leaders: dict[str, set[str | None]] = {}
        for path, key in self._made:
            followers.setdefault(path, set()).add(read_by.get(key))
        for path, key in self._normed:
            leaders.setdefault(path, set()).add(made_by.get(key))
        pairs = ((path, norms.pop()) for path, norms in followers.items() if len(norms) == 1)
        return {path: norm for path, norm in pairs if norm is not None and leaders[norm] == {path}}

    def _note(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        if operation.namespace == "prim":  # asks for a device or a shape, reads nothing
            return
        inputs = tensors_in((arguments, options))
        self._reads.update(self._values.key(tensor) for tensor in inputs)
        self._values.wrote(written(operation, arguments), inputs, "")

    def _note_input(self, path: str, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._normed.append((path, self._values.key(arguments[0])))

    def _note_output(self, path: str, _: nn.Module, __: Any, output: Any) -> None:
        self._made += [(path, self._values.key(tensor)) for tensor in tensors_in(output)]


def _is_plain_norm(module: nn.Module) -> bool:
    """Tell whether a module normalizes by figures of its own and does nothing else."""
    return (
        isinstance(module, _BatchNorm)
        and type(module).forward is _BatchNorm.forward
        and isinstance(module.running_mean, Tensor)
        and isinstance(module.running_var, Tensor)
    )
