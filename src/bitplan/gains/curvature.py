"""Estimate the curvature of a loss by the weights of each layer, from Hessian-vector products (PyHessian)."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from bitplan.adapters.torch import inference
from bitplan.core.errors import InputError
from bitplan.core.jobs import Job, Numbers, Outcome
from bitplan.core.progress import Progress
from bitplan.core.spend import Spend, charge
from bitplan.gains.base import Context
from bitplan.gains.jobs import MeasuredWork, do_jobs, seconds_of
from bitplan.quant.checkpoint import fingerprint
from bitplan.quant.sites import find_sites
from bitplan.tasks.base import Batch, Task, measuring_split, title_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """What the loss is averaged over: samples that choosing may be judged by, in the order of a seed."""

    batches: tuple[Batch, ...]
    sizes: tuple[int, ...]

    @classmethod
    def draw(cls, task: Task, samples: int, batch_size: int, seed: int) -> Data:
        """As many whole batches as hold `samples`, or all there are."""
        split = measuring_split(task)
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
def open_curvature(model: nn.Module, task: Task, data: Data, layers: Sequence[str]) -> Iterator[Curvature]:
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


# What is estimated from Hessian products: the trace and the largest eigenvalue of every layer's block.

ROUND = 10  # probes, or layers, that share one graph per batch; after each round what was found is kept
_WAVE = 4  # rounds at a time on an engine: some may be in vain, but its workers must start for each wave
ALONE = Context()


@dataclass(frozen=True)
class Traces:
    """Layer → estimated trace and its standard error, which is that of the probes, not of the data."""

    values: Mapping[str, float]
    errors: Mapping[str, float]
    probes: int
    seconds: float


def estimate_traces(
    curve: Curvature,
    *,
    probes: int,
    least: int,
    tolerance: float,
    seed: int,
    context: Context = ALONE,
    progress: Progress | None = None,
) -> Traces:
    """Hutchinson's estimate for every layer, by at most `probes` products of the whole network with the Hessian.

    It stops early, after `least` probes or more, when every standard error is within `tolerance` × |trace|. The rounds
    that are needed in any case are jobs at once; then, on an engine, some more at a time. As many count as would have
    been enough one after the other, so that the estimate is the same wherever it was made.
    """
    jobs = _rounds(_job(curve, "Hessian probes", seed), probes)
    work = _Probing.of(curve, progress or context.progress, total=probes)
    names = list(curve.weights)
    rounds: list[Tensor] = []  # each (probes, layers)
    seconds, used = 0.0, None
    while used is None and len(rounds) < len(jobs):
        width = max(1, -(-least // ROUND)) if not rounds else 1 if context.engine is None else _WAVE
        wave = jobs[len(rounds) : len(rounds) + width]
        outcomes = _do_rounds(work, wave, context)
        rounds += [_by_probe(outcome, names) for outcome in outcomes]
        seconds += seconds_of(outcomes)
        used = _enough(rounds, least, tolerance)
    found = torch.cat(rounds[:used])  # (probes, layers)
    means, errors = _mean_and_error(found)
    return Traces(dict(zip(names, means, strict=True)), dict(zip(names, errors, strict=True)), len(found), seconds)


def _by_probe(outcome: Outcome, names: Sequence[str]) -> Tensor:
    """Return the products of some probes, (probes, layers)."""
    return torch.tensor([outcome.numbers[name] for name in names], dtype=torch.float64).T.contiguous()


def _enough(rounds: Sequence[Tensor], least: int, tolerance: float) -> int | None:
    """How many rounds would have been enough, had they come one after the other; None where all are too few."""
    for count in range(1, len(rounds) + 1):
        found = torch.cat(list(rounds[:count]))
        if len(found) >= least and _settled(found, tolerance):
            return count
    return None


def draw_signs(weights: Sequence[Tensor], seed: int, number: int) -> list[Tensor]:
    """Random signs in the shape of every weight: the same for the same seed and number, on every device."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
    return [
        torch.randint(2, weight.shape, generator=generator, dtype=torch.int8).to(weight).mul_(2).sub_(1)
        for weight in weights
    ]


def estimate_eigenvalues(
    curve: Curvature,
    *,
    iterations: int,
    tolerance: float,
    seed: int,
    context: Context = ALONE,
    progress: Progress | None = None,
) -> tuple[dict[str, float], float]:
    """The eigenvalue of largest magnitude of every layer's block, by power iteration (HAWQ, Dong et al. 2019).

    Each layer needs products of its own: with all layers' vectors in one product, the blocks beside the diagonal would
    be iterated on as well. A layer is done when its eigenvalue moves by less than `tolerance`, relatively. Rounds of
    layers are jobs, all at once. The second value is the seconds that all took.
    """
    names = list(curve.weights)
    job = _job(curve, "power iteration of layers", seed, iterations=iterations, tolerance=tolerance)
    work = _Iterating.of(curve, progress or context.progress, total=len(names))
    outcomes = _do_rounds(work, _rounds(job, len(names)), context)
    return {name: outcome.value(name) for outcome in outcomes for name in outcome.numbers}, seconds_of(outcomes)


def _job(curve: Curvature, label: str, seed: int, **options: float) -> Job:
    """Return the job of all probes or layers; `label` is what a part of it is called."""
    hashes = fingerprint(curve.model)
    return Job(
        work=label, network=hashes.network, weights=hashes.weights, task=f"{title_of(curve.task)} {curve.task!r}",
        seed=seed, options={"layers": list(curve.weights), "sizes": list(curve.data.sizes), **options},
    )  # fmt: skip


