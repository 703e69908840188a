"""The contracts of searches and of judges."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from typing import Any

from bitplan.core.precision import parse_choices
from bitplan.core.records import Gains, Graph
from bitplan.core.registry import JUDGES, SEARCHES
from bitplan.core.trials import Recipe
from bitplan.costs.base import price
from bitplan.gains.base import Context, estimate
from bitplan.plugins.methods.searches.base import PlanJudge, Search
from bitplan.selection.base import select
from bitplan.selection.budget_constraint import BudgetConstraint
from bitplan.tasks.base import load_task
from bitplan.testing.contract import Contract
from bitplan.testing.networks import Made, branching

_CHOICES = parse_choices("w2a2,w3a3,w4a4")  # the network is at the highest
_JUDGE = "drift:samples=16,batch_size=16"
_PASSES = 2 * 16  # of that judge, for a plan
_EVALUATIONS = 5


def check_search(search: Search) -> None:
    """Hold a search to its contract, on a small quantized network and a few digits, by `drift` and little to spend."""
    contract = Contract(f"search {SEARCHES.name_of(search)}")
    contract.clause("it is derived from Search", isinstance(search, Search), type(search).__name__)
    limited = dataclasses.replace(search, judge=_JUDGE, spend=_EVALUATIONS * _PASSES + 1)
    made, setting = branching(), Context(task=load_task("digits"), seed=1)
    for budget in ("50%", "70%", "100%"):
        aim = BudgetConstraint.of(made.graph, _CHOICES, price("bmac", made.graph, _CHOICES), budget)
        with contract.leaves_as_it_was(made.model):
            _check(contract, limited, made, dataclasses.replace(setting, aim=aim))


def _check(contract: Contract, search: Search, made: Made, context: Context) -> None:
    assert context.aim is not None

    def once(**more: Any) -> Gains:
        with contract.works("it finds a plan"):
            return estimate(
                search, made.model, made.graph, choices=_CHOICES, context=dataclasses.replace(context, **more)
            )

    with tempfile.TemporaryDirectory() as store:
        gains, again = once(), once(store=store)
        contract.clause("the same seed finds the same", gains.id == again.id, f"{gains.rows}, then {again.rows}")
        found = once(store=store)
        contract.clause("what is in the store is found there", found.id == gains.id, f"{gains.rows}, then {found.rows}")
    spent = gains.counts["spend"]
    contract.clause("no more is spent than may be", spent <= _EVALUATIONS * _PASSES + 1, f"{spent} passes")
    plan = select(made.graph, gains, price("bmac", made.graph, _CHOICES), budget=context.aim.budgets)
    picks = tuple(_CHOICES.index(plan.precisions[name]) for name in context.aim.groups)
    contract.clause("the best selection is the plan that it found", context.aim.rows(picks) == gains.rows, picks)


def check_judge(judge: PlanJudge, *, made: Made | None = None, context: Context | None = None) -> None:
    """Hold a judge to its contract, on a small quantized network and two steps of digits unless others are given."""
    contract = Contract(f"judge {JUDGES.name_of(judge)}")
    contract.has_all_of(judge, PlanJudge, "a judge")
    start = made or branching()
    setting = context or Context(task=load_task("digits"), recipe=Recipe(steps=2, batch_size=16), seed=1)
    plans = _some_plans(start.graph)
    with contract.leaves_as_it_was(start.model), contract.works("it judges every plan"):
        bench = judge.bench(contract.thing, start.model, start.graph, _CHOICES, setting)
        scores = [judged.score for judged in bench.judged(plans)]
        again = [bench.judged([plan])[0].score for plan in reversed(plans)]
    contract.clause("a plan has a price", bench.price.passes > 0 and bench.price.evaluations == 1, bench.price)
    contract.clause(
        "one finite score for each plan", len(scores) == len(plans) and all(map(math.isfinite, scores)), scores
    )
    contract.clause("a plan is judged alike, alone or beside others", scores == again[::-1], f"{scores}, then {again}")


def _some_plans(graph: Graph) -> list[dict[str, Any]]:
    names = [group.name for group in graph.selectable]
    return [{}, dict.fromkeys(names, _CHOICES[0]), {names[0]: _CHOICES[1]}]
