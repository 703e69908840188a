"""Layers that are calls, not modules: products of activations, and functions given a parameter.

The module in whose forward they happen (their owner) runs it under a torch function mode that sees each call,
quantizes its operands and passes it on. Products are numbered as `core/naming.py` says.
"""

from __future__ import annotations

import threading
import types
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bitplan.core.naming import ATTENTION, MATRIX_PRODUCTS, product_name
from bitplan.quant.layers import Adopted
from bitplan.quant.quantizers import InputQuantizer
from bitplan.quant.recurrence import OPENED, Product, plain

Function = Callable[..., Any]

_WEIGHTED: dict[Function, tuple[int, int]] = {  # function → where its input and its weight stand
    F.linear: (0, 1),
    **{getattr(torch, f"conv{transposed}{n}d"): (0, 1) for transposed in ("", "_transpose") for n in (1, 2, 3)},
}
_PRODUCTS: dict[Function, tuple[str, int, int]] = {  # function → its name in plans, where its two operands stand
    torch.matmul: ("matmul", 0, 1),
    torch.Tensor.matmul: ("matmul", 0, 1),
    torch.Tensor.__matmul__: ("matmul", 0, 1),
    torch.Tensor.__rmatmul__: ("matmul", 1, 0),
    torch.mm: ("mm", 0, 1),
    torch.Tensor.mm: ("mm", 0, 1),
    torch.bmm: ("bmm", 0, 1),
    torch.Tensor.bmm: ("bmm", 0, 1),
    torch.addmm: ("addmm", 1, 2),
    torch.Tensor.addmm: ("addmm", 1, 2),
    torch.einsum: ("einsum", 1, 2),
    torch.baddbmm: ("baddbmm", 1, 2),
    torch.Tensor.baddbmm: ("baddbmm", 1, 2),
}
assert {name for name, *_ in _PRODUCTS.values()} == MATRIX_PRODUCTS
_UNCOMPILED = (
    nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.RNNBase, nn.RNNCellBase,
)  # fmt: skip
_SOFTMAX = {F.softmax, torch.softmax, torch.Tensor.softmax}


class WeightedCall(nn.Module):
    """A function given one of the owner's parameters; `parameter` is its path from the owner.

    `loosely` also accepts a tensor of the parameter's shape: what a module computes from its own weight.
    """

    def __init__(self, weight: nn.Module, inputs: nn.Module, parameter: str, *, loosely: bool = False) -> None:
        super().__init__()
        self.weight_quantizer = weight
        self.input_quantizer = inputs
        self.parameter = parameter
        self.loosely = loosely

    def claims(self, operand: Tensor, owner: nn.Module) -> bool:
        """Tell whether this operand is the parameter, a view of it or, loosely, made from it."""
        parameter = resolve(owner, self.parameter)
        if operand is parameter or operand._base is parameter:
            return True
        return self.loosely and not isinstance(operand, nn.Parameter) and operand.shape == parameter.shape

    def quantized(self, operand: Tensor, owner: nn.Module) -> Tensor:
        """The operand with quantized values; of a view, the same view of the whole quantized parameter."""
        parameter = resolve(owner, self.parameter)
        if operand is parameter or operand._base is not parameter:
            alone: Tensor = self.weight_quantizer(operand)
            return alone
        whole: Tensor = self.weight_quantizer(parameter)
        return whole.as_strided(operand.size(), operand.stride(), operand.storage_offset() - parameter.storage_offset())


class ProductCall(nn.Module):
    """A product of two activations, each with its own quantizer.

    The first product of an attention also brings the quantizer of the softmax between its two.
    """

    def __init__(self, left: InputQuantizer, right: InputQuantizer, softmax: InputQuantizer | None = None) -> None:
        super().__init__()
        self.left = left
        self.right = right
        self.softmax = softmax


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
        scores = torch.matmul(self.query(query), self.key(key).transpose(-2, -1)) * factor
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = torch.softmax(self.scores(scores), dim=-1)
        if attn_mask is not None:  # a row that may see nothing attends to nothing, as in torch
            weights = weights.masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)
        weights = torch.dropout(weights, dropout_p, dropout_p > 0.0).to(value.dtype)
        return torch.matmul(self.weights(weights), self.value(value))


