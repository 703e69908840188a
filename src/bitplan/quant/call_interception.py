"""Modules that run their own forward while the functions it calls are quantized.

The forward runs under a torch function mode that sees each call, quantizes its operands and passes it on. A weight is
quantized as soon as a function takes it, whole, so that whatever part or order of it is multiplied is quantized; where
it is computed, its result is. Products of activations are numbered as `core/naming.py` says.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bitplan.adapters.torch import uncompiled
from bitplan.core.naming import ATTENTION, CALL_QUANTIZERS, product_name
from bitplan.quant.calls import AdditionCall, AttentionCall, ProductCall, WeightedCall
from bitplan.quant.functions import (
    ADDITION,
    LAYER_FUNCTIONS,
    MOVES,
    MULTIPLICATIONS,
    SOFTMAX,
    Arguments,
    Function,
    Multiplication,
    find_sum,
    open_attention,
    operands_of_einsum,
    pairs_of_einsum,
    place_operands,
    replace_arguments,
)
from bitplan.quant.layers import Adopted, adopt_, release_
from bitplan.quant.quantizers import InputQuantizer
from bitplan.quant.recompute import call_without_saving, call_without_saving_result, copy_for_bmm
from bitplan.quant.recurrence import OPENED, Product, plain_product

# Modules that run their own forward while the functions it calls are quantized.

_UNCOMPILED = (
    nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.RNNBase, nn.RNNCellBase,
)  # fmt: skip
BORROWED = "borrowed_calls"
"""Calls whose quantizers another module has: a plain list, so that they are nobody's twice."""


