"""Curvature of a task's loss by the weights of each layer: traces and largest eigenvalues of the Hessian's blocks.

The Hessian itself is never formed: with the gradient kept as a graph, one more backward pass gives its product
with a vector. For Hutchinson's estimate Tr H_l ≈ mean of v_lᵀ(Hv)_l, v ∈ {±1}, one product of the whole network
serves every layer at once, since the signs of different layers are independent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from bitplan.core.errors import InputError
from bitplan.core.probes import Probed, Probes
from bitplan.core.store import load, save
from bitplan.core.trials import Recipe
from bitplan.gains.base import Progress
from bitplan.quant.sites import find_sites
from bitplan.tasks.base import Batch, Task
from bitplan.tune.resume import describe_run

ROUND = 10  # probes that share one graph per batch; after each round, results are kept and the tolerance looked at


@dataclass(frozen=True)
class Data:
    """What the loss is averaged over: samples of the training split in the order of a seed."""

    batches: tuple[Batch, ...]
    sizes: tuple[int, ...]

    @classmethod
    def draw(cls, task: Task, samples: int, batch_size: int, seed: int) -> Data:
        """As many whole batches as hold `samples`, or all there are."""
        size = task.size("train")
        width = max(1, min(batch_size, samples, size))
        wanted = range(0, min(samples, size), width)
        batches = tuple(itertools.islice(task.batches("train", width, seed), len(wanted)))
        if not batches:
            raise InputError(f"the training split of task {task.name} is empty: curvature needs samples with a loss")
        return cls(batches, tuple(min(width, size - start) for start in wanted[: len(batches)]))

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
            here = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
            with sdpa_kernel(SDPBackend.MATH):  # the fused attention has no second derivative
                loss = self.task.loss(self.task.forward(self.model, here), here)
            if not math.isfinite(loss.item()):
                raise InputError(f"the loss of task {self.task.name} is {loss.item()}: check the data and the weights")
            with _twice_differentiable():
                found = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True)
            grads = [torch.zeros_like(w) if g is None else g for w, g in zip(tensors, found, strict=True)]
            _check_smooth(grads)
            yield size / self.data.samples, grads
            del loss, found, grads

    def product(self, grads: Sequence[Tensor], vectors: Sequence[Tensor], only: int | None = None) -> list[Tensor]:
        """H·v by all weights for vectors by all weights; or, for one weight, its block of H times its vector."""
        places = range(len(grads)) if only is None else (only,)
        tensors = list(self.weights.values())
        used = [(grads[at], vector) for at, vector in zip(places, vectors, strict=True) if grads[at].requires_grad]
        inputs = [tensors[at] for at in places]
        if not used:
            return [torch.zeros_like(tensor) for tensor in inputs]
        outputs, along = zip(*used, strict=True)
        with _twice_differentiable():
            found = torch.autograd.grad(outputs, inputs, along, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(w) if hv is None else hv for w, hv in zip(inputs, found, strict=True)]


@contextmanager
def curvature(model: nn.Module, task: Task, data: Data, layers: Sequence[str]) -> Iterator[Curvature]:
    """The loss by the weights of these layers, in inference mode; the model is as it was when the block ends.

    Nothing but these weights is differentiated by. Layers that share a weight share its curvature.
    """
    parameters = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for parameter, _ in parameters:
            parameter.requires_grad_(False)
        with torch.enable_grad(), parametrize.cached():  # a weight computed once is the one that the loss sees
            sites = find_sites(model, layers)
            weights = {name: site.weight for name, site in sites.items()}
            yield Curvature(model, task, data, {n: w.requires_grad_() for n, w in weights.items() if w is not None})
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, wanted in parameters:
            parameter.requires_grad_(wanted)


@dataclass(frozen=True)
class Traces:
    """Layer → estimated trace and its standard error, which is that of the probes, not of the data."""

    values: Mapping[str, float]
    errors: Mapping[str, float]
    probes: int


def traces(
    curve: Curvature,
    *,
    probes: int,
    least: int,
    tolerance: float,
    seed: int,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Traces:
    """Hutchinson's estimate for every layer, by at most `probes` products of the whole network with the Hessian.

    It stops early, after `least` probes or more, when every standard error is within `tolerance` × |trace|. Every round
    of probes is kept in the folder, where there is one, and read from it if it is there already.
    """
    found = torch.zeros(0, len(curve.weights), dtype=torch.float64)
    while len(found) < probes and not (len(found) >= least and _settled(found, tolerance)):
        wanted = range(len(found), min(len(found) + ROUND, probes))
        found = torch.cat([found, _kept(curve, wanted, seed, probes, folder, progress)])
    means, errors = _mean_and_error(found)
    names = list(curve.weights)
    return Traces(dict(zip(names, means, strict=True)), dict(zip(names, errors, strict=True)), len(found))


def probe(weights: Sequence[Tensor], seed: int, number: int) -> list[Tensor]:
    """Random signs in the shape of every weight: the same for the same seed and number, on every device."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
    return [
        torch.randint(2, weight.shape, generator=generator, dtype=torch.int8).to(weight).mul_(2).sub_(1)
        for weight in weights
    ]


