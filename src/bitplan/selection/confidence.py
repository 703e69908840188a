"""confidence: how sure each group's choice is, given the standard errors of the gains."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.core.budget import BudgetLike
from bitplan.core.errors import InputError
from bitplan.core.precision import Precision
from bitplan.core.records import Costs, Gains, Graph
from bitplan.selection.base import checked, pose, selector_of
from bitplan.selection.problem import Problem, Selector

STABLE = 0.95
_FINE = 2.0**40  # whole values of a resample add up to this: far finer than any standard error


@dataclass(frozen=True)
class Confidence:
    """In what share of the resamples each group gets each choice, and what it gets by the gains themselves."""

    choices: tuple[Precision, ...]
    shares: Mapping[str, tuple[float, ...]]
    chosen: Mapping[str, Precision]
    resamples: int

    @property
    def stable(self) -> tuple[str, ...]:
        """The stable core: groups with one choice in nearly all resamples."""
        return tuple(name for name, row in self.shares.items() if max(row) >= STABLE)

    @property
    def coin_flips(self) -> tuple[str, ...]:
        """The groups whose choice the errors of the gains decide."""
        return tuple(name for name, row in self.shares.items() if max(row) < STABLE)

    def share(self, group: str) -> float:
        """In what share of the resamples a group keeps its choice."""
        return self.shares[group][self.choices.index(self.chosen[group])]

    def __str__(self) -> str:
        stable, flips = self.stable, self.coin_flips
        shown = f"{len(stable)} of {len(self.shares)} groups are a stable core"
        said = f"{self.resamples} resamples of the gains, one choice in at least {STABLE:.0%}"
        if not flips:
            return f"{shown} ({said})"
        are = "is a coin flip" if len(flips) == 1 else "are coin flips"
        return f"{shown}; {len(flips)} {are}: {', '.join(flips)} ({said})"


def confidence(
    graph: Graph,
    gains: Gains,
    costs: Costs | Iterable[Costs],
    *,
    budget: BudgetLike | Sequence[BudgetLike],
    selector: str | Selector | None = None,
    resamples: int = 200,
    seed: int = 0,
) -> Confidence:
    """Select again and again with gains drawn from their normal errors, and count each group's choices.

    A group's values at all choices move together, by one draw: they come from the same measurement. Draws below 0 stay
    as they are, so that a gain near 0 loses about as often as it wins.
    """
    if resamples < 1:
        raise InputError(f"at least one resample is needed, not {resamples}")
    if gains.errors is None:
        raise InputError(
            f"the gains by {gains.method} carry no standard errors, so how sure each choice is cannot be said: "
            "estimate with hawq or alps, or with --gain eagl:bootstrap=100"
        )
    problem = pose(graph, gains, costs, budget).problem
    name, solve = selector_of(selector, gains)

    def picks(posed: Problem) -> tuple[int, ...]:
        return checked(solve(posed), posed, name).picks

    chosen = {group: gains.choices[pick] for group, pick in zip(problem.groups, picks(problem), strict=True)}
    nothing = (0.0,) * len(gains.choices)
    means = np.array([gains.rows[group] for group in problem.groups])  # (G, C)
    errors = np.array([gains.errors.get(group, nothing) for group in problem.groups])  # (G, C)
    counts = np.zeros(means.shape, dtype=np.int64)  # (G, C): how often each group got each choice
    for draw in np.random.default_rng(seed).standard_normal((resamples, len(means), 1)):
        drawn = dataclasses.replace(problem, values=_whole(means + draw * errors))
        counts[np.arange(len(means)), list(picks(drawn))] += 1
    shares = {group: tuple((row / resamples).tolist()) for group, row in zip(problem.groups, counts, strict=True)}
    return Confidence(gains.choices, shares, chosen, resamples)


def _whole(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole numbers for the selector: rounding is far below the errors that the values were drawn with."""
    total = float(np.abs(values).max(axis=1).sum())
    return np.rint(values / (total or 1.0) * _FINE).astype(np.int64)
