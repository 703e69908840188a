"""What a layer's function keeps for its backward pass: how its quantized operands were made, not the operands.

Autograd would keep an fp32 copy of every quantized input and weight, beside the input and the weight themselves, which
their quantizers keep. Here the copies are made once more when gradients need them, bit for bit, by the node of the
graph that made them (docs/decisions/0027).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bitplan.quant.lsq import is_node, made_by, remade

_NONE: Mapping[Tensor, Any] = MappingProxyType({})
_COPY = "CloneBackward0"


class _Remake(NamedTuple):
    """A tensor to be made again: the node of the quantizer, and what was done with what it made."""

    node: Any
    done: Callable[[Tensor], Tensor]
    once: bool

    def made(self) -> Tensor:
        """The tensor."""
        with torch.no_grad():
            return self.done(remade(self.node, once=self.once))


def lean(function: Callable[..., Any], *operands: Any, made: Mapping[Tensor, Any] = _NONE, **options: Any) -> Any:
    """Call a function; its backward pass remakes those of its operands that a quantizer made.

    `made` has more tensors that it may keep, and the nodes that made them.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function(*operands, **options)
    # Held here, the operands live until the function is done, so that their storages tell which tensors are theirs.
    found = {_storage(tensor): (tensor, *source) for tensor in operands if (source := _source(tensor)) is not None}
    found |= {_storage(tensor): (tensor, node, _as_it_is) for tensor, node in made.items()}

    def remake(kept: Tensor) -> tuple[Any, Callable[[Tensor], Tensor]] | None:
        source = found.get(_storage(kept))
        if source is None:
            return None
        (operand, node, copied), size, stride = source, kept.size(), kept.stride()
        if operand._base is None and size == operand.size() and stride == operand.stride():  # the whole of it
            return node, copied
        offset = kept.storage_offset()
        return node, lambda whole: copied(whole).as_strided(size, stride, offset)

    return _called(partial(function, *operands, **options), remake) if found else function(*operands, **options)


def recalled(function: Callable[..., Any], operand: Tensor, *more: Any, **options: Any) -> Any:
    """Call a function that keeps what it makes, as a softmax does: its backward pass calls it again instead."""
    node = None if torch.compiler.is_compiling() or not torch.is_grad_enabled() else made_by(operand)
    if node is None or _autocasts(operand.device):  # it would be called again without autocast
        return function(operand, *more, **options)

    def remake(kept: Tensor) -> tuple[Any, Callable[[Tensor], Tensor]] | None:
        is_result = kept.shape == operand.shape and _storage(kept) != _storage(operand)
        return (node, lambda whole: function(whole, *more, **options)) if is_result else None

    return _called(partial(function, operand, *more, **options), remake)


def laid_out(operand: Any) -> Any:
    """An operand of a product of many matrices as that product would copy it: here the copy can be remade."""
    if torch.compiler.is_compiling() or not isinstance(operand, Tensor) or operand.dim() < 4:
        return operand
    sizes, strides = operand.shape[:-2], operand.stride()[:-2]
    folds = all(strides[i] == strides[i + 1] * sizes[i + 1] for i in range(len(sizes) - 1))
    return operand if folds else operand.contiguous()


def _called(call: Callable[[], Any], remake: Callable[[Tensor], tuple[Any, Callable[[Tensor], Tensor]] | None]) -> Any:
    pack, unpack = _hooks_of_others()

    def packed(kept: Tensor) -> Any:
        found = remake(kept)
        return pack(kept) if found is None else _Remake(*found, once=pack is not _as_it_is)

    def unpacked(kept: Any) -> Tensor:
        return kept.made() if isinstance(kept, _Remake) else unpack(kept)

    with saved_tensors_hooks(packed, unpacked):
        return call()


def _source(operand: Any) -> tuple[Any, Callable[[Tensor], Tensor]] | None:
    """The quantizer's node that made an operand, or the tensor of which it is a view or a contiguous copy."""
    if not isinstance(operand, Tensor) or not operand.requires_grad:
        return None
    whole = operand if operand._base is None else operand._base
    node = made_by(whole)
    if node is not None:
        return node, _as_it_is
    ahead = whole.grad_fn.next_functions if whole.grad_fn is not None and whole.grad_fn.name() == _COPY else ()
    if len(ahead) == 1 and is_node(ahead[0][0]) and whole.is_contiguous():
        return ahead[0][0], Tensor.contiguous
    return None


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _hooks_of_others() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """What is done with kept tensors around here, as by checkpointing: of several hooks torch calls only the last."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (_as_it_is, _as_it_is) if found is None else found


def _as_it_is(kept: Tensor) -> Tensor:
    return kept


def _autocasts(device: torch.device) -> bool:
    """Whether operations on a device are cast; of one without autocast, such as meta, torch will not be asked."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
