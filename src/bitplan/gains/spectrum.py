"""What is estimated from Hessian products: the trace and the largest eigenvalue of every layer's block.

For Hutchinson's estimate Tr H_l ≈ mean of v_lᵀ(Hv)_l, v ∈ {±1}, one product of the whole network serves every layer at
once, since the signs of different layers are independent. Eigenvalues take products of each layer's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from bitplan.core.errors import InputError
from bitplan.core.probes import Eigenvalues, Powers, Probed, Probes
from bitplan.core.progress import Progress
from bitplan.core.record import Record
from bitplan.core.store import load, save
from bitplan.gains.hessian import Curvature
from bitplan.quant.fingerprint import fingerprint
from bitplan.tasks.base import title_of

ROUND = 10  # probes, or layers, that share one graph per batch; after each round what was found is kept
Outcome = TypeVar("Outcome", Probed, Eigenvalues)


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
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Traces:
    """Hutchinson's estimate for every layer, by at most `probes` products of the whole network with the Hessian.

    It stops early, after `least` probes or more, when every standard error is within `tolerance` × |trace|. Every round
    of probes is kept in the folder, where there is one, and read from it if it is there already.
    """
    found, seconds = torch.zeros(0, len(curve.weights), dtype=torch.float64), 0.0
    while len(found) < probes and not (len(found) >= least and _settled(found, tolerance)):
        wanted = range(len(found), min(len(found) + ROUND, probes))
        job = partial(Probes, first=wanted.start, count=len(wanted))
        probed = _kept(curve, seed, folder, job, Probed, partial(_round, curve, wanted, seed, probes, progress))
        seconds += probed.seconds
        found = torch.cat([found, torch.tensor(probed.products, dtype=torch.float64)])
    means, errors = _mean_and_error(found)
    names = list(curve.weights)
    return Traces(dict(zip(names, means, strict=True)), dict(zip(names, errors, strict=True)), len(found), seconds)


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
    folder: Path | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, float], float]:
    """The eigenvalue of largest magnitude of every layer's block, by power iteration (HAWQ, Dong et al. 2019).

    Each layer needs products of its own: with all layers' vectors in one product, the blocks beside the diagonal would
    be iterated on as well. A layer is done when its eigenvalue moves by less than `tolerance`, relatively. Every round
    of layers is kept in the folder, where there is one, and read from it if it is there already. The second value is
    the seconds that all took.
    """
    names, seconds = list(curve.weights), 0.0
    found: list[float] = []
    for first in range(0, len(names), ROUND):
        places = range(first, min(first + ROUND, len(names)))
        job = partial(Powers, iterations=iterations, tolerance=tolerance, first=first, count=len(places))
        work = partial(_powers, curve, places, iterations, tolerance, seed, progress)
        tops = _kept(curve, seed, folder, job, Eigenvalues, work)
        found += tops.values
        seconds += tops.seconds
    return dict(zip(names, found, strict=True)), seconds


def _kept(
    curve: Curvature, seed: int, folder: Path | None, job: Callable[..., Record], kind: type[Outcome],
    work: Callable[[], Outcome],
) -> Outcome:  # fmt: skip
    """The outcome of a job, read from the folder where it is there, else worked out and kept.

    `job` takes what every outcome depends on.
    """
    if folder is None:
        return _timed(work)
    own = fingerprint(curve.model)
    described = job(
        network=own.network,
        weights=own.weights,
        task=f"{title_of(curve.task)} {curve.task!r}",
        layers=tuple(curve.weights),
        sizes=curve.data.sizes,
        seed=seed,
    )
    path = folder / f"{described.id}.json"
    if path.is_file():
        return load(path, kind)
    found = _timed(work)
    save(found, path)
    return found


def _timed(work: Callable[[], Outcome]) -> Outcome:
    start = time.perf_counter()
    return work().model_copy(update={"seconds": time.perf_counter() - start})


def _powers(
    curve: Curvature, places: range, iterations: int, tolerance: float, seed: int, progress: Progress | None
) -> Eigenvalues:
    """The largest eigenvalues of some layers, by their places."""
    weights = list(curve.weights.values())
    vectors = {at: _unit(_gaussian(weights[at], seed, at)) for at in places}
    values = dict.fromkeys(places, 0.0)
    moving = list(places)
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
            done = places.start * iterations + len(places) * (turn + 1)
            left = f"layers {places.start + 1} to {places.stop}, {len(moving)} of them left"
            progress(done, len(weights) * iterations, f"power iteration, {left}")
        if not moving:
            break
    if not all(map(math.isfinite, values.values())):
        raise InputError("the curvature of the loss is not finite: check the data and the weights")
    return Eigenvalues(values=tuple(values.values()))


def _gaussian(weight: Tensor, seed: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
    return torch.randn(weight.shape, generator=generator).to(weight)


def _round(curve: Curvature, wanted: range, seed: int, total: int, progress: Progress | None) -> Probed:
    """vᵀHv of every layer for some probes, averaged over the batches."""
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
    return Probed(products=tuple(map(tuple, found.tolist())))


def _mean_and_error(found: Tensor) -> tuple[list[float], list[float]]:
    return found.mean(0).tolist(), (found.std(0) / math.sqrt(len(found))).tolist()


def _settled(found: Tensor, tolerance: float) -> bool:
    means, errors = _mean_and_error(found)
    return all(error <= tolerance * abs(mean) for mean, error in zip(means, errors, strict=True))


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.norm().clamp_min(torch.finfo(vector.dtype).tiny)
