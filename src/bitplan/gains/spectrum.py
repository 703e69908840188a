"""What is estimated from Hessian products: the trace and the largest eigenvalue of every layer's block.

For Hutchinson's estimate Tr H_l ≈ mean of v_lᵀ(Hv)_l, v ∈ {±1}, one product of the whole network serves every layer at
once, since the signs of different layers are independent. Eigenvalues take products of each layer's own. Rounds of
probes, or of layers, are jobs like those of other methods: on any engine, and kept where there is a store.
"""

from __future__ import annotations

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.core.probes import Eigenvalues, Powers, Probed, Probes
from bitplan.core.progress import Progress
from bitplan.core.spend import Spend, charge
from bitplan.gains.base import Context
from bitplan.gains.hessian import Curvature, Data, curvature
from bitplan.gains.measuring import finish
from bitplan.quant.fingerprint import fingerprint
from bitplan.tasks.base import Task, title_of

ROUND = 10  # probes, or layers, that share one graph per batch; after each round what was found is kept
_WAVE = 4  # rounds at a time on an engine: some may be in vain, but its workers must start for each wave
Job = TypeVar("Job", bound=Probes)
Outcome = TypeVar("Outcome", Probed, Eigenvalues)
ALONE = Context()


@dataclass(frozen=True)
class Traces:
    """Layer → estimated trace and its standard error, which is that of the probes, not of the data."""

    values: Mapping[str, float]
    errors: Mapping[str, float]
    probes: int
    seconds: float


