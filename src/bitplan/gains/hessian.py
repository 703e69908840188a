"""Curvature of a task's loss by the weights of each layer.

The Hessian itself is never formed: with the gradient kept as a graph, one more backward pass gives its product
with a vector.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from bitplan.adapters.torch import inference
from bitplan.core.errors import InputError
from bitplan.core.spend import Spend, charge
from bitplan.quant.sites import find_sites
from bitplan.tasks.base import Batch, Task
from bitplan.tasks.choosing import judged_by


@dataclass(frozen=True)
class Data:
    """What the loss is averaged over: samples that choosing may be judged by, in the order of a seed."""

    batches: tuple[Batch, ...]
    sizes: tuple[int, ...]

    @classmethod
    def draw(cls, task: Task, samples: int, batch_size: int, seed: int) -> Data:
        """As many whole batches as hold `samples`, or all there are."""
        split = judged_by(task)
        size = task.size(split)
        width = max(1, min(batch_size, samples, size))
        starts = range(0, min(samples, size), width)
        batches = tuple(itertools.islice(task.batches(split, width, seed), len(starts)))
        if not batches:
            raise InputError(f"the training split of task {task.name} is empty: curvature needs samples with a loss")
        sizes = tuple(min(width, size - start) for start in starts[: len(batches)])  # the split's last may be smaller
        return cls(batches, sizes)

    @property
    def samples(self) -> int:
        """How many there are."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Curvature:
    """The loss of some data as a function of the weights of some layers; made by `curvature`."""

    model: nn.Module
    task: Task
    data: Data
    weights: Mapping[str, Tensor]

    def gradients(self) -> Iterator[tuple[float, list[Tensor]]]:
        """For each batch its share of the samples, and the gradients by all weights, ready for another derivative."""
        tensors = list(self.weights.values())
        device = tensors[0].device
        for batch, size in zip(self.data.batches, self.data.sizes, strict=True):
            here = _moved(batch, device)
            with sdpa_kernel(SDPBackend.MATH):  # the fused attention has no second derivative
                loss = self.task.loss(self.task.forward(self.model, here), here)
            if not math.isfinite(loss.item()):
                raise InputError(f"the loss of task {self.task.name} is {loss.item()}: check the data and the weights")
            with _twice_differentiable():
                derivatives = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True)
            grads = _filled(derivatives, tensors)
            _check_smooth(grads)
            charge(Spend(forwards=size, backwards=size, labels=True))
            yield size / self.data.samples, grads
            del loss, derivatives, grads  # or this graph would still be held while the next one is made

    def product(self, grads: Sequence[Tensor], vectors: Sequence[Tensor], only: int | None = None) -> list[Tensor]:
        """Return H·v by all weights for vectors by all weights; or, for one weight, its block of H times its vector."""
        inputs = list(self.weights.values())
        if only is not None:
            inputs, grads = [inputs[only]], [grads[only]]
        sloped = [(grad, vector) for grad, vector in zip(grads, vectors, strict=True) if grad.requires_grad]
        if not sloped:  # a constant gradient adds nothing to the product, and torch refuses it
            return [torch.zeros_like(weight) for weight in inputs]
        outputs, along = zip(*sloped, strict=True)
        with _twice_differentiable():
            products = torch.autograd.grad(outputs, inputs, along, retain_graph=True, allow_unused=True)
        return _filled(products, inputs)


@contextmanager
def curvature(model: nn.Module, task: Task, data: Data, layers: Sequence[str]) -> Iterator[Curvature]:
    """The loss by the weights of these layers, in inference mode; the model is as it was when the block ends.

    Nothing but these weights is differentiated by. Layers that share a weight share its curvature.
    """
    parameters = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in parameters:
            parameter.requires_grad_(False)
        # Cached: a weight that a parametrization computes is then the one that the loss sees.
        with inference(model), torch.enable_grad(), parametrize.cached():
            weights: dict[str, Tensor] = {}
            for name, site in find_sites(model, layers).items():
                weight = site.weight
                if weight is not None:
                    weights[name] = weight.requires_grad_()
            yield Curvature(model, task, data, weights)
    finally:
        for parameter, wanted in parameters:
            parameter.requires_grad_(wanted)


def _moved(batch: Batch, device: torch.device) -> Batch:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def _filled(derivatives: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Derivatives by tensors, zeros by those that had no part in it (None, as torch says)."""
    pairs = zip(derivatives, tensors, strict=True)
    return [torch.zeros_like(tensor) if derivative is None else derivative for derivative, tensor in pairs]


def _check_smooth(grads: Sequence[Tensor]) -> None:
    """Raise where second derivatives are missing: torch leaves them out in silence behind `once_differentiable`."""
    ahead: list[Any] = [grad.grad_fn for grad in grads if grad.grad_fn is not None]
    if not ahead:
        raise InputError(
            "the loss is not twice differentiable: its gradient does not depend on the weights, so there is no "
            "Hessian; use a smooth loss, or a method without curvature"
        )
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if node.name() == "torch::autograd::Error":
            raise InputError(
                "the loss is not twice differentiable: a function in the model has a gradient marked "
                "once_differentiable; use a method without curvature"
            )
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        ahead += new


@contextmanager
def _twice_differentiable() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"the loss cannot be differentiated twice by the weights ({reason}); use a method without curvature"
        ) from error
