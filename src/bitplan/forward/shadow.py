"""A copy of a model that has shapes but no data, so that any model can be run anywhere, for nothing.

Or one with data, for models that decide by values.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from bitplan.adapters.torch import float_type
from bitplan.core.errors import TraceError

# Some of what `running` switches belongs to the process, not to the thread.
_ONE_AT_A_TIME = threading.RLock()


class Shadow:
    """A structural copy of a model on fake tensors; the model itself is never run nor changed.

    With `values` it has the model's parameters and copies of its other tensors, and is really run. `parameters` maps
    the storage-carrying parameters to their qualified names.
    """

    def __init__(self, model: nn.Module, *, values: bool = False) -> None:
        if isinstance(model, torch.jit.ScriptModule):
            raise TraceError("a scripted module has no Python forward pass to follow: pass the original model")
        original = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        _check_there(original, values)
        self.mode: AbstractContextManager[Any] = nullcontext() if values else FakeTensorMode(allow_non_fake_inputs=True)
        self.follows_values = values
        memo: dict[int, Any] = {id(tensor): self._like(tensor, tensor.device) for tensor in _tensors(original)}
        try:
            self.model: nn.Module = copy.deepcopy(original, memo)
        except Exception as error:
            raise TraceError(f"{type(original).__name__} cannot be copied to be traced: {error}") from error
        self.model.eval()
        self.parameters = dict(self.model.named_parameters())
        self._device = next((tensor.device for tensor in _tensors(original)), torch.device("cpu"))

    def _like(self, tensor: torch.Tensor, device: torch.device, kind: torch.dtype | None = None) -> torch.Tensor:
        """Return a stand-in for a tensor, without data unless values count; parameters stay, as none is written."""
        if self.follows_values:
            return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().to(device, kind, copy=True)
        # What is on "meta" is treated as on the CPU, like the constants that a model makes as it runs.
        device = torch.device("cpu") if device.type == "meta" else device
        with self.mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=kind or tensor.dtype, device=device)
        return nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake

    def example(self, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return an example as positional and keyword arguments on the model's device; float32 in its type."""
        if self.follows_values and any(
            tensor.is_meta for tensor in tree_leaves(given) if isinstance(tensor, torch.Tensor)
        ):
            raise TraceError("the example has shapes only, and this trace follows values: give one with data")
        positional, keyword = self.arguments(arguments_of(given))
        return positional, keyword

    def arguments(self, given: Any) -> Any:
        """Return the arguments on the model's device, without data unless values count; float32 in the model's type."""
        floats = float_type(self.model)

        def like(tensor: torch.Tensor) -> torch.Tensor:
            return self._like(tensor, self._device, floats if tensor.dtype == torch.float32 else tensor.dtype)

        # What else an argument holds is copied: a cache, say, which a forward pass fills.
        return tree_map(lambda leaf: like(leaf) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf), given)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enter the context in which the shadow runs: no gradients, attention and recurrence in their plain form."""
        quiet = _silence(logging.getLogger(FakeTensorMode.__module__))
        with _ONE_AT_A_TIME, torch.no_grad(), _without_mkldnn(), quiet, sdpa_kernel(SDPBackend.MATH), self.mode:
            yield


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments: an example is a tensor, a tuple of positional ones, or a mapping."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


@contextmanager
def _silence(logger: logging.Logger) -> Iterator[None]:
    """Silence a logger: a failing operation is reported by us in one line, not by torch as well in thirty."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def _check_there(model: nn.Module, values: bool) -> None:
    """Raise an error for a model whose parameters have no shape yet, or no data if values are followed."""
    for name, tensor in model.named_parameters():
        if is_lazy(tensor):
            raise TraceError(f"{name} has no shape before the model has run: call it once, model(example), then trace")
        if values and tensor.is_meta:
            raise TraceError(f"{name} is on the meta device, and this trace follows values: load the model's weights")


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield every tensor of a model: parameters, buffers, and those in plain attributes of its modules."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))
