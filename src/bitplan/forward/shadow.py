"""A copy of a model that has shapes but no data, so that any model can be run anywhere, for nothing."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from bitplan.core.errors import TraceError

# Some of what `running` switches belongs to the process, not to the thread.
_ONE_AT_A_TIME = threading.RLock()


class Shadow:
    """A structural copy of a model on fake tensors; the model itself is never run nor changed.

    `parameters` maps the storage-carrying fake parameters to their qualified names.
    """

    def __init__(self, model: nn.Module) -> None:
        if isinstance(model, torch.jit.ScriptModule):
            raise TraceError("a scripted module has no Python forward pass to follow: pass the original model")
        original = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        memo: dict[int, Any] = {id(tensor): self._fake(tensor, tensor.device) for tensor in _tensors(original)}
        try:
            self.model: nn.Module = copy.deepcopy(original, memo)
        except Exception as error:
            raise TraceError(f"{type(original).__name__} cannot be copied to be traced: {error}") from error
        self.model.eval()
        self.parameters = dict(self.model.named_parameters())
        self._device = next((tensor.device for tensor in _tensors(original)), torch.device("cpu"))

    def _fake(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        # What is on "meta" is treated as on the CPU, like the constants that a model makes as it runs.
        device = torch.device("cpu") if device.type == "meta" else device
        with self.mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        return nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake

    def fake_example(self, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Split an example into positional and keyword arguments, without data, on the model's device."""
        return self.fake_arguments(arguments_of(example))

    def fake_arguments(self, arguments: Any) -> Any:
        """The same arguments without data, on the model's device."""
        return tree_map_only(torch.Tensor, lambda tensor: self._fake(tensor, self._device), arguments)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The context in which the shadow runs: no gradients, attention and recurrence in their plain form."""
        quiet = _quiet(logging.getLogger(FakeTensorMode.__module__))
        with _ONE_AT_A_TIME, torch.no_grad(), _without_mkldnn(), quiet, sdpa_kernel(SDPBackend.MATH), self.mode:
            yield


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments: an example is a tensor, a tuple of the former or a mapping of the latter."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """An operation that fails on shapes is reported by us, in one line, and not by torch as well, in thirty."""
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


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor a model holds: parameters, buffers, and those in plain attributes of its modules."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))
