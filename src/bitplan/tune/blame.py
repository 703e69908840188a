"""Which layer made a loss NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer


def blame(model: nn.Module, rerun: Callable[[], Any], batch: Any) -> str:
    """Say where the first NaN or infinite value comes from, by running the batch that showed it again.

    It is the first module to finish with such an output of finite inputs; quantizers count as their layer.
    """
    if not _finite(batch, masks=True):
        return "the batch itself has NaN or infinite values: check the data"
    found: list[str] = []
    with _hooks(model, found), torch.no_grad():
        rerun()
    if not found:
        return "the output of every layer is finite, so the loss itself makes it: check the labels and the loss"
    layer = model.get_submodule(found[0])
    own = [name for name, value in layer.named_parameters() if not _finite(value)]
    why = f" (its {own[0]} is not finite)" if own else ""
    return f"the first layer with NaN or infinite output is {found[0] or 'the model itself'}{why}"


@contextmanager
def _hooks(model: nn.Module, found: list[str]) -> Iterator[None]:
    def look(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: Any, options: Any, output: Any) -> None:
            if not found and not _finite(output) and _finite((arguments, options), masks=True):
                found.append(name)

        return hook

    handles = [
        module.register_forward_hook(look(name), with_kwargs=True)
        for name, module in model.named_modules()
        if not isinstance(module, WeightQuantizer | InputQuantizer)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _finite(tree: Any, *, masks: bool = False) -> bool:
    """Whether no tensor in it has NaN or infinite values; −∞ passes as a mask where those are allowed."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool((tensor < torch.inf if masks else torch.isfinite(tensor)).all()) for tensor in tensors)