class CallOwner(Adopted):
    """A module that runs its own forward while its calls are quantized."""

    call_quantizers: nn.ModuleDict

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base's forward; torch's own attention uncompiled: dynamo cannot follow a mode into it."""
        if isinstance(self, _UNCOMPILED):
            return self._run_uncompiled(*args, **kwargs)
        return self._run(*args, **kwargs)

    @uncompiled
    def _run_uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        calls, stack = CallInterceptor(self), _stack()
        args, kwargs = calls.entered(args, kwargs)
        stack.append(calls)
        try:
            with calls:
                return super().forward(*args, **kwargs)
        finally:
            stack.pop()


class ExcludedModule(Adopted):
    """A module inside an owner whose products are not the owner's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base's forward."""
        stack = _stack()
        stack.append(None)
        try:
            return super().forward(*args, **kwargs)
        finally:
            stack.pop()


class TrackedWeight(NamedTuple):
    """The calls whose weights a tensor holds, quantized or not, or the one call that it was computed from."""

    calls: tuple[WeightedCall, ...]
    quantized: bool


class CallInterceptor(TorchFunctionMode):
    """See the calls of one run of an owner's forward, also those inside the modules that it calls."""

    _active: ClassVar[threading.local] = threading.local()

    def __init__(self, owner: CallOwner) -> None:
        super().__init__()
        self._owner = owner
        self._counts: Counter[str] = Counter()
        self._sites: dict[str, Any] = dict(owner.call_quantizers.items())
        products = [site for site in self._sites.values() if isinstance(site, ProductCall)]
        self._softmax = next((site.softmax for site in products if site.softmax is not None), None)
        sums = [site for site in self._sites.values() if isinstance(site, AdditionCall)]
        self._entries = {name: entry for site in sums for name, entry in site.entries.items()}
        self._adds = bool(sums)
        calls = [site for site in self._sites.values() if isinstance(site, WeightedCall)]
        calls += vars(owner).get(BORROWED, [])
        self._sources = {source: TrackedWeight((call,), quantized=False) for call in calls for source in call.sources}
        self._weights: dict[Tensor, TrackedWeight] = {}
        self._constants: dict[Tensor, None] = {}
        self._follows_all = any(call.computed is not False for call in calls)
        self._quantized_weights: dict[tuple[WeightedCall, bool], Tensor] = {}

    def entered(self, args: Arguments, kwargs: dict[str, Any]) -> tuple[Arguments, dict[str, Any]]:
        """Return the owner's arguments, quantized if they are operands of its additions."""
        new = {place: entry(args[place]) for place, entry in self._entries.values() if place < len(args)}
        named = {name: entry(kwargs[name]) for name, (_, entry) in self._entries.items() if name in kwargs}
        return replace_arguments(args, new), kwargs | named

    def __torch_function__(
        self, func: Function, kinds: Any, args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_own = _stack()[-1] is self
        if func is F.multi_head_attention_forward and self._has_work_in(args, kwargs, is_own=is_own):
            with self:
                return open_attention(*args, **kwargs)
        if func in SOFTMAX and self._softmax is not None and is_own:
            args = args or (kwargs.pop("input"),)
            return call_without_saving_result(func, self._softmax(args[0]), *args[1:], **kwargs)
        if func is F.scaled_dot_product_attention and is_own:
            site = self._sites.get(self._next(ATTENTION))
            return func(*args, **kwargs) if site is None or not site.query.enabled else site(*args, **kwargs)
        if func in OPENED and self._has_work_in(args, kwargs, is_own=is_own):
            return OPENED[func](self._make_product, *args, **kwargs)
        if func is torch.einsum:
            return self._einsum(*operands_of_einsum(args), is_own=is_own)
        if func in MULTIPLICATIONS:
            return self._multiply(func, MULTIPLICATIONS[func], args, kwargs, is_own=is_own)
        addends = find_sum(func, args, kwargs) if self._adds and is_own else None
        site = self._sites.get(self._next(ADDITION)) if addends is not None else None
        if addends is not None and site is not None:
            return site.added(addends)
        return self._run_and_follow(func, args, kwargs)

    def _has_work_in(self, args: Arguments, kwargs: dict[str, Any], *, is_own: bool) -> bool:
        """Tell whether torch's attention must be opened: it is the owner's own, or gets a weight of ours."""
        if is_own and isinstance(self._owner, nn.MultiheadAttention):
            return True
        return any(self._weight(tensor) is not None for tensor in _tensors((*args, *kwargs.values())))

    def _next(self, name: str) -> str:
        count = self._counts[name]
        self._counts[name] += 1
        return product_name(name, count)

    def _einsum(self, equation: str, operands: tuple[Tensor, ...], *, is_own: bool) -> Any:
        """Contract all operands, two at a time."""
        einsum, result = MULTIPLICATIONS[torch.einsum], operands[0]
        if len(operands) == 1:
            return self._run_and_follow(torch.einsum, (equation, result), {})
        equations = [equation] if len(operands) == 2 else pairs_of_einsum(equation, len(operands))
        for pair, operand in zip(equations, operands[1:], strict=True):
            result = self._multiply(torch.einsum, einsum, (pair, result, operand), {}, is_own=is_own)
        return result

    def _multiply(
        self, func: Function, about: Multiplication, args: Arguments, kwargs: dict[str, Any], *, is_own: bool
    ) -> Any:
        args, kwargs = place_operands(about, args, kwargs)
        for inputs, weight in about.orders:
            held = self._weight(args[weight])
            if held is not None and self._is_computed_by(about, held, args[inputs]):
                return self._run_and_follow(func, args, kwargs)
            if held is not None:
                new = {inputs: held.calls[0].input_quantizer(args[inputs]), weight: self._operand(args[weight], held)}
                args, kwargs = held.calls[0].with_bias(about, replace_arguments(args, new), kwargs)
                return call_without_saving(func, *args, **kwargs)
        if not is_own or any(is_parameter(args[place]) for place in (about.first, about.second)):
            return self._run_and_follow(func, args, kwargs)  # a weight may be computed so
        site = self._sites.get(self._next(about.name))
        if site is None:
            return self._run_and_follow(func, args, kwargs)
        new = {about.first: site.left(args[about.first]), about.second: site.right(args[about.second])}
        if about.name == "matmul":
            new = {place: copy_for_bmm(operand) for place, operand in new.items()}
        return call_without_saving(func, *replace_arguments(args, new), **kwargs)

    def _is_computed_by(self, about: Multiplication, held: TrackedWeight, other: Tensor) -> bool:
        """Tell whether a product still computes a weight, as a spectral norm does: no operand depends on data."""
        by_layers = about.name in LAYER_FUNCTIONS  # which may also be given learned queries
        return held.calls[0].computed is not False and not by_layers and self._is_constant(other)

    def _make_product(self, weight: Tensor, bias: Tensor | None, times: int = 1) -> Product:
        """Return a product of a recurrent function; its weight is quantized here, once for all steps."""
        held = self._weight(weight)
        if held is None:
            return plain_product(weight, bias)
        quantized, quantizer = self._operand(weight, held), held.calls[0].input_quantizer
        see = partial(quantizer, times=times) if isinstance(quantizer, InputQuantizer) else quantizer
        multiply = partial(F.linear, weight=quantized, bias=bias)  # all steps use this weight, so it is kept
        return lambda x: call_without_saving(multiply, see(x))

    def _weight(self, operand: Any) -> TrackedWeight | None:
        """Return the tracked weight that an operand holds, or None."""
        if not isinstance(operand, Tensor):
            return None
        held = self._weights.get(operand) or self._sources.get(operand)
        if held is None and operand._base is not None:  # a part that was taken elsewhere
            held = self._sources.get(operand._base)
        return held

    def _operand(self, operand: Tensor, held: TrackedWeight) -> Tensor:
        """Return the operand with quantized values."""
        if held.quantized:
            return operand
        (call,) = held.calls
        base = operand if operand in self._sources else operand._base
        if call.computed or base is None or base not in self._sources:
            return call.quantized_result(operand)
        return self._take_part(operand, base, call)

    def _take_part(self, part: Tensor, parameter: Tensor, call: WeightedCall) -> Tensor:
        """Return a call's weight, or a view of it, with quantized values."""
        key = (call, torch.is_grad_enabled())
        if key not in self._quantized_weights:
            self._quantized_weights[key] = call.quantized()
        whole = self._quantized_weights[key]
        if part is parameter:
            return whole
        return whole.as_strided(part.size(), part.stride(), part.storage_offset() - parameter.storage_offset())

    def _run_and_follow(self, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:
        """Run a function that multiplies nothing, and remember if its result is still a weight."""
        given = list(_tensors((*args, *kwargs.values())))
        held = [weight for weight in map(self._weight, given) if weight is not None]
        if held and func in MOVES and all(call.computed is False for weight in held for call in weight.calls):
            named = dict(zip(kwargs, _map_tensors(kwargs.values(), self._as_quantized), strict=True))
            out = func(*_map_tensors(args, self._as_quantized), **named)
            calls = tuple(dict.fromkeys(call for weight in held for call in weight.calls))
            self._weights.update((made, TrackedWeight(calls, quantized=True)) for made in _tensors((out,)))
            return out
        out = func(*args, **kwargs)
        if self._follows_all:
            self._note(held, given, args[:1] if out is None else (out,))  # without a result, what was written to
        return out

    def _note(self, held: list[TrackedWeight], given: list[Tensor], made: Arguments) -> None:
        """Remember results that depend on a weight and on no data, and results that depend on neither."""
        calls = [call for weight in held for call in weight.calls if call.computed is not False]
        if calls and all(self._is_constant(tensor) or not tensor.is_floating_point() for tensor in given):
            self._weights.update((each, TrackedWeight((calls[0],), quantized=False)) for each in _tensors(made))
        elif not calls and all(map(self._is_constant, given)):
            self._constants.update((each, None) for each in _tensors(made))

    def _as_quantized(self, argument: Any) -> Any:
        held = self._weight(argument)
        return argument if held is None else self._operand(argument, held)

    def _is_constant(self, tensor: Tensor) -> bool:
        """Tell whether a tensor does not depend on the owner's arguments."""
        if isinstance(tensor, nn.Parameter) or tensor in self._weights or tensor in self._constants:
            return True
        return any(tensor is buffer for buffer in self._owner.buffers())


def is_parameter(operand: Any) -> bool:
    """Tell whether an operand is a parameter or a view of one."""
    return isinstance(operand, nn.Parameter) or isinstance(getattr(operand, "_base", None), nn.Parameter)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results, also those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _map_tensors(values: Iterable[Any], change: Callable[[Any], Any]) -> Arguments:
    """Return arguments with every tensor changed, also those in lists."""
    return tuple(_map_tensors(value, change) if type(value) in (list, tuple) else change(value) for value in values)


def _stack() -> list[CallInterceptor | None]:
    active = CallInterceptor._active
    if not hasattr(active, "stack"):
        active.stack = [None]
    stack: list[CallInterceptor | None] = active.stack
    return stack


# Modules become owners of calls, and what is inside them is set apart.


def intercept_calls_(module: nn.Module) -> nn.ModuleDict:
    """Make a module the owner of calls, and return them."""
    if not isinstance(module, CallOwner):
        if isinstance(module, ExcludedModule):
            release_(module)
        adopt_(module, CallOwner)
    return calls_of(module)


def calls_of(module: nn.Module) -> nn.ModuleDict:
    """Return the calls whose quantizers a module has."""
    if CALL_QUANTIZERS not in module._modules:
        module.call_quantizers = nn.ModuleDict()
    calls = module.call_quantizers
    assert isinstance(calls, nn.ModuleDict)
    return calls


def exclude_inner_modules_(owner: CallOwner) -> None:
    """Keep the calls of modules inside an owner apart from the owner's, if these are numbered."""
    calls = owner.call_quantizers.values()
    if not any(isinstance(call, ProductCall | AttentionCall | AdditionCall) for call in calls):
        return
    adds = any(isinstance(call, AdditionCall) for call in calls)
    for module in owner.modules():
        if module is not owner and not isinstance(module, Adopted) and not _makes_no_calls(module, adds=adds):
            adopt_(module, ExcludedModule)


def _makes_no_calls(module: nn.Module, *, adds: bool) -> bool:
    """Tell whether a module is ours, or a module of torch's that makes no numbered call.

    A module of torch's that has parts may add activations, unless it merely calls its parts.
    """
    home = type(module).__module__
    composed = adds and any(module.children()) and home != nn.Sequential.__module__
    return home.startswith("bitplan.quant.") or (home.startswith("torch.nn.") and not composed)