def top_eigenvalues(
    curve: Curvature, *, iterations: int, tolerance: float, seed: int, progress: Progress | None = None
) -> dict[str, float]:
    """The eigenvalue of largest magnitude of every layer's block, by power iteration (HAWQ, Dong et al. 2019).

    Each layer needs products of its own: with all layers' vectors in one product, the blocks beside the diagonal would
    be iterated on as well. A layer is done when its eigenvalue moves by less than `tolerance`, relatively.
    """
    weights = list(curve.weights.values())
    generator = torch.Generator().manual_seed(seed % 2**63)
    vectors = [_unit(torch.randn(weight.shape, generator=generator).to(weight)) for weight in weights]
    values = [0.0] * len(weights)
    moving = list(range(len(weights)))
    for turn in range(iterations):
        products = {at: torch.zeros_like(weights[at]) for at in moving}
        for share, grads in curve.gradients():
            for at in moving:
                products[at] += share * curve.product(grads, [vectors[at]], only=at)[0]
        still = []
        for at in moving:
            before, values[at] = values[at], float((vectors[at] * products[at]).sum(dtype=torch.float64))
            vectors[at] = _unit(products[at])
            if abs(values[at] - before) > tolerance * abs(values[at]):
                still.append(at)
        moving = still
        if progress is not None:
            progress(turn + 1, iterations, f"power iteration, {len(moving)} layers left")
        if not moving:
            break
    return dict(zip(curve.weights, values, strict=True))


def _kept(
    curve: Curvature, wanted: range, seed: int, total: int, folder: Path | None, progress: Progress | None
) -> Tensor:
    """A round of probes, read from the folder where it is there, else done and kept."""
    if folder is None:
        return _round(curve, wanted, seed, total, progress)
    run = describe_run(curve.model, curve.task, Recipe(steps=1), None, seed)
    job = Probes(
        network=run.network,
        weights=run.weights,
        task=f"{run.task} {curve.task!r}",
        layers=tuple(curve.weights),
        sizes=curve.data.sizes,
        seed=seed,
        first=wanted.start,
        count=len(wanted),
    )
    path = folder / f"{job.id}.json"
    if path.is_file():
        return torch.tensor(load(path, Probed).products, dtype=torch.float64)
    found = _round(curve, wanted, seed, total, progress)
    save(Probed(products=tuple(map(tuple, found.tolist()))), path)
    return found


def _round(curve: Curvature, wanted: range, seed: int, total: int, progress: Progress | None) -> Tensor:
    """vᵀHv of every layer for some probes, averaged over the batches: (probes, layers)."""
    weights = list(curve.weights.values())
    found = torch.zeros(len(wanted), len(weights), dtype=torch.float64)
    done = wanted.start * len(curve.data.batches)
    for share, grads in curve.gradients():
        for row, number in enumerate(wanted):
            signs = probe(weights, seed, number)
            products = curve.product(grads, signs)
            along = [(v * hv).sum(dtype=torch.float64) for v, hv in zip(signs, products, strict=True)]
            found[row] += share * torch.stack(along).cpu()
            done += 1
            if progress is not None:
                progress(done, total * len(curve.data.batches), "Hessian probes")
        del grads, products  # the graph is large: let it go before the next one is built
    if not found.isfinite().all():
        raise InputError("the curvature of the loss is not finite: check the data and the weights")
    return found


def _mean_and_error(found: Tensor) -> tuple[list[float], list[float]]:
    return found.mean(0).tolist(), (found.std(0) / math.sqrt(len(found))).tolist()


def _settled(found: Tensor, tolerance: float) -> bool:
    means, errors = _mean_and_error(found)
    return all(error <= tolerance * abs(mean) for mean, error in zip(means, errors, strict=True))


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.norm().clamp_min(torch.finfo(vector.dtype).tiny)


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
