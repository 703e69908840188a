"""What layers are called: layer ↔ parameter ↔ call ↔ key in a state dict, for everything that speaks of layers.

Trace, quantize, checkpoints, EAGL and exporters all go by this table, so that a plan made by one is understood by all.
`a` stands for a module's path. Of the model itself it is empty, with the dot behind it, and its own weight is `weight`.

    a layer is                            its name     its weight is                        its quantizers are at
    a module                              a            a.weight                             a
      whose weight is parametrized        a            a.parametrizations.weight.original   a
      that has a forward of its own       a            a.weight                             a.call_quantizers.weight
    a function given a parameter in a     a.matrix     a.matrix                             a.call_quantizers.matrix
      whose name ends in _weight          a.in_proj    a.in_proj_weight                     a.call_quantizers.in_proj
      which is one of a recurrent a       a.weight_hh  a.weight_hh                          a.call_quantizers.weight_hh
    a child whose weight a hands out      a.out_proj   a.out_proj.weight                    a.call_quantizers.out_proj
    a product of activations in a         a.matmul     -                                    a.call_quantizers.matmul
      by the same function, once more     a.matmul_1   -                                    a.call_quantizers.matmul_1
    an addition of activations in a (¹)   a.add        -                                    a.call_quantizers.add

At such a place are the modules `weight_quantizer` and `input_quantizer`, at that of a product one module per operand,
each with its learned `step`: the key of the step of a's weight in a state dict is `a.weight_quantizer.step`. Beside it
stands the number of bits, `a.weight_quantizer.saved_bits`, so that no model of another plan loads it.

(¹) No layer: it has no precision in a plan, but its quantizers of 8 bits have a place in a network made for integers.
Products are numbered per function, in the order of their calls, within one run of `a`; a call that is given a parameter
does not count, since it is no product of activations. Additions are numbered together, however they are written.
"""

from __future__ import annotations

import re

ATTENTION = "scaled_dot_product_attention"
MATRIX_PRODUCTS = frozenset({"matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"})
PRODUCT_NAMES = MATRIX_PRODUCTS | {ATTENTION}
"""The functions whose products of activations can be quantized."""
COMPLEX = "complex "
"""What stands before the name of a function that multiplies complex numbers, which are not quantized."""
LOOK_UPS = frozenset({"embedding", "embedding_bag", "__getitem__", "index_select"})
"""The functions that take rows of a weight: what they read are indices."""
WEIGHTED = MATRIX_PRODUCTS | LOOK_UPS | {"linear", "mv", "dot", "inner", "tensordot", "addmv", "addbmm"} | {
    f"conv{transposed}{n}d" for transposed in ("", "_transpose") for n in (1, 2, 3)
}  # fmt: skip
"""The functions whose weights can be quantized."""

WEIGHT_QUANTIZER = "weight_quantizer"
INPUT_QUANTIZER = "input_quantizer"
CALL_QUANTIZERS = "call_quantizers"
STEP = "step"

OWN_WEIGHT = "weight"
"""The key of a call in which a module uses its own weight."""

_COMPILED = "_orig_mod"
_OPERATORS = {"__matmul__": "matmul", "__rmatmul__": "matmul"}
# A module's weight; and what torch's older norms, spectral norm and pruning keep instead of it.
_WEIGHTS = (OWN_WEIGHT, "weight_orig", "weight_g", "weight_v")
_PARAMETRIZED = re.compile(r"(?:(?P<module>.*)\.)?parametrizations\.(?P<parameter>[^.]+)\..+")
_RECURRENT = re.compile(r"weight_(ih|hh|hr)(_l\d+(_reverse)?)?")
_NUMBERED = re.compile(r"(?P<function>.+?)(?:_[1-9]\d*)?")


def join_names(module: str, name: str) -> str:
    """The path of what a module calls by that name."""
    return f"{module}.{name}" if module else name


def split_name(layer: str) -> tuple[str, str]:
    """The path of the module that a layer is in, and the layer's name there."""
    module, _, name = layer.rpartition(".")
    return module, name


def holder_of(parameter: str) -> tuple[str, str]:
    """The path of the module whose weight a parameter is, or helps to compute, and the weight's name there."""
    parametrized = _PARAMETRIZED.fullmatch(parameter)
    if parametrized:
        parameter = join_names(parametrized["module"] or "", parametrized["parameter"])
    module, name = split_name(parameter)
    return module, OWN_WEIGHT if name in _WEIGHTS else name


def layer_of(parameter: str) -> str:
    """The layer that a parameter is the weight of."""
    module, name = holder_of(parameter)
    if name == OWN_WEIGHT:
        return module or OWN_WEIGHT
    return join_names(module, name.removesuffix("_weight") or name)


def strip_compiled(name: str) -> str:
    """A name without what torch.compile puts around a model, or around a part of it."""
    if _COMPILED not in name:
        return name
    *modules, last = name.split(".")
    return ".".join([*(module for module in modules if module != _COMPILED), last])


def weight_names(layer: str) -> tuple[str, ...]:
    """What the parameter may be called that is a layer's weight, the usual name first."""
    return f"{layer}.{OWN_WEIGHT}", layer, f"{layer}_weight"


def is_handed(tensor: str) -> bool:
    """Tell whether a tensor is a weight that no module has as its own: a function is given it."""
    return tensor == f"{layer_of(tensor)}_weight"


def is_recurrent(layer: str) -> bool:
    """Tell whether a layer is a matrix of a recurrent module or cell, by the names that torch gives them."""
    return _RECURRENT.fullmatch(split_name(layer)[1]) is not None


def function_name(written: str) -> str:
    """A function of torch as plans name it: the operator `@` calls `__matmul__`, which is matmul."""
    return _OPERATORS.get(written, written)


def product_name(function: str, number: int) -> str:
    """What a module calls a product by this function after so many others by it."""
    return f"{function}_{number}" if number else function


def function_of(product: str) -> str:
    """The function in the name of a product, without its number."""
    numbered = _NUMBERED.fullmatch(split_name(product)[1])
    return numbered["function"] if numbered else ""


def is_product(layer: str) -> bool:
    """Tell whether a layer's name is that of a product of activations which can be quantized."""
    return function_of(layer) in PRODUCT_NAMES


def quantizer_places(layer: str) -> tuple[str, ...]:
    """Where the quantizers of a layer may be, by their path."""
    module, name = split_name(layer)
    calls, own_calls = join_names(module, CALL_QUANTIZERS), join_names(layer, CALL_QUANTIZERS)
    return layer, join_names(calls, name), join_names(own_calls, OWN_WEIGHT)


def step_keys(layer: str) -> tuple[str, ...]:
    """The keys in a state dict under which the step of a layer's weight may be."""
    return tuple(f"{place}.{WEIGHT_QUANTIZER}.{STEP}" for place in quantizer_places(layer))


def layer_of_quantizer(path: str) -> str | None:
    """The layer whose quantizer has this path, or a key of a state dict below it; None if it is no quantizer's."""
    parts = path.split(".")
    if CALL_QUANTIZERS in parts[:-1]:
        place = parts.index(CALL_QUANTIZERS)
        owner, name = ".".join(parts[:place]), parts[place + 1]
        return owner if owner and name == OWN_WEIGHT else join_names(owner, name)
    for kind in (WEIGHT_QUANTIZER, INPUT_QUANTIZER):
        if kind in parts[1:]:
            return ".".join(parts[: parts.index(kind)])
    return None
