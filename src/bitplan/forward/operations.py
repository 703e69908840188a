"""Tensor operations as they run, below the functions that call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):
    """Shows every tensor operation that has run: the operation, its arguments, its options and its output."""

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


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Every tensor among arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def written(operation: Any, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that an operation changes in place, as its signature marks them."""
    declared = operation._schema.arguments  # optional ones at its end may not be given
    pairs = zip(arguments, declared, strict=False)
    return tensors_in([value for value, about in pairs if about.alias_info and about.alias_info.is_write])
