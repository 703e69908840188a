"""Recompute quantized operands in the backward pass instead of saving them for it.

Autograd would save an fp32 copy of every quantized input and weight, beside the input and the weight themselves, which
their quantizers save. Here the copies are computed again when gradients need them, bit for bit, by the quantizer's node
of the graph (docs/decisions/lsq.md).

The hooks live as long as the graph, so they refer to nodes and never to an operand: that would stay alive with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bitplan.quant.lsq import find_node, is_node, recompute

_NO_NODES: Mapping[Tensor, Any] = MappingProxyType({})
_COPY = "CloneBackward0"


class _Recipe(NamedTuple):
    """How a tensor is computed again: by a quantizer's node, and by a change of the node's result."""

    node: Any
    change: Callable[[Tensor], Tensor]


def call_without_saving(
    function: Callable[..., Any], *operands: Any, nodes: Mapping[Tensor, Any] = _NO_NODES, **options: Any
) -> Any:
    """Call `function` without saving its quantized operands; the backward pass recomputes them.

    `nodes` maps further quantized tensors that the function may save to the nodes that computed them.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function(*operands, **options)
    # The operands live while the function runs, so that no other tensor can have their storages.
    recipes = {_storage(operand): recipe for operand in operands if (recipe := _find_recipe(operand)) is not None}
    recipes |= {_storage(tensor): _Recipe(node, _unchanged) for tensor, node in nodes.items()}

    def find_recipe(saved: Tensor) -> _Recipe | None:
        recipe = recipes.get(_storage(saved))
        if recipe is None:
            return None
        (node, copy), size, stride, offset = recipe, saved.size(), saved.stride(), saved.storage_offset()
        return _Recipe(node, lambda whole: copy(whole).as_strided(size, stride, offset))

    call = partial(function, *operands, **options)
    return _call_with_hooks(call, find_recipe) if recipes else call()


def call_without_saving_result(function: Callable[..., Any], operand: Tensor, *more: Any, **options: Any) -> Any:
    """Call a function that saves its result, such as softmax, without saving it; the backward pass calls it again."""
    node = None if torch.compiler.is_compiling() or not torch.is_grad_enabled() else find_node(operand)
    if node is None or _autocasts(operand.device):  # it would be called again without autocast
        return function(operand, *more, **options)
    shape, storage = operand.shape, _storage(operand)

    def find_recipe(saved: Tensor) -> _Recipe | None:
        is_result = saved.shape == shape and _storage(saved) != storage
        return _Recipe(node, lambda whole: function(whole, *more, **options)) if is_result else None

    return _call_with_hooks(partial(function, operand, *more, **options), find_recipe)


def copy_for_bmm(operand: Any) -> Any:
    """Return an operand of a batched matrix product as the product would copy it: this copy can be recomputed."""
    if torch.compiler.is_compiling() or not isinstance(operand, Tensor) or operand.dim() < 4:
        return operand
    sizes, strides = operand.shape[:-2], operand.stride()[:-2]
    folds = all(strides[i] == strides[i + 1] * sizes[i + 1] for i in range(len(sizes) - 1))
    return operand if folds else operand.contiguous()


def _call_with_hooks(call: Callable[[], Any], find_recipe: Callable[[Tensor], _Recipe | None]) -> Any:
    """Make the call and save recipes in the place of the tensors that have one."""
    outer_pack, outer_unpack = _outer_hooks()
    once = outer_pack is not _unchanged  # checkpointing allows a node to unpack its own tensors once

    def pack(saved: Tensor) -> Any:
        return find_recipe(saved) or outer_pack(saved)

    def unpack(packed: Any) -> Tensor:
        if not isinstance(packed, _Recipe):
            return outer_unpack(packed)
        with torch.no_grad():
            return packed.change(recompute(packed.node, once=once))

    with saved_tensors_hooks(pack, unpack):
        return call()


def _find_recipe(operand: Any) -> _Recipe | None:
    """Return how to recompute the storage of a quantizer's result, of a view of it, or of a contiguous copy."""
    if not isinstance(operand, Tensor) or not operand.requires_grad:
        return None
    whole = operand if operand._base is None else operand._base
    node = find_node(whole)
    if node is not None:
        return _Recipe(node, _unchanged)
    before = whole.grad_fn.next_functions if whole.grad_fn is not None and whole.grad_fn.name() == _COPY else ()
    if len(before) == 1 and is_node(before[0][0]) and whole.is_contiguous():
        return _Recipe(before[0][0], Tensor.contiguous)
    return None


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _outer_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the hooks around this call, such as checkpointing's: torch calls the innermost hooks only."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (_unchanged, _unchanged) if hooks is None else hooks


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _autocasts(device: torch.device) -> bool:
    """Tell whether operations on a device are autocast; torch raises for devices without autocast, such as meta."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
