"""Observe a forward pass: calls of modules, calls of torch functions, and the tensor operations below them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Functions(TorchFunctionMode):
    """Hand every call of a torch function to `call(function, args, kwargs)`, which returns the result."""

    def __init__(self, call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._call(func, args, kwargs or {})


class Operations(TorchDispatchMode):
    """Show every tensor operation that has run: the operation, its arguments, its options and its output."""

    def __init__(self, show: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        super().__init__()
        self._show = show

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to keep torch's compiler out, torch would import it, which takes as long as torch itself

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # it is no function that somebody called
            output = func(*args, **(kwargs or {}))
        self._show(func, args, kwargs or {}, output)
        return output


@dataclass(eq=False)
class ModuleCall:
    """A running call of a module, and how often it has called each function."""

    path: str
    module: nn.Module
    functions: Counter[str] = field(default_factory=Counter)


class Observer:
    """Observe one forward pass of a model that belongs to the observer: it puts hooks on every module.

    Inside `with observer:` the methods below are called for modules, functions and operations. `calls` are the module
    calls that run now, outermost first; after an error, the last of them is where it happened.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls = [ModuleCall("", model)]
        self.functions = Functions(self.call_function)
        self._operations = Operations(self.run_operation)
        for path, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, path), prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave)

    def __enter__(self) -> Self:
        self.functions.__enter__()
        self._operations.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._operations.__exit__(*error)
        self.functions.__exit__(*error)

    def enter_module(self, call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a module is called."""

    def call_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function in the place of the model, and return its result."""
        return func(*args, **kwargs)

    def run_operation(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """Note a tensor operation that has run."""

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append(ModuleCall(path, module))
        self.enter_module(self.calls[-1], args, kwargs)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        while len(self.calls) > 1 and self.calls.pop().module is not module:
            pass  # calls that ended in an error which the model caught


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return every tensor among arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def written_tensors(operation: Any, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors that an operation changes in place, as its signature marks them."""
    declared = operation._schema.arguments  # optional ones at its end may not be given
    pairs = zip(arguments, declared, strict=False)
    return tensors_in([value for value, about in pairs if about.alias_info and about.alias_info.is_write])


# The products that tensor operations compute: operands, multiply-accumulates, kind.

aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """One multiplication of two tensors. `second` is the weight if only one can be (convolution, table).

    If `by_data`, it counts only if the first tensor depends on data: else the operation puts a weight together.
    """

    kind: str
    first: torch.Tensor
    second: torch.Tensor
    macs: int
    in_features: int
    by_data: bool = False


def find_products(operation: Any, arguments: tuple[Any, ...], output: Any) -> list[Product]:
    """Return the products that an operation computes; most compute none."""
    reader = _READERS.get(operation.overloadpacket)
    return reader(arguments, output) if reader else []


def _convolution(arguments: tuple[Any, ...], output: torch.Tensor) -> list[Product]:
    given, weight, transposed = arguments[0], arguments[1], bool(arguments[6])
    # Each output element sums over weight[1:] inputs; transposed, each input element adds to weight[1:] outputs.
    elements, name = (given.numel(), "conv_transpose") if transposed else (output.numel(), "conv")
    macs = elements * math.prod(weight.shape[1:])
    kind = f"{name}{weight.dim() - 2}d"
    return [Product(kind, given, weight, macs, in_features=int(given.shape[1]))]


def _matmul(first: int) -> Callable[[tuple[Any, ...], torch.Tensor], list[Product]]:
    """Read a matrix product whose operands are arguments `first` and `first + 1`."""

    def read(arguments: tuple[Any, ...], _: torch.Tensor) -> list[Product]:
        left, right = arguments[first], arguments[first + 1]
        columns = right.shape[-1] if right.dim() > 1 else 1
        return [Product("linear", left, right, left.numel() * columns, int(left.shape[-1]))]

    return read


def _linear(arguments: tuple[Any, ...], _: torch.Tensor) -> list[Product]:
    given, weight = arguments[0], arguments[1]
    return [Product("linear", given, weight, given.numel() * weight.shape[0], int(weight.shape[1]))]


def _trilinear(arguments: tuple[Any, ...], output: torch.Tensor) -> list[Product]:
    """Both inputs of a bilinear layer meet its weight at once."""
    one, weight, other = arguments[:3]  # (batch, i), (out, i, j), (batch, j)
    macs = output.numel() * math.prod(weight.shape[1:])
    kind, width = "bilinear", int(weight.shape[1])
    return [Product(kind, one, weight, macs, width), Product(kind, other, weight, 0, width)]


def _convolution_by_time(arguments: tuple[Any, ...], output: torch.Tensor) -> list[Product]:
    given, weight = arguments[0], arguments[1]  # (time, batch, in), (width, in, out)
    macs = output.numel() * math.prod(weight.shape[:2])
    return [Product("conv1d", given, weight, macs, in_features=int(given.shape[2]))]


def _embedding(arguments: tuple[Any, ...], _: torch.Tensor) -> list[Product]:
    table, indices = arguments[0], arguments[1]
    return [Product("embedding", indices, table, 0, int(table.shape[0]))]


def _index(arguments: tuple[Any, ...], _: torch.Tensor) -> list[Product]:
    """Rows of a table, as `table[indices]` and `table.index_select(0, indices)` take them."""
    table, chosen = arguments[0], arguments[1] if isinstance(arguments[1], list | tuple) else [arguments[2]]
    by_row = isinstance(arguments[1], list | tuple) or arguments[1] == 0
    if table.dim() != 2 or len(chosen) != 1 or not by_row or chosen[0].dtype not in (torch.int64, torch.int32):
        return []
    return [Product("embedding", chosen[0], table, 0, int(table.shape[0]), by_data=True)]


def _attention(arguments: tuple[Any, ...], _: torch.Tensor) -> list[Product]:
    query, key, value = arguments[:3]  # (…, T, d), (…, S, d), (…, S, e)
    sources, width = key.shape[-2], query.shape[-1]
    queries = query.numel() // width
    score_macs = query.numel() * sources  # (…, T, d) · (…, d, S)
    mix_macs = queries * sources * value.shape[-1]  # (…, T, S) · (…, S, e)
    return [
        Product("linear", query, key, score_macs, in_features=int(width)),
        Product("linear", query, value, mix_macs, in_features=int(sources)),
    ]


_ADDING = ("addmm", "baddbmm", "addbmm", "addmv")  # which have forms that write into what they add to
_READERS: dict[Any, Callable[[tuple[Any, ...], Any], list[Product]]] = {
    aten.convolution: _convolution,
    aten.conv_tbc: _convolution_by_time,
    aten.linear: _linear,
    aten._trilinear: _trilinear,
    aten.mm: _matmul(0),
    aten.bmm: _matmul(0),
    aten._grouped_mm: _matmul(0),  # mixtures of experts
    aten.mv: _matmul(0),
    aten.dot: _matmul(0),
    aten.vdot: _matmul(0),
    **{getattr(aten, f"{name}{ending}"): _matmul(1) for name in _ADDING for ending in ("", "_")},
    aten._addmm_activation: _matmul(1),
    aten.embedding: _embedding,
    aten._embedding_bag: _embedding,
    aten._embedding_bag_forward_only: _embedding,
    aten.index: _index,
    aten.index_select: _index,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_cudnn_attention: _attention,
}


# Which tensors are the same: the same part of the same storage, not written to in between.

Region = tuple[tuple[int, int], ...] | None
Key = tuple[int, int, int, Region]
"""Storage, how often it was written to, offset, and the covered strides (None: all of it)."""


class Values:
    """Follows storages through a forward pass: their contents, and the tensors that they come from."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice
        self._writes: dict[int, int] = {}
        self._copied_from: dict[Key, Key] = {}
        self._producers: dict[tuple[int, int], str] = {}
        self._sources: dict[int, frozenset[str]] = {}
        self._activations: set[int] = set()
        self._origins: dict[int, Any] = {}

    def storage(self, tensor: torch.Tensor) -> int:
        """Return a number that only this tensor and its views have."""
        storage = tensor.untyped_storage()
        address: int = storage._cdata
        self._kept.setdefault(address, storage)
        return address

    def key(self, tensor: torch.Tensor) -> Key:
        """Return a key that tells this value from others, following copies back to their source."""
        storage = self.storage(tensor)
        writes = self._writes.get(storage, 0)
        covered = _covered(tensor)
        in_one_piece = covered == ((tensor.numel(), 1),)
        as_long = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        key: Key = (storage, writes, int(tensor.storage_offset()), covered)
        if in_one_piece and as_long:  # all of the storage
            key = (storage, writes, 0, None)
        return self._copied_from.get(key, key)

    def producer(self, key: Key) -> str:
        """Return the place where a value was made, in words."""
        return self._producers.get(key[:2], "a constant")

    def is_activation(self, tensor: torch.Tensor) -> bool:
        """Tell whether the tensor depends on the model's input or is the output of a layer."""
        return self.storage(tensor) in self._activations

    def sources(self, tensor: torch.Tensor) -> frozenset[str]:
        """Return the parameters that a tensor was computed from, if it is not an activation."""
        return self._sources.get(self.storage(tensor), frozenset())

    def origin(self, tensor: torch.Tensor) -> Any:
        """Return the note on the origin of a tensor that is not an activation; None for a parameter."""
        return self._origins.get(self.storage(tensor))

    def add_parameter(self, tensor: torch.Tensor, name: str) -> None:
        """Start to follow a parameter, or anything else under a name of its own."""
        self._activations.discard(self.storage(tensor))
        self._sources[self.storage(tensor)] = frozenset({name})

    def add_input(self, tensor: torch.Tensor, label: str) -> None:
        """Start to follow an input of the model."""
        self._activations.add(self.storage(tensor))
        self._producers[(self.storage(tensor), 0)] = label

    def copied(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Note that `target` holds the same numbers as `source`."""
        if source.numel() == target.numel() and source.is_floating_point() and target.is_floating_point():
            self._copied_from[self.key(target)] = self.key(source)

    def made(
        self,
        outputs: Iterable[torch.Tensor],
        inputs: Iterable[torch.Tensor],
        by: str,
        layer: bool,
        origin: Any = None,
    ) -> None:
        """Note new tensors: activations if an input is one (or a layer made them), else still parameters."""
        read = [self.storage(tensor) for tensor in inputs]
        active = layer or self._any_active(read)
        sources = self._sources_of(read)
        new = {self.storage(tensor) for tensor in outputs}.difference(read)  # others are views of what was read
        for storage in new:
            self._producers[(storage, 0)] = by
            self._origins[storage] = origin
            self._inherit(storage, active, sources)

    def wrote(
        self, targets: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], by: str, origin: Any = None
    ) -> None:
        """Note that tensors were written to in place: every view of them has a new value."""
        read = [self.storage(tensor) for tensor in inputs]
        active = self._any_active(read)
        sources = self._sources_of(read)
        for storage in {self.storage(tensor) for tensor in targets}:
            writes = self._writes.get(storage, 0) + 1
            self._writes[storage] = writes
            self._producers[(storage, writes)] = by
            self._origins[storage] = origin
            self._inherit(storage, active, sources)

    def _any_active(self, storages: Iterable[int]) -> bool:
        return not self._activations.isdisjoint(storages)

    def _sources_of(self, storages: Iterable[int]) -> frozenset[str]:
        return frozenset[str]().union(*(self._sources.get(storage, frozenset()) for storage in storages))

    def _inherit(self, storage: int, active: bool, sources: frozenset[str]) -> None:
        if active:
            self._activations.add(storage)
            self._sources.pop(storage, None)
        elif sources:
            self._sources[storage] = sources


def _covered(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """The (size, stride) pairs of a tensor whatever the order of its dimensions, joined where they adjoin."""
    dimensions = zip(tensor.stride(), tensor.size(), strict=True)
    joined: list[tuple[int, int]] = []  # (size, stride)
    for stride, size in sorted((stride, size) for stride, size in dimensions if size != 1):
        if joined and stride == joined[-1][0] * joined[-1][1]:  # it goes on where the one before ends
            inner_size, inner_stride = joined.pop()
            joined.append((inner_size * size, inner_stride))
        else:
            joined.append((size, stride))
    return tuple(joined) or ((1, 1),)
