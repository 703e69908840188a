"""An additive model of plans: what every step of a group adds to the score, learned from scores of whole plans.

score of a training = mean + Σ steps that its plan takes + what is the plan's own + noise

Steps and what is a plan's own are normal with variances that the scores themselves tell (restricted maximum likelihood
on a grid); so this is ridge regression, with errors, and its ridge is refitted as scores come in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from bitplan.selection.budget_constraint import Picks

Floats = NDArray[np.float64]
_STEPS = tuple(10 ** (power / 2) for power in range(-4, 9))  # variances of a step, in those of the noise
_OWN = (0.03, 0.3, 3.0)  # … and of what is a plan's own
_CONSTANT = 1e-18  # of the squared scores: below, all are the same


@dataclass(frozen=True, eq=False)
class AdditiveModel:
    """What is known of steps, (G, C − 1), then of what is own to each of `plans`: means and covariance, (F + P)."""

    shape: tuple[int, int]
    plans: tuple[Picks, ...]
    mean: float
    values: Floats
    covariance: Floats
    of_mean: float
    """The variance of the mean."""
    with_mean: Floats
    """The covariance of the unknowns with the mean, (F + P)."""

    @classmethod
    def fit(cls, choices: int, scored: Sequence[tuple[Picks, float]]) -> AdditiveModel:
        """Learn from trainings of plans, each with its score; a plan may be among them several times."""
        plans = tuple(dict.fromkeys(picks for picks, _ in scored))
        groups = len(plans[0])
        y = np.array([score for _, score in scored])  # (N)
        steps = np.array([_steps(picks, choices) for picks, _ in scored])  # (N, F)
        own = np.array([[float(picks == plan) for plan in plans] for picks, _ in scored])  # (N, P)
        features = np.hstack([steps, own])
        parts = steps.shape[1], len(plans)
        fits = [(_solved(y, features, prior), prior) for prior in _priors(*parts)]
        best, prior = max(fits, key=lambda fit: fit[0].likelihood)
        gain = prior[:, None] * features.T  # (F + P, N)
        covariance = best.noise * (np.diag(prior) - gain @ best.precision @ gain.T)
        of_mean = best.noise / best.of_ones.sum()
        with_mean = -of_mean * (gain @ best.of_ones)
        return cls((groups, choices - 1), plans, best.mean, gain @ best.residual, covariance, of_mean, with_mean)

    def expected(self, picks: Picks) -> float:
        """The score that a plan is expected to reach, what is known to be its own included."""
        return self.mean + float(self._features(picks) @ self.values)

    def error(self, picks: Picks) -> float:
        """The standard error of that, as far as the plan was tried; the mean of all is not known either."""
        features = self._features(picks)
        spread = features @ self.covariance @ features + 2 * (features @ self.with_mean) + self.of_mean
        return math.sqrt(max(0.0, float(spread)))

    def gains(self, values: Floats | None = None) -> Floats:
        """What every choice adds to the lowest, (G, C): as expected, or as a draw says."""
        chosen = self.values if values is None else values
        steps = chosen[: self.shape[0] * self.shape[1]].reshape(self.shape)
        return np.hstack([np.zeros((self.shape[0], 1)), np.cumsum(steps, axis=1)])

    def draw(self, chance: np.random.Generator) -> Floats:
        """Values that may be the true ones, by what is known."""
        return chance.multivariate_normal(self.values, self.covariance, method="eigh", check_valid="ignore")

    def best_tried(self, values: Floats | None = None) -> Picks:
        """The plan that is best of those tried: as expected, or as a draw says; of equals the first."""
        chosen = self.values if values is None else values
        totals = [float(self._features(plan) @ chosen) for plan in self.plans]
        return self.plans[int(np.argmax(totals))]

    def _features(self, picks: Picks) -> Floats:
        own = [float(picks == plan) for plan in self.plans]
        return np.concatenate([_steps(picks, self.shape[1] + 1), own])


def _steps(picks: Picks, choices: int) -> Floats:
    """1 for every step from a choice to the next that a plan takes, (G · (C − 1))."""
    return (np.array(picks)[:, None] > np.arange(choices - 1)[None, :]).astype(np.float64).ravel()


def _priors(steps: int, plans: int) -> list[Floats]:
    """Every pair of variances on the grid, for each unknown."""
    return [np.repeat([step, own], [steps, plans]) for step, own in product(_STEPS, _OWN)]


@dataclass(frozen=True, eq=False)
class _Solved:
    """The mean, the variance of the noise, what scores tell beyond the mean, (N, N), and what is left of them, (N).

    `of_ones` is by how much each score counts for the mean, (N).
    """

    mean: float
    noise: float
    precision: Floats
    residual: Floats
    of_ones: Floats
    likelihood: float


def _solved(y: Floats, features: Floats, prior: Floats) -> _Solved:
    """The mean and the noise that fit best, with the restricted log-likelihood of all, but for a constant."""
    spread = np.eye(len(y)) + (features * prior) @ features.T  # (N, N)
    inverse = np.linalg.inv(spread)
    of_ones = inverse.sum(axis=1)  # (N)
    total = float(of_ones.sum())
    mean = float(of_ones @ y) / total
    residual = inverse @ (y - mean)
    smallest = _CONSTANT * float(1 + y @ y / len(y))
    noise = max(smallest, float((y - mean) @ residual) / max(1, len(y) - 1))
    size = float(np.linalg.slogdet(spread)[1])
    likelihood = -0.5 * ((len(y) - 1) * math.log(noise) + size + math.log(total))
    return _Solved(mean, noise, inverse - np.outer(of_ones, of_ones) / total, residual, of_ones, likelihood)
