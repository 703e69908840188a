"""The judges: how far a plan's answers are from those at the highest choice, its loss, or how well it fine-tunes."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import Spend
from bitplan.gains.alps import Alps, measured_by
from bitplan.gains.base import Context
from bitplan.gains.drift import Compare, Drift, price_of_reference
from bitplan.gains.drop import Drop, Measure, measures_by_batch
from bitplan.gains.finetuning import Trainings, Tuner, recipe_for
from bitplan.gains.jobs import lowered_jobs, with_lowered
from bitplan.gains.lowering import By, check_task, check_top, lower, sign_for, try_task
from bitplan.plugins.methods.searches.base import Bench, JobBench, PlanJudge
from bitplan.tasks.base import WithAnswers, measuring_split
from bitplan.tune.length import samples_of
from bitplan.tune.validation import looks_of


@dataclass(frozen=True)
class DriftJudge(PlanJudge):
    """How near a plan's answers are to those at the highest choice, as the gain `drift` measures it; no labels.

    A pass over `samples` for a plan, and one for the network as it is.
    """

    about: ClassVar[About] = About(True, passes="N, and N once", source="the gain drift")

    samples: int = Drift.samples
    batch_size: int = Drift.batch_size
    temperature: float = Drift.temperature

    def __post_init__(self) -> None:
        Drift(self.samples, self.batch_size, self.temperature)

    def bench(self, method: str, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Bench:
        """The network as it is, and lowered, on the same batches for all plans."""
        task = check_task(context.task, method, "runs the network on data", WithAnswers)
        check_top(model, graph, choices, method)
        (first,) = lowered_jobs(
            "drift", model, graph, context, [{}], self.samples, self.batch_size,
            options={"temperature": self.temperature},
        )  # fmt: skip
        once = price_of_reference([first])
        return JobBench(
            once + Spend(evaluations=1), method, context, Compare(model, task),
            lambda plan: with_lowered(first, graph, plan),
            lambda outcome: -fmean(outcome.numbers["divergences"]), once=once,
        )  # fmt: skip


@dataclass(frozen=True)
class DropJudge(PlanJudge):
    """The loss of a plan's network as it is, or its score, as the gain `drop` measures it; labels.

    One pass over `samples` for a plan.
    """

    about: ClassVar[About] = About(True, True, passes="N", source="the gain drop")

    samples: int = Drop.samples
    batch_size: int = Drop.batch_size
    by: By = Drop.by

    def __post_init__(self) -> None:
        Drop(self.samples, self.batch_size, self.by)

    def bench(self, method: str, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Bench:
        """The lowered network in inference mode, on the same batches for all plans."""
        task = check_task(context.task, method, "runs the network on labelled data")
        check_top(model, graph, choices, method)
        try_task(lower(model, {}), task, self.by, method)
        (first,) = lowered_jobs("drop", model, graph, context, [{}], self.samples, self.batch_size)
        price, sign = Spend(forwards=first.samples, evaluations=1), sign_for(self.by, task)
        return JobBench(
            price, method, context, Measure(model, task), lambda plan: with_lowered(first, graph, plan),
            lambda outcome: sign * fmean(measures_by_batch(outcome, self.by)),
        )  # fmt: skip


@dataclass(frozen=True)
class FinetunedJudge(PlanJudge):
    """The mean training loss, or score, of a plan's network in a short fine-tuning, as ALPS measures it; labels.

    It lasts for `steps`, or for `epochs`, one unless said, by the context's recipe at `lr_factor` of its rate. Three
    passes for each sample that it sees, one more where the recipe distills, and one for each look at what the recipe
    holds out.
    """

    about: ClassVar[About] = About(True, True, True, "3·T·epochs", "ALPS")

    by: By = "loss"
    epochs: float | None = None
    steps: int | None = None
    lr_factor: float = 1.0

    def __post_init__(self) -> None:
        Alps(self.by, epochs=self.epochs, steps=self.steps, lr_factor=self.lr_factor)

    def bench(self, method: str, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Bench:
        """A training for each plan, with the same batches for all."""
        recipe = recipe_for(method, context, epochs=self.epochs, steps=self.steps, lr_factor=self.lr_factor)
        tuner = Tuner.of(method, model, graph, choices, context, recipe, by=self.by)
        samples = samples_of(tuner.work.task, recipe)
        taught = samples if recipe.distills else 0
        held = tuner.work.task.size("test") if measuring_split(tuner.work.task) == "test" else 0
        sign = sign_for(self.by, tuner.work.task)
        looked = looks_of(tuner.work.task, recipe)
        price = Spend(samples + taught + held + looked, samples, trainings=1, evaluations=1)
        return JobBench(
            price, method, context, tuner.work, tuner.job, lambda outcome: sign * measured_by(self.by, outcome),
            lambda plans: Trainings(tuner, [tuner.job({}, seed=number) for number in range(plans)]),  # alike in time
        )  # fmt: skip
