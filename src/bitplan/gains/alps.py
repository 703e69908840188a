"""ALPS: a group gains what a short fine-tuning loses with that group lowered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bitplan.core.errors import InputError
from bitplan.core.jobs import Job, Outcome
from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.gains.finetuning import Trainings, Tuner, check_length, counts_of, recipe_for
from bitplan.gains.jobs import seconds_of
from bitplan.gains.lowering import By, check_by, rows_by_layer, sign_for

Goodness = NDArray[np.float64]
"""(G, C − 1, S): how good each group was at each choice below the highest, for each seed; more is better."""


@dataclass(frozen=True)
class Alps(Gain):
    """From the network at the highest choice, lower one group, fine-tune, and take the mean training score A.

    value(c) = A_g(c) − A_g(c0), where A at the highest choice is the best of all that were measured: with two choices
    the paper's max_k A_k − A_l. `by` is "loss" (A = −loss: the steadier of the two, and for tasks on which the paper is
    silent) or "score" (the paper's for classification); `offset` takes the loss itself, G = Loss_l, as the paper does
    for segmentation. A is the mean over all steps, as the paper's text says (section 3.2), or with `final` that over
    the last tenth of them: its algorithm 1 says "final training set accuracy". A fine-tuning lasts one epoch (the
    paper), or `epochs`, a fraction too, or `steps`, and anneals over its own length; `lr_factor` multiplies the
    recipe's rate (1/4 suits 40 to 80 steps). Where the recipe distills,
    so do these, and the loss is that one. More than one of `seeds` gives standard errors.
    """

    about: ClassVar[About] = About(True, True, True, "3·T·epochs·G·(C − 1)", "the paper: Bablani et al. 2023")

    by: By = "loss"
    offset: bool = False
    final: bool = False
    epochs: float | None = None
    steps: int | None = None
    lr_factor: float = 1.0
    seeds: int = 1

    def __post_init__(self) -> None:
        check_by(self.by)
        check_length("alps", self.epochs, self.steps, self.lr_factor)
        if self.offset and self.by != "loss":
            raise InputError("alps: offset is for by=loss; a score is always compared with the best one")
        if self.seeds < 1:
            raise InputError(f"alps needs at least one seed, not {self.seeds}")

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """Return the gains, by one training per group, lower choice and seed, with the same batches for every group."""
        trainings = self.trainings(model, graph, choices, context)
        outcomes, task = trainings.tuner.run(trainings.jobs), trainings.tuner.work.task
        measured = sign_for(self.by, task) * np.array(
            [measured_by(self.by, outcome, final=self.final) for outcome in outcomes]
        )
        good = measured.reshape(len(graph.selectable), len(choices) - 1, self.seeds)
        names = [group.name for group in graph.selectable]
        values = dict(zip(names, values_of(good, offset=self.offset), strict=True))
        errors = standard_errors(good)
        return LayerGains(
            values=rows_by_layer(graph, values),
            errors=None if errors is None else rows_by_layer(graph, dict(zip(names, errors, strict=True))),
            counts=counts_of(outcomes, task),
            work=seconds_of(outcomes),
        )

    def trainings(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Trainings:
        """Return all trainings in the order of groups, choices, seeds."""
        length: Mapping[str, Any] = {"epochs": self.epochs, "steps": self.steps, "lr_factor": self.lr_factor}
        recipe = recipe_for("alps", context, **length)
        tuner = Tuner.of("alps", model, graph, choices, context, recipe, by=self.by)
        jobs: list[Job] = []
        for group in graph.selectable:
            for choice in choices[:-1]:
                jobs += [tuner.job({group.name: choice}, seed=seed) for seed in range(self.seeds)]
        return Trainings(tuner, jobs)


def measured_by(by: By, outcome: Outcome, *, final: bool = False) -> float:
    """Return the mean loss or score of a training, over all of its steps or over the last tenth."""
    name = f"{'last' if final else 'mean'}_{by}"
    if name not in outcome.numbers:
        raise InputError("the task has no score for a batch: use by=loss")
    return outcome.value(name)


def values_of(good: Goodness, *, offset: bool = False) -> list[tuple[float, ...]]:
    """Return gains over the lowest choice, (G, C); the highest counts as the best measured, or with `offset` as 0."""
    means = good.mean(axis=2)  # (G, C − 1)
    best = 0.0 if offset else float(means.max())
    rows = []
    for lowest, *between in means:
        rows.append((0.0, *(float(value - lowest) for value in (*between, best))))
    return rows


def standard_errors(good: Goodness) -> Sequence[tuple[float, ...]] | None:
    """Return standard errors of `values_of` over seeds, (G, C); None with one seed."""
    seeds = good.shape[2]
    if seeds < 2:
        return None
    below = (good - good[:, :1, :]).std(axis=2, ddof=1) / np.sqrt(seeds)  # (G, C − 1), 0 at the lowest choice
    # At the highest choice all groups are as good as the best: only the error of the lowest tells them apart.
    highest = errors_over_seeds(good)[:, :1]
    return [tuple(row) for row in np.concatenate([below, highest], axis=1).tolist()]


def errors_over_seeds(good: Goodness) -> NDArray[np.float64]:
    """Return standard errors of the measures, (G, C − 1).

    All groups see the same batches of a seed. The effect of a seed on all groups alike says nothing about their order,
    so it is taken out first.
    """
    groups, lower_choices, seeds = good.shape
    count = groups * lower_choices
    apart = good
    if count > 1:
        # What is left without the mean of all varies less than the measurements did, by this factor.
        apart = (good - good.mean(axis=(0, 1))) * np.sqrt(count / (count - 1))
    errors: NDArray[np.float64] = apart.std(axis=2, ddof=1) / np.sqrt(seeds)
    return errors
