"""The appendix's oracle: train many random mixed networks, and regress their score on which groups were lowered."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bitplan.core.errors import InputError
from bitplan.core.jobs import Job, Outcome
from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.studies import Fit
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.gains.finetuning import Trainings, Tuner, check_length, counts_of, recipe_for
from bitplan.gains.jobs import seconds_of
from bitplan.gains.lowering import By, check_by, rows_by_layer, sign_for

Vector = tuple[int, ...]
"""For each selectable group in turn: 1 at the highest choice, 0 at the lowest."""

_FEW = 8  # groups: with fewer, the paper's levels give too few networks to fit
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinearFit:
    """A linear fit: one coefficient per group; errors where there were more networks than unknowns."""

    coefficients: tuple[float, ...]
    intercept: float
    errors: tuple[float, ...] | None
    rank: int


@dataclass(frozen=True)
class Regression(Gain):
    """A group's gain is its coefficient in a linear regression of the score on the 0/1 precisions of all groups.

    `per_level` random networks for each number of lowered groups 2, 3, …, L − 2 (all numbers where there are fewer than
    eight groups), at most `networks` in all, each trained from the network at the highest choice by the recipe, or
    for `epochs` or `steps` of it. `by` "score" is that on the test split, "loss" the training loss of the last tenth.
    `held_out` is the share that is not fitted. Groups are lowered to the lowest choice; choices between get their share
    of the coefficient by bits (weights' plus activations').
    """

    about: ClassVar[About] = About(True, True, True, "3·T·epochs·networks", "the paper: Bablani et al. 2023")

    per_level: int = 3
    networks: int | None = None
    by: By = "score"
    epochs: float | None = None
    steps: int | None = None
    lr_factor: float = 1.0
    held_out: float = 0.1

    def __post_init__(self) -> None:
        check_by(self.by)
        check_length("regression", self.epochs, self.steps, self.lr_factor)
        if self.per_level < 1 or (self.networks is not None and self.networks < 2):
            raise InputError(
                f"regression needs at least 1 network per level and 2 in all, not {self.per_level} and {self.networks}"
            )
        if not 0 <= self.held_out < 1:
            raise InputError(f"regression: held_out is a share from 0 to below 1, not {self.held_out}")

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """Coefficients of what is better, with their standard errors."""
        tuner, vectors, jobs = self._jobs(model, graph, choices, context)
        outcomes, task = tuner.run(jobs), tuner.work.task
        measured = [self._measured(outcome) for outcome in outcomes]
        fitted, _ = split(len(vectors), len(vectors[0]), self.held_out, context.seed)
        line = fit_line(vectors, measured, fitted)
        sign = sign_for(self.by, task)
        names = [group.name for group in graph.selectable]
        values = _rows(names, [sign * coefficient for coefficient in line.coefficients], choices)
        errors = None if line.errors is None else _rows(names, line.errors, choices)
        return LayerGains(
            values=rows_by_layer(graph, values),
            errors=None if errors is None else rows_by_layer(graph, errors),
            counts=counts_of(outcomes, task) | {"unknowns": len(names) + 1, "rank": line.rank},
            work=seconds_of(outcomes),
        )

    def fit(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Fit:
        """The same as a record: every network, what was measured, what the line says, and how well both agree."""
        start = time.perf_counter()
        tuner, vectors, jobs = self._jobs(model, graph, choices, context)
        outcomes = tuner.run(jobs)
        task = tuner.work.task
        return describe_fit(
            graph,
            vectors,
            [self._measured(outcome) for outcome in outcomes],
            metric=task.metric if self.by == "score" else "loss",
            rows=split(len(vectors), len(vectors[0]), self.held_out, context.seed),
            epochs=outcomes[0].value("samples") / task.size("train"),
            seconds=time.perf_counter() - start,
        )

    def trainings(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Trainings:
        """Return the trainings of all networks."""
        tuner, _, jobs = self._jobs(model, graph, choices, context)
        return Trainings(tuner, jobs)

    def _jobs(
        self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context
    ) -> tuple[Tuner, list[Vector], list[Job]]:
        epochs, steps = self.epochs, self.steps
        if epochs is None and steps is None and context.recipe is not None:
            epochs, steps = context.recipe.epochs, context.recipe.steps
        recipe = recipe_for("regression", context, epochs=epochs, steps=steps, lr_factor=self.lr_factor)
        if self.by == "score" and context.task.size("test") < 1:
            raise InputError(
                f"regression scores networks on a test split, and that of {context.task.name} is empty: use by=loss, "
                "or a task with one, bitplan.task(train=…, test=…, score=…)"
            )
        tuner = Tuner.of("regression", model, graph, choices, context, recipe)
        names = [group.name for group in graph.selectable]
        vectors = random_networks(len(names), self.per_level, self.networks, context.seed)
        jobs: list[Job] = []
        for vector in vectors:
            lowered = {name: choices[0] for name, at_top in zip(names, vector, strict=True) if not at_top}
            jobs.append(tuner.job(lowered, scored=self.by == "score"))
        return tuner, vectors, jobs

    def _measured(self, outcome: Outcome) -> float:
        return outcome.value("last_loss" if self.by == "loss" else "score")


def random_networks(groups: int, per_level: int, limit: int | None, seed: int) -> list[Vector]:
    """Different random networks, as many for each number of lowered groups; a limit thins all levels alike."""
    chance = np.random.default_rng([seed, groups])
    levels = range(2, groups - 1) if groups >= _FEW else range(groups + 1)
    by_level: list[list[Vector]] = []
    for level in levels:
        wanted = min(per_level, math.comb(groups, level))
        drawn: dict[Vector, None] = {}  # each once, in the order of the draws
        while len(drawn) < wanted:
            lowered = set(chance.choice(groups, size=level, replace=False).tolist())
            drawn[tuple(int(group not in lowered) for group in range(groups))] = None
        by_level.append(list(drawn))
    order = chance.permutation(len(by_level)).tolist()
    networks: list[Vector] = []
    for turn in range(per_level):
        networks += [by_level[place][turn] for place in order if turn < len(by_level[place])]
    return networks[:limit]


def split(networks: int, groups: int, held_out: float, seed: int) -> tuple[list[int], list[int]]:
    """Which networks are fitted and which held out, at random; never so many that too few are left to fit."""
    order = np.random.default_rng([seed, networks, groups]).permutation(networks).tolist()
    held = max(0, min(round(held_out * networks), networks - groups - 1))
    return sorted(order[held:]), sorted(order[:held])


def fit_line(vectors: Sequence[Vector], measured: Sequence[float], fitted: Sequence[int]) -> LinearFit:
    """Ordinary least squares of what was measured on the vectors; of several best fits the smallest coefficients."""
    x = np.array([vectors[row] for row in fitted], dtype=np.float64)  # (N, G)
    y = np.array([measured[row] for row in fitted])  # (N)
    design = np.column_stack([x, np.ones(len(x))])  # (N, G + 1): the last unknown is the intercept
    solution, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    unknowns = design.shape[1]
    errors: tuple[float, ...] | None = None
    if rank < unknowns:
        log.warning(
            "%d networks cannot tell %d unknowns apart (rank %d): of all fits, the smallest coefficients are taken; "
            "train more networks", len(x), unknowns, rank,
        )  # fmt: skip
    elif len(x) > unknowns:
        variance = float(((y - design @ solution) ** 2).sum()) / (len(x) - unknowns)
        of_coefficients = np.diag(np.linalg.inv(design.T @ design))[:-1]
        errors = tuple(np.sqrt(np.maximum(variance * of_coefficients, 0.0)).tolist())
    *coefficients, intercept = solution.tolist()
    return LinearFit(tuple(coefficients), intercept, errors, int(rank))


def describe_fit(
    graph: Graph,
    vectors: Sequence[Vector],
    measured: Sequence[float],
    *,
    metric: str,
    rows: tuple[Sequence[int], Sequence[int]],
    epochs: float = 0.0,
    seconds: float = 0.0,
) -> Fit:
    """Fit a line to the first of `rows` and write it down with its agreement on both.

    `residual` is the standard deviation on what was held out, as in the paper, or else on what was fitted.
    """
    fitted, held = rows
    line = fit_line(vectors, measured, fitted)
    scores = np.array(measured)  # (N)
    predicted = np.array(vectors) @ np.array(line.coefficients) + line.intercept  # (N, G) · (G) → (N)
    judged = list(held) if len(held) > 1 else list(fitted)
    residuals = (scores - predicted)[judged]
    return Fit(
        graph=graph.id,
        metric=metric,
        groups=tuple(group.name for group in graph.selectable),
        coefficients=line.coefficients,
        intercept=line.intercept,
        vectors=tuple(vectors),
        measured=tuple(measured),
        predicted=tuple(predicted.tolist()),
        held_out=tuple(held),
        correlation=_correlation(scores, predicted, fitted) or 0.0,
        correlation_held_out=_correlation(scores, predicted, held),
        residual=float(residuals.std(ddof=1)) if len(residuals) > 1 else 0.0,
        epochs=epochs,
        networks=len(vectors),
        seconds=seconds,
    )


def _correlation(one: NDArray[np.float64], other: NDArray[np.float64], rows: Sequence[int]) -> float | None:
    """Pearson's R, None where it is not defined."""
    chosen = list(rows)
    if len(chosen) < 2 or one[chosen].std() == 0 or other[chosen].std() == 0:
        return None
    return float(np.corrcoef(one[chosen], other[chosen])[0, 1])


def _rows(names: Sequence[str], at_top: Sequence[float], choices: Sequence[Precision]) -> dict[str, list[float]]:
    """From what holds at the highest choice, the shares at all, by how many bits each is above the lowest."""
    bits = [choice.weight_bits + choice.act_bits for choice in choices]
    lowest, highest = bits[0], bits[-1]
    shares = [(own - lowest) / (highest - lowest) for own in bits]  # 0 … 1
    rows: dict[str, list[float]] = {}
    for name, top in zip(names, at_top, strict=True):
        rows[name] = [top * share for share in shares]
    return rows