def _rounds(job: Job, total: int) -> list[Job]:
    """Return the job in rounds of so many probes or layers in all."""
    rounds = []
    for first in range(0, total, ROUND):
        count = min(ROUND, total - first)
        label = f"{job.work} {first + 1} to {first + count}"
        rounds.append(job.model_copy(update={"first": first, "count": count, "label": label}))
    return rounds


def _do_rounds(work: _OnCurve, jobs: Sequence[Job], context: Context) -> list[Outcome]:
    """Return the outcomes in the order of the jobs.

    In this process the work tells of every product; on an engine progress is told by whole jobs.
    """
    if context.engine is None or len(jobs) == 1:  # a single job gains nothing from workers that must start first
        if context.shelf is None:  # there is nothing to go on from, so errors need no word about it
            outcomes = [MeasuredWork(work)(job) for job in jobs]
            charge(sum((outcome.spend for outcome in outcomes if outcome.spend), Spend()))
            return outcomes
        context = dataclasses.replace(context, engine=None, progress=None)
    done = do_jobs(work, jobs, context, "hawq")
    return [done[job.id] for job in jobs]


@dataclass(frozen=True)
class _OnCurve(ABC):
    """Work on the loss of some data by the weights of some layers. Other processes get it without `progress`."""

    model: nn.Module
    task: Task
    data: Data
    layers: tuple[str, ...]
    total: int
    progress: Progress | None = None

    @classmethod
    def of(cls, curve: Curvature, progress: Progress | None, *, total: int) -> Self:
        """The work that belongs to a curve that is at hand."""
        return cls(curve.model, curve.task, curve.data, tuple(curve.weights), total, progress)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"progress": None}

    def __call__(self, job: Job) -> Numbers:
        """Do the job on the curve of its layers."""
        with open_curvature(self.model, self.task, self.data, self.layers) as curve:
            return self._measure(curve, job)

    @abstractmethod
    def _measure(self, curve: Curvature, job: Job) -> Numbers:
        """Do the job on a curve."""

    def _tell(self, done: int, total: int, what: str) -> None:
        if self.progress is not None:
            self.progress(done, total, what)


class _Probing(_OnCurve):
    """vᵀHv of every layer for some probes, averaged over the batches."""

    def _measure(self, curve: Curvature, job: Job) -> Numbers:
        weights = list(curve.weights.values())
        found = torch.zeros(job.count, len(weights), dtype=torch.float64)
        batches = len(curve.data.batches)
        done = job.first * batches
        for share, grads in curve.gradients():
            for row in range(job.count):
                signs = draw_signs(weights, job.seed, job.first + row)
                products = curve.product(grads, signs)
                forms = [(v * hv).sum(dtype=torch.float64) for v, hv in zip(signs, products, strict=True)]
                found[row] += share * torch.stack(forms).cpu()
                _charge_product(curve, share)
                done += 1
                self._tell(done, self.total * batches, "Hessian probes")
            del grads  # the graph is large: let it go before the next one is built
        if not found.isfinite().all():
            raise InputError("the curvature of the loss is not finite: check the data and the weights")
        return dict(zip(curve.weights, found.T.tolist(), strict=True))


class _Iterating(_OnCurve):
    """The largest eigenvalues of some layers, by their places."""

    def _measure(self, curve: Curvature, job: Job) -> Numbers:
        iterations, tolerance = job.option("iterations"), job.option("tolerance")
        weights = list(curve.weights.values())
        places = range(job.first, job.first + job.count)
        vectors = {at: _unit(_gaussian(weights[at], job.seed, at)) for at in places}
        values = dict.fromkeys(places, 0.0)
        moving = list(places)
        for turn in range(iterations):
            products = _products(curve, vectors, moving)
            before = dict(values)
            for at in moving:
                values[at] = float((vectors[at] * products[at]).sum(dtype=torch.float64))
                vectors[at] = _unit(products[at])
            moving = [at for at in moving if abs(values[at] - before[at]) > tolerance * abs(values[at])]
            done = places.start * iterations + len(places) * (turn + 1)
            left = f"layers {places.start + 1} to {places.stop}, {len(moving)} of them left"
            self._tell(done, self.total * iterations, f"power iteration, {left}")
            if not moving:
                break
        if not all(map(math.isfinite, values.values())):
            raise InputError("the curvature of the loss is not finite: check the data and the weights")
        names = list(curve.weights)
        return {names[at]: (value,) for at, value in values.items()}


def _products(curve: Curvature, vectors: Mapping[int, Tensor], places: Sequence[int]) -> dict[int, Tensor]:
    """Each layer's block of the Hessian times its own vector, averaged over the batches."""
    weights = list(curve.weights.values())
    products = {at: torch.zeros_like(weights[at]) for at in places}
    for share, grads in curve.gradients():
        for at in places:
            products[at] += share * curve.product(grads, [vectors[at]], only=at)[0]
            _charge_product(curve, share)
    return products


def _charge_product(curve: Curvature, share: float) -> None:
    """A product with the Hessian goes back through the gradient and through the network: two passes back."""
    charge(Spend(backwards=2 * round(share * curve.data.samples)))


def _gaussian(weight: Tensor, seed: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
    return torch.randn(weight.shape, generator=generator).to(weight)


def _mean_and_error(found: Tensor) -> tuple[list[float], list[float]]:
    return found.mean(0).tolist(), (found.std(0) / math.sqrt(len(found))).tolist()


def _settled(found: Tensor, tolerance: float) -> bool:
    means, errors = _mean_and_error(found)
    return all(error <= tolerance * abs(mean) for mean, error in zip(means, errors, strict=True))


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.norm().clamp_min(torch.finfo(vector.dtype).tiny)
