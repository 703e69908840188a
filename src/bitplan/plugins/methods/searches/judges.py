"""The judges: how far a plan's answers are from those at the highest choice, its loss, or how well it fine-tunes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, TypeVar

from bitplan.core.about import About
from bitplan.core.jobs import Drifted, Drifts, Dropped, Losses, Lowered, Tuned
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import Spend
from bitplan.gains.alps import Alps, measured_by
from bitplan.gains.base import Context
from bitplan.gains.drift import Compare, Drift, once_for
from bitplan.gains.drop import Drop, Measure, batchwise, lowered_jobs
from bitplan.gains.finetuning import Expected, Tuner, recipe_for
from bitplan.gains.lowering import By, check_task, check_top, layers_of, lower, sign_of, try_task
from bitplan.plugins.methods.searches.base import Bench, JobBench, Lowering, PlanJudge
from bitplan.tasks.base import WithAnswers, judged_by
from bitplan.tune.length import samples_of, steps_of
from bitplan.tune.validation import looks_of

Draw = TypeVar("Draw", bound=Dropped)


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
            Drifted, model, graph, context, [{}], self.samples, self.batch_size, temperature=self.temperature
        )
        once = once_for([first])
        return JobBench(
            once + Spend(evaluations=1), method, context, Compare(model, task), Drifts, _like(first, graph),
            lambda outcome: -fmean(outcome.divergences), once=once,
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
        (first,) = lowered_jobs(Dropped, model, graph, context, [{}], self.samples, self.batch_size)
        price, sign = Spend(forwards=first.batches * first.batch_size, evaluations=1), sign_of(self.by, task)
        return JobBench(
            price, method, context, Measure(model, task), Losses, _like(first, graph),
            lambda outcome: sign * fmean(batchwise(outcome, self.by)),
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
        held = tuner.work.task.size("test") if judged_by(tuner.work.task) == "test" else 0
        sign = sign_of(self.by, tuner.work.task)
        looked = looks_of(tuner.work.task, recipe)
        price = Spend(samples + taught + held + looked, samples, trainings=1, evaluations=1)
        return JobBench[Lowered, Tuned](
            price, method, context, tuner.work, Tuned, tuner.job,
            lambda outcome: sign * measured_by(self.by, outcome), lambda plans: _of_so_many(tuner, plans),
        )  # fmt: skip


def _like(first: Draw, graph: Graph) -> Callable[[Lowering], Draw]:
    """What makes jobs like this one with other groups lowered: the network behind it is hashed once."""

    def make(plan: Lowering) -> Draw:
        return first.model_copy(update={"groups": tuple(plan), "layers": layers_of(graph, plan)})

    return make


def _of_so_many(tuner: Tuner, plans: int) -> Expected:
    """All trainings take what one takes; which are in the store already is not known before they are proposed."""
    one = tuner.expected([tuner.job({})])
    task, recipe = tuner.work.task, tuner.run_of_all.recipe
    steps = steps_of(task, recipe)
    each = one.seconds / max(one.steps, 1) if one.steps else 0.0
    return dataclasses.replace(
        one, jobs=plans, done=0, steps=plans * steps, samples=plans * samples_of(task, recipe),
        seconds=plans * steps * each,
    )  # fmt: skip
