"""The functions of torch that multiply, and those that only move numbers about.

`graph/trace.py` sees a float network through this table and `quant/call_interception.py` a quantized one, so both see
the same.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitplan.core.naming import MATRIX_PRODUCTS, WEIGHTED, function_name

Function = Callable[..., Any]
Arguments = tuple[Any, ...]

LAYER_FUNCTIONS = frozenset(name for name in WEIGHTED if name in ("linear", "addmm") or name.startswith("conv"))
"""Functions whose second matrix operand is a weight even where the first does not depend on the model's input (learned
queries, position tables); elsewhere parameter × parameter computes a weight (a low-rank update, a spectral norm)."""

SOFTMAX = {F.softmax, torch.softmax, torch.Tensor.softmax}

ADDITION = "add"
"""What plans call additions of activations: `+`, `+=`, torch.add and the methods of tensors are counted together."""
_ADDITIONS = {torch.add, torch.Tensor.add, torch.Tensor.add_, torch.Tensor.__iadd__, torch.Tensor.__add__}
_WRITES = {torch.Tensor.add_, torch.Tensor.__iadd__}


@dataclass(frozen=True)
class Sum:
    """A call that adds two float tensors; `in_place` says that it writes to the first."""

    left: Tensor
    right: Tensor
    in_place: bool


def find_sum(func: Function, args: Arguments, kwargs: dict[str, Any]) -> Sum | None:
    """Return the sum that a function computes, or None if it does not add two float tensors."""
    if func not in _ADDITIONS or kwargs.get("alpha", 1) != 1 or kwargs.get("out") is not None:
        return None
    addends = [*args, *(kwargs[name] for name in ("input", "other") if name in kwargs)]
    if len(addends) != 2 or not all(isinstance(one, Tensor) and one.is_floating_point() for one in addends):
        return None
    return Sum(addends[0], addends[1], func in _WRITES)


@dataclass(frozen=True)
class Multiplication:
    """A function that multiplies two of its arguments: its name in plans, and the places of the two.

    If the function says which is the weight, only the second can be one; else either can.
    """

    name: str
    first: int
    second: int

    @property
    def orders(self) -> tuple[tuple[int, int], ...]:
        """The possible places of input and weight."""
        one, other = (self.first, self.second), (self.second, self.first)
        return (one, other) if self.name in _EITHER else (one,)


_EITHER = MATRIX_PRODUCTS | {"mv", "dot", "inner", "tensordot", "addmv", "addbmm"}
_PLACES = {
    **dict.fromkeys(("einsum", "addmm", "baddbmm", "addmv", "addbmm"), (1, 2)),
    **dict.fromkeys(("__rmatmul__", "embedding", "embedding_bag"), (1, 0)),
}
_WRITTEN = (WEIGHTED - {"__getitem__", "index_select"}) | {"__matmul__", "__rmatmul__"}
MULTIPLICATIONS: dict[Function, Multiplication] = {
    getattr(home, name): Multiplication(function_name(name), *_PLACES.get(name, (0, 1)))
    for name in sorted(_WRITTEN)
    for home in (F, torch, torch.Tensor)
    if hasattr(home, name)
}
MULTIPLICATIONS |= {getattr(F, name): Multiplication(name, 0, 1) for name in ("embedding", "embedding_bag")}
assert {multiplication.name for multiplication in MULTIPLICATIONS.values()} <= WEIGHTED

_MOVING = [
    "t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "view", "view_as",
    "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "expand", "expand_as",
    "broadcast_to", "repeat", "repeat_interleave", "tile", "flip", "fliplr", "flipud", "roll", "rot90", "unfold",
    "contiguous", "clone", "detach", "to", "type", "type_as", "float", "double", "half", "bfloat16", "cuda",
    "cpu", "chunk", "split", "tensor_split", "unbind", "narrow", "select", "diagonal", "as_strided",
    "__getitem__", "index_select", "gather", "take_along_dim", "take", "cat", "concat", "concatenate", "stack",
    "hstack", "vstack", "column_stack", "dstack",
]  # fmt: skip
MOVES: frozenset[Function] = frozenset(
    [getattr(home, name) for name in _MOVING for home in (torch, torch.Tensor) if hasattr(home, name)]
    + [getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data")]
)
"""The functions whose results hold the numbers they were given, some or all, in whatever order or float type."""


def place_operands(
    multiplication: Multiplication, args: Arguments, kwargs: dict[str, Any]
) -> tuple[Arguments, dict[str, Any]]:
    """Move operands given by keyword (`F.linear(input=x, weight=w)`) to the front, in the order written."""
    count = max(multiplication.first, multiplication.second) + 1
    if len(args) >= count:
        return args, kwargs
    moved = [name for name in _KEYWORDS if name in kwargs][: count - len(args)]
    return (*args, *(kwargs[name] for name in moved)), {k: v for k, v in kwargs.items() if k not in moved}


_KEYWORDS = ("input", "self", "a", "batch1", "mat1", "mat", "weight", "other", "b", "mat2", "batch2", "vec", "tensor")


def replace_arguments(args: Arguments, new: dict[int, Any]) -> Arguments:
    """Return the arguments with others at some places."""
    return tuple(new.get(place, value) for place, value in enumerate(args))


def operands_of_einsum(args: Arguments) -> tuple[str, tuple[Tensor, ...]]:
    """Return the equation and the operands, which may also come as one list."""
    equation, *operands = args
    return equation, tuple(operands[0]) if isinstance(operands[0], list | tuple) else tuple(operands)


def pairs_of_einsum(equation: str, count: int) -> Iterator[str]:
    """Yield the equations that contract so many operands two at a time, from the left."""
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    wanted = right if "->" in equation else _implied_result(terms)
    first = terms[0]
    for place in range(1, count):
        later = "".join(terms[place + 1 :]) + wanted
        result = wanted if place == count - 1 else _needed_subscripts(first + terms[place], later)
        yield f"{first},{terms[place]}->{result}"
        first = result


def _needed_subscripts(given: str, later: str) -> str:
    """Return the subscripts that are still needed, each once; those of an ellipsis come first."""
    ellipsis = "..." if "..." in given else ""
    return ellipsis + "".join(dict.fromkeys(letter for letter in given if letter in later and letter != "."))


def _implied_result(terms: Sequence[str]) -> str:
    """Return the result of an equation without an arrow: the subscripts that occur once, sorted."""
    written = "".join(terms)
    once = sorted(letter for letter in set(written) - {"."} if written.count(letter) == 1)
    return ("..." if "..." in written else "") + "".join(once)


# torch hides what its attention function does from modes; the same code without that check shows it.
open_attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda _: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)
