"""Layers that are calls, not modules: products of activations, and functions given a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.core.naming import holder_of
from bitplan.quant.functions import LAYER_FUNCTIONS, Arguments, Multiplication, Sum, replace_arguments
from bitplan.quant.quantizers import InputQuantizer
from bitplan.quant.recompute import call_without_saving, call_without_saving_result, copy_for_bmm
from bitplan.quant.scales import round_bias


class WeightedCall(nn.Module):
    """Functions given a weight, which another module may hold.

    The whole weight is quantized, and parts are taken of it. If the weight is `computed`, the result that a function is
    given is quantized; None decides at each call.
    """

    holder: nn.Module
    _seen: tuple[Tensor, tuple[int, ...]] | None

    def __init__(
        self, weight: nn.Module, inputs: nn.Module, holder: nn.Module, name: str, *, computed: bool | None = False
    ) -> None:
        super().__init__()
        self.weight_quantizer = weight
        self.input_quantizer = inputs
        self.name = name
        self.computed = computed
        self.__dict__["holder"] = holder  # it has this call inside it, perhaps: not a part of the call
        self.__dict__["_seen"] = None

    @property
    def sources(self) -> list[Tensor]:
        """The tensors that the weight is, or is computed from."""
        return sources_of(self.holder, self.name)

    @property
    def bias(self) -> Tensor | None:
        """The parameter beside the weight that is its bias, or None."""
        return self.holder._parameters.get(self.name.removesuffix("weight") + "bias")

    def quantized(self) -> Tensor:
        """Return the whole weight with quantized values."""
        whole: Tensor = self.weight_quantizer(getattr(self.holder, self.name))
        return whole

    def quantized_result(self, operand: Tensor) -> Tensor:
        """Quantize a tensor that was computed from the weight; in inference it is kept for `multiplied`."""
        if not self.weight_quantizer.training and not torch.compiler.is_compiling():
            self.__dict__["_seen"] = (operand.detach(), self._versions())
        out: Tensor = self.weight_quantizer(operand)
        return out

    def with_bias(
        self, about: Multiplication, args: Arguments, kwargs: dict[str, Any]
    ) -> tuple[Arguments, dict[str, Any]]:
        """Return the arguments of a call, its bias on the grid of its products if the network is made for integers."""
        place = 0 if about.first else 2  # addmm is given it first
        if about.name not in LAYER_FUNCTIONS or not getattr(self.weight_quantizer, "integer", False):
            return args, kwargs
        if "bias" in kwargs:
            return args, kwargs | {"bias": round_bias(kwargs["bias"], self.input_quantizer, self.weight_quantizer)}
        given = round_bias(args[place], self.input_quantizer, self.weight_quantizer) if len(args) > place else None
        return replace_arguments(args, {} if given is None else {place: given}), kwargs

    def multiplied(self, layer: str) -> Tensor:
        """Return the last weight that was quantized; a computed weight is known after a run only."""
        if not self.computed and self._seen is None:
            weight: Tensor = getattr(self.holder, self.name)
            return weight
        if self._seen is None or self._seen[1] != self._versions():
            raise InputError(
                f"layer {layer!r} computes its weight as it runs: run the network once in inference, with the weights "
                "it has now"
            )
        seen: Tensor = self._seen[0]
        return seen

    def _versions(self) -> tuple[int, ...]:
        return tuple(source._version for source in self.sources)


class ProductCall(nn.Module):
    """A product of two activations, each with its own quantizer.

    The first product of an attention also brings the quantizer of the softmax between its two.
    """

    def __init__(self, left: InputQuantizer, right: InputQuantizer, softmax: InputQuantizer | None = None) -> None:
        super().__init__()
        self.left = left
        self.right = right
        self.softmax = softmax


class AdditionCall(nn.Module):
    """An addition of two activations that an integer kernel executes: each passes through 8 bits.

    `entries` are the operands that are arguments of the owner's forward, by name and place, with their quantizers.
    They are quantized when the forward begins, so that everything in it reads the same integers.
    """

    entries: dict[str, tuple[int, nn.Module]]

    def __init__(self, left: nn.Module, right: nn.Module, entries: dict[str, tuple[int, nn.Module]]) -> None:
        super().__init__()
        self.left = left
        self.right = right
        self.__dict__["entries"] = entries
        self._at_entry = [any(one is quantizer for _, quantizer in entries.values()) for one in (left, right)]

    def added(self, addends: Sum) -> Tensor:
        """Add the quantized operands, into the left one if the call writes in place."""
        written = addends.left
        left = written if self._at_entry[0] else self.left(self._copy_if_needed(addends))
        right = addends.right if self._at_entry[1] else self.right(addends.right)
        if not addends.in_place:
            return torch.add(left, right)
        return written.add_(right) if left is written else written.copy_(torch.add(left, right))

    def _copy_if_needed(self, addends: Sum) -> Tensor:
        """Return the left operand, copied if the call overwrites it before its quantizer needs it for gradients."""
        is_needed = addends.in_place and torch.is_grad_enabled() and getattr(self.left, "enabled", False)
        return addends.left.clone() if is_needed else addends.left


class AttentionCall(nn.Module):
    """scaled_dot_product_attention in steps, so that both products and the softmax see quantized inputs."""

    def __init__(self, quantizers: dict[str, InputQuantizer]) -> None:
        super().__init__()
        self.query, self.key, self.scores = quantizers["query"], quantizers["key"], quantizers["scores"]
        self.weights, self.value = quantizers["weights"], quantizers["value"]

    def forward(  # the signature is torch's
        self,
        query: Tensor,  # (…, heads, L, d)
        key: Tensor,  # (…, heads, S, d)
        value: Tensor,  # (…, heads, S, e)
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Softmax(q̂k̂ᵀ·scale + mask), quantized before and after, times v̂."""
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        scores = _multiply(self.query(query), self.key(key).transpose(-2, -1)) * factor
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = call_without_saving_result(torch.softmax, self.scores(scores), dim=-1)
        if attn_mask is not None:  # a row that may see nothing attends to nothing, as in torch
            weights = weights.masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)
        weights = torch.dropout(weights, dropout_p, dropout_p > 0.0).to(value.dtype)
        return _multiply(self.weights(weights), self.value(value))


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    out: Tensor = call_without_saving(torch.matmul, copy_for_bmm(left), copy_for_bmm(right))
    return out


def sources_of(module: nn.Module, name: str) -> list[Tensor]:
    """Return the tensors that a weight of a module is, or is computed from."""
    if name in getattr(module, "parametrizations", ()):
        parametrized: Any = module.parametrizations
        return list(parametrized[name].parameters())
    if name in module._parameters or not any(map(_stands_for(name), module._parameters)):
        return [getattr(module, name)]
    return [value for own, value in module.named_parameters(recurse=False) if _stands_for(name)(own)]


def _stands_for(name: str) -> Callable[[str], bool]:
    """Return a test for names of parameters that are stored instead of this weight and compute it."""
    return lambda own: own != name and holder_of(own)[1] == name