def traces(
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
    about = _about(curve, seed)
    jobs = [Probes(**about, first=first, count=min(ROUND, probes - first)) for first in range(0, probes, ROUND)]
    work = _Probing.of(curve, progress or context.progress, total=probes)
    rounds: list[Tensor] = []  # each (probes, layers)
    seconds, used = 0.0, None
    while used is None and len(rounds) < len(jobs):
        width = max(1, -(-least // ROUND)) if not rounds else 1 if context.engine is None else _WAVE
        wave = jobs[len(rounds) : len(rounds) + width]
        for outcome in _finished(work, wave, Probed, context):
            rounds.append(torch.tensor(outcome.products, dtype=torch.float64))
            seconds += outcome.seconds
        used = _enough(rounds, least, tolerance)
    found = torch.cat(rounds[:used])  # (probes, layers)
    means, errors = _mean_and_error(found)
    names = list(curve.weights)
    return Traces(dict(zip(names, means, strict=True)), dict(zip(names, errors, strict=True)), len(found), seconds)


def _enough(rounds: Sequence[Tensor], least: int, tolerance: float) -> int | None:
    """How many rounds would have been enough, had they come one after the other; None where all are too few."""
    for count in range(1, len(rounds) + 1):
        found = torch.cat(list(rounds[:count]))
        if len(found) >= least and _settled(found, tolerance):
            return count
    return None


def probe(weights: Sequence[Tensor], seed: int, number: int) -> list[Tensor]:
    """Random signs in the shape of every weight: the same for the same seed and number, on every device."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
    return [
        torch.randint(2, weight.shape, generator=generator, dtype=torch.int8).to(weight).mul_(2).sub_(1)
        for weight in weights
    ]


def top_eigenvalues(
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
    names, about = list(curve.weights), _about(curve, seed) | {"iterations": iterations, "tolerance": tolerance}
    jobs = [Powers(**about, first=first, count=min(ROUND, len(names) - first)) for first in range(0, len(names), ROUND)]
    work = _Iterating.of(curve, progress or context.progress, total=len(names))
    outcomes = _finished(work, jobs, Eigenvalues, context)
    values = [value for outcome in outcomes for value in outcome.values]
    return dict(zip(names, values, strict=True)), sum(outcome.seconds for outcome in outcomes)


def _about(curve: Curvature, seed: int) -> dict[str, Any]:
    """What every outcome depends on, besides which probes or layers it is of."""
    own = fingerprint(curve.model)
    return {
        "network": own.network,
        "weights": own.weights,
        "task": f"{title_of(curve.task)} {curve.task!r}",
        "layers": tuple(curve.weights),
        "sizes": curve.data.sizes,
        "seed": seed,
    }


def _finished(
    work: _OnCurve[Job, Outcome], jobs: Sequence[Job], kind: type[Outcome], context: Context
) -> list[Outcome]:
    """The outcomes in the order of the jobs. Here the work itself tells of every product; others tell of whole jobs."""
    alone = context.engine is None or len(jobs) == 1  # a single job gains nothing from workers that must start first
    if alone and context.shelf is None:
        return [work(job) for job in jobs]
    if alone:
        context = dataclasses.replace(context, engine=None, progress=None)
    done = finish(work, jobs, kind, context, "hawq")
    return [done[job.id] for job in jobs]


@dataclass(frozen=True)
class _OnCurve(ABC, Generic[Job, Outcome]):
    """Work on the loss of some data by the weights of some layers; it travels to other processes without `progress`."""

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

    def __call__(self, job: Job) -> Outcome:
        """Take the curve, do the job, and say how long it took."""
        start = time.perf_counter()
        with curvature(self.model, self.task, self.data, self.layers) as curve:
            found = self._on(curve, job)
        return found.model_copy(update={"seconds": time.perf_counter() - start})

    @abstractmethod
    def _on(self, curve: Curvature, job: Job) -> Outcome:
        """What the job finds on a curve."""

    def _tell(self, done: int, total: int, what: str) -> None:
        if self.progress is not None:
            self.progress(done, total, what)


class _Probing(_OnCurve[Probes, Probed]):
    """vᵀHv of every layer for some probes, averaged over the batches."""

    def _on(self, curve: Curvature, job: Probes) -> Probed:
        weights = list(curve.weights.values())
        found = torch.zeros(job.count, len(weights), dtype=torch.float64)
        batches = len(curve.data.batches)
        done = job.first * batches
        for share, grads in curve.gradients():
            for row in range(job.count):
                signs = probe(weights, job.seed, job.first + row)
                products = curve.product(grads, signs)
                forms = [(v * hv).sum(dtype=torch.float64) for v, hv in zip(signs, products, strict=True)]
                found[row] += share * torch.stack(forms).cpu()
                _charge_product(curve, share)
                done += 1
                self._tell(done, self.total * batches, "Hessian probes")
            del grads  # the graph is large: let it go before the next one is built
        if not found.isfinite().all():
            raise InputError("the curvature of the loss is not finite: check the data and the weights")
        return Probed(products=tuple(map(tuple, found.tolist())))


class _Iterating(_OnCurve[Powers, Eigenvalues]):
    """The largest eigenvalues of some layers, by their places."""

    def _on(self, curve: Curvature, job: Powers) -> Eigenvalues:
        weights = list(curve.weights.values())
        places = range(job.first, job.first + job.count)
        vectors = {at: _unit(_gaussian(weights[at], job.seed, at)) for at in places}
        values = dict.fromkeys(places, 0.0)
        moving = list(places)
        for turn in range(job.iterations):
            products = _products(curve, vectors, moving)
            before = dict(values)
            for at in moving:
                values[at] = float((vectors[at] * products[at]).sum(dtype=torch.float64))
                vectors[at] = _unit(products[at])
            moving = [at for at in moving if abs(values[at] - before[at]) > job.tolerance * abs(values[at])]
            done = places.start * job.iterations + len(places) * (turn + 1)
            left = f"layers {places.start + 1} to {places.stop}, {len(moving)} of them left"
            self._tell(done, self.total * job.iterations, f"power iteration, {left}")
            if not moving:
                break
        if not all(map(math.isfinite, values.values())):
            raise InputError("the curvature of the loss is not finite: check the data and the weights")
        return Eigenvalues(values=tuple(values.values()))


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