class Owner(Adopted):
    """A module that runs its own forward while its calls are quantized."""

    call_quantizers: nn.ModuleDict

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base's forward; torch's own attention uncompiled: dynamo cannot follow a mode into it."""
        if isinstance(self, _UNCOMPILED):
            return self._run_uncompiled(*args, **kwargs)
        return self._run(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        calls, stack = _Calls(self), _stack()
        stack.append(calls)
        try:
            with calls:
                return super().forward(*args, **kwargs)
        finally:
            stack.pop()


class Bystander(Adopted):
    """A module inside an owner: what it calls is not the owner's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base's forward."""
        stack = _stack()
        stack.append(None)
        try:
            return super().forward(*args, **kwargs)
        finally:
            stack.pop()


class _Calls(TorchFunctionMode):
    """Sees the calls of one run of an owner's forward."""

    _active: ClassVar[threading.local] = threading.local()

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self._owner = owner
        self._counts: Counter[str] = Counter()
        self._sites: dict[str, Any] = dict(owner.call_quantizers.items())
        products = [site for site in self._sites.values() if isinstance(site, ProductCall)]
        self._softmax = next((site.softmax for site in products if site.softmax is not None), None)

    def __torch_function__(
        self, func: Function, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _stack()[-1] is not self:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward and isinstance(self._owner, nn.MultiheadAttention):
            with self:
                return open_attention(*args, **kwargs)
        if func in _SOFTMAX and self._softmax is not None:
            args, kwargs = _positional(args, kwargs, 1)
            return func(self._softmax(args[0]), *args[1:], **kwargs)
        if func is F.scaled_dot_product_attention:
            site = self._sites.get(self._next(ATTENTION))
            return func(*args, **kwargs) if site is None or not site.query.enabled else site(*args, **kwargs)
        if func in OPENED and any(map(self._site_of, tree_leaves(args))):
            return OPENED[func](self._made_product, *args, **kwargs)
        if func in _WEIGHTED:
            return self._weighted(func, _WEIGHTED[func], args, kwargs)
        if func in _PRODUCTS:
            return self._product(func, args, kwargs)
        return func(*args, **kwargs)

    def _next(self, name: str) -> str:
        count = self._counts[name]
        self._counts[name] += 1
        return product_name(name, count)

    def _product(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, left, right = _PRODUCTS[func]
        args, kwargs = _positional(args, kwargs, right + 1 if right > left else left + 1)
        for inputs, weight in ((left, right), (right, left)):
            if is_parameter(args[weight]):
                return self._weighted(func, (inputs, weight), args, kwargs)
        site = self._sites.get(self._next(name))
        if site is None:
            return func(*args, **kwargs)
        return func(*_replaced(args, {left: site.left(args[left]), right: site.right(args[right])}), **kwargs)

    def _weighted(self, func: Function, where: tuple[int, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = _positional(args, kwargs, 2)
        inputs, weight = where
        site = self._site_of(args[weight])
        if site is not None:
            quantized = site.quantized(args[weight], self._owner)
            args = _replaced(args, {inputs: site.input_quantizer(args[inputs]), weight: quantized})
        return func(*args, **kwargs)

    def _site_of(self, operand: Any) -> WeightedCall | None:
        """The call whose weight an operand is."""
        if not isinstance(operand, Tensor):
            return None
        calls = (site for site in self._sites.values() if isinstance(site, WeightedCall))
        return next((site for site in calls if site.claims(operand, self._owner)), None)

    def _made_product(self, weight: Tensor, bias: Tensor | None, times: int = 1) -> Product:
        """A product of a recurrent function: its weight is quantized here, once for all steps."""
        site = self._site_of(weight)
        if site is None:
            return plain(weight, bias)
        quantized, quantizer = site.quantized(weight, self._owner), site.input_quantizer
        see = partial(quantizer, times=times) if isinstance(quantizer, InputQuantizer) else quantizer
        return lambda x: F.linear(see(x), quantized, bias)


def resolve(owner: nn.Module, path: str) -> Tensor:
    """The parameter (or what a parametrization makes of it) at a dotted path."""
    found: Any = owner
    for part in path.split("."):
        found = getattr(found, part)
    assert isinstance(found, Tensor)
    return found


def is_parameter(operand: Any) -> bool:
    """Tell whether an operand is a parameter or a view of one."""
    return isinstance(operand, nn.Parameter) or isinstance(getattr(operand, "_base", None), nn.Parameter)


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move operands given by keyword (`F.linear(input=x, weight=w)`) to the front, in the order written."""
    if len(args) >= count:
        return args, kwargs
    names = [
        name for name in ("input", "self", "batch1", "mat1", "weight", "other", "mat2", "batch2") if name in kwargs
    ]
    moved = names[: count - len(args)]
    return (*args, *(kwargs[name] for name in moved)), {k: v for k, v in kwargs.items() if k not in moved}


def _replaced(args: tuple[Any, ...], new: dict[int, Any]) -> tuple[Any, ...]:
    return tuple(new.get(place, value) for place, value in enumerate(args))


def _stack() -> list[_Calls | None]:
    active = _Calls._active
    if not hasattr(active, "stack"):
        active.stack = [None]
    stack: list[_Calls | None] = active.stack
    return stack


# torch hides what its attention function does from modes; the same code without that check shows it.
open_attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda _: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)
