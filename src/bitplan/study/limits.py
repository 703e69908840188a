"""Before anything is trained: whether what a study lets its methods spend does for one evaluation of each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from bitplan.core.errors import InputError
from bitplan.core.records import Graph, Plan
from bitplan.core.registry import CHOOSERS
from bitplan.core.studies import Method
from bitplan.gains.base import Context, is_bound, make_gain
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.convert import quantize
from bitplan.study.setting import Setting, some_batches
from bitplan.study.trials import all_starts, estimations


def untrained(setting: Setting, graph: Graph) -> tuple[nn.Module, nn.Module]:
    """The network with random weights, and the same at the highest choice, calibrated."""
    study = setting.study
    network = setting.network(study.start.seed)
    high = quantize(network, Plan.uniform(graph, study.choices[-1]), **study.start.options)  # type: ignore[arg-type]
    calibrate_(high, some_batches(setting.task, study.recipe.batch_size, 0, 1), forward=setting.task.forward)
    return network, high


def check_limits(setting: Setting, graph: Graph) -> None:
    """Refuse a spend that does not do for a method that chooses within a budget and is not done yet."""
    study = setting.study
    made: tuple[nn.Module, nn.Module] | None = None
    for method in study.methods:
        _check_budgets(method, study.budgets)
        if method.name not in CHOOSERS or not is_bound(CHOOSERS.get(method.name)):
            continue
        jobs = [one for first in all_starts(study) for one in estimations(study, graph.id, method, first)]
        job = next((one for one in jobs if not setting.run.estimates.has(one.id)), None)
        gain, _ = make_gain(method.name, method.options)
        check = getattr(gain, "check_limit", None)  # searches and relaxations have one
        if check is None or job is None or (job.spend is None and getattr(gain, "spend", None) is None):
            continue
        made = made or untrained(setting, graph)
        network, high = made
        teacher = network if job.recipe and job.recipe.distills else None
        context = Context(
            task=setting.choosing_task, recipe=job.recipe, teacher=teacher, seed=job.seed, epochs=job.spend
        )
        try:
            check(high, graph, study.choices, context)
        except InputError as error:
            raise InputError(f"method {method.title}: {error}") from None


def _check_budgets(method: Method, budgets: Sequence[str]) -> None:
    """Refuse a method whose one estimate is for several budgets where it does not say for which."""
    if getattr(make_gain(method.name, method.options)[0], "budgets", None) == ():
        said = ", ".join(f'"{budget}"' for budget in budgets)
        raise InputError(f"method {method.title}: say for which budgets it is, options = {{ budgets = [{said}] }}")
