"""Drift in context: what each group is worth beside the others as the plan has them, not beside a whole network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bitplan.core.errors import InputError
from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import charge
from bitplan.gains.base import Context, Gain, LayerGains, check_constraint
from bitplan.gains.drift import Compare, Drift, price_of_reference
from bitplan.gains.jobs import do_jobs, lowered_jobs, one_at_a_time, seconds_of
from bitplan.gains.lowering import check_task, check_top, is_float, rows_by_layer
from bitplan.selection.budget_constraint import BudgetConstraint, Picks
from bitplan.tasks.base import WithAnswers

Table = NDArray[np.float64]
"""Gains, (G, C), 0 at the lowest choice."""


@dataclass(frozen=True)
class DriftInContext(Gain):
    """Drift, measured again where it matters: near the plan that it leads to.

    Groups are first lowered one at a time, as `drift` does, and the best plan within the budget is selected. Then, for
    as many `rounds` as it takes, every group of that plan is moved to each of its other choices, all others being as
    the plan has them: value(c) = d(plan with the group at c0) − d(plan with it at c), d the divergence from the answers
    at the highest choice. The plan for the mean of these rounds is selected, until nothing changes. Samples are drawn
    anew for every round, so that no plan is fitted to some, and once more, `decide` of them, to decide which of the
    plans on the way is taken. No label is looked at.
    """

    about: ClassVar[About] = About(True, passes="N·(1 + G·(C − 1))·(1 + R) + P·D", source="bitplan")
    calibrates: ClassVar[bool] = True
    from_float: ClassVar[bool] = True
    bound: ClassVar[bool] = True

    samples: int = 512
    batch_size: int = 64
    temperature: float = 4.0
    rounds: int = 3
    decide: int = 2048

    def __post_init__(self) -> None:
        Drift(min(self.samples, self.decide), self.batch_size, self.temperature)
        if self.rounds < 1:
            raise InputError(f"drift_in_context: rounds must be at least 1, not {self.rounds}")

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """Settle on a plan; the gains are those that it is the best selection for."""
        aim = check_constraint(context.aim, "drift_in_context", graph, choices)
        check_task(context.task, "drift_in_context", "runs the network on data", WithAnswers)
        check_top(model, graph, choices, "drift_in_context")
        bench = _Around(self, model, graph, context, aim)
        tables: dict[Picks, Table] = {}
        table = bench.alone(part=0)
        plan, in_context = aim.best(table), list[Table]()
        for part in range(1, self.rounds + 1):
            tables.setdefault(plan, table)
            in_context.append(bench.around(plan, part))
            table = np.mean(in_context, axis=0)
            plan = aim.best(table)
            if plan in tables:
                break
        tables.setdefault(plan, table)
        plans = list(tables)
        chosen = plans[int(np.argmin(bench.divergences(plans, self.rounds + 1, self.decide).mean(axis=1)))]
        rows = {name: tuple(row) for name, row in zip(aim.groups, tables[chosen].tolist(), strict=True)}
        words = f"{len(plans)} plans, number {plans.index(chosen) + 1} on the way taken"
        return LayerGains(
            rows_by_layer(graph, rows),
            counts={"plans": len(plans)},
            work=bench.seconds,
            notes=(f"gains: drift_in_context settled after {words}, for {', '.join(aim.budgets)} alone",),
        )


class _Around:
    """Plans and their neighbours, run on samples, and what that took."""

    def __init__(
        self, method: DriftInContext, model: Any, graph: Graph, context: Context, aim: BudgetConstraint
    ) -> None:
        self._method, self._model, self._graph, self._context, self._aim = method, model, graph, context, aim
        self._work = Compare(model, context.task)
        self._float = is_float(model, graph)
        self.seconds = 0.0

    def alone(self, part: int) -> Table:
        """What each group is worth at each choice, the network being as it is."""
        top = None if self._float else self._aim.choices[-1]
        every = one_at_a_time(self._graph, self._aim.choices)
        moved = [{} if set(one.values()) == {top} else one for one in every]
        return self._table(self._run(moved, part, self._method.samples))

    def around(self, plan: Picks, part: int) -> Table:
        """What each group is worth at each choice, the others being as in a plan."""
        groups, choices = len(plan), len(self._aim.choices)
        moved = [self._lowered((*plan[:g], c, *plan[g + 1 :])) for g in range(groups) for c in range(choices)]
        return self._table(self._run(moved, part, self._method.samples))

    def divergences(self, plans: Sequence[Picks], part: int, samples: int) -> NDArray[np.float64]:
        """How far the answers of each plan are from those of the network as it is, by batch, (P, B)."""
        return self._run([self._lowered(plan) for plan in plans], part, samples)

    def _lowered(self, plan: Picks) -> dict[str, Precision]:
        """What a plan changes of the network as it is: of a float one, all groups."""
        if not self._float:
            return self._aim.lowered_groups(plan)
        return {name: self._aim.choices[pick] for name, pick in zip(self._aim.groups, plan, strict=True)}

    def _table(self, drifts: NDArray[np.float64]) -> Table:
        means = drifts.mean(axis=1).reshape(len(self._aim.groups), -1)
        gains: Table = means[:, :1] - means
        return gains

    def _run(self, every: Sequence[Mapping[str, Precision]], part: int, samples: int) -> NDArray[np.float64]:
        """Return the divergences by set of lowered groups and batch, (P, B)."""
        context = replace(self._context, seed=self._context.seed * 1_009 + part)
        jobs = lowered_jobs(
            "drift", self._model, self._graph, context, every, samples, self._method.batch_size,
            options={"temperature": self._method.temperature},
        )  # fmt: skip
        done = do_jobs(self._work, jobs, context, "drift_in_context")
        charge(price_of_reference(jobs))
        self.seconds += seconds_of(done.values())
        return np.array([done[job.id].numbers["divergences"] for job in jobs])
