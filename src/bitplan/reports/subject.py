"""The subject of a page: a run with its results, or a single plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from bitplan.core.budget import Account, Budget
from bitplan.core.ceilings import Ceiling
from bitplan.core.errors import FileError, InputError
from bitplan.core.records import Costs, Gains, Graph, Plan
from bitplan.core.studies import FailedTrial, Fit, Pairs, Study
from bitplan.core.trials import Result
from bitplan.costs.base import add_limited
from bitplan.reports.spending import spends_of
from bitplan.selection.base import cost_of, select
from bitplan.stats.spending import MethodSpend
from bitplan.store.run_folder import RunFolder, gains_file


@dataclass(frozen=True)
class Candidate:
    """A method that plans: its title, its gains, and the selector it is used with."""

    title: str
    gains: Gains
    selector: str


@dataclass(frozen=True)
class Subject:
    """Everything a page or a figure shows; `budget` is the one that the answer is given for.

    `budget` is one of `budgets`; `others` hold at every budget (of a single plan with several). `command` makes
    the recommended plan; where it depends on the method, it holds `{gains}` and `{selector}`.
    """

    title: str
    graph: Graph
    costs: tuple[Costs, ...]
    candidates: tuple[Candidate, ...]
    budget: str
    budgets: tuple[str, ...]
    command: str
    others: tuple[str, ...] = ()
    study: Study | None = None
    plan: Plan | None = None
    results: tuple[Result, ...] = ()
    failures: tuple[FailedTrial, ...] = ()
    pairs: Pairs | None = None
    fit: Fit | None = None
    spends: Mapping[str, MethodSpend] = field(default_factory=dict)
    ceilings: tuple[Ceiling, ...] = ()

    @cached_property
    def cost(self) -> Costs:
        """Return the cost that the budgets limit."""
        choices = self.candidates[0].gains.choices
        return cost_of(Budget.parse(self.budget), self.graph, choices, self.costs)

    @cached_property
    def account(self) -> Account:
        """Return the account that the budgets are measured against."""
        return Account.of(self.graph, self.cost)

    def capacity(self, budget: str) -> int:
        """Return the units of the cost that a budget leaves to the choosable layers."""
        return Budget.parse(budget).capacity(self.account)

    def make(self, candidate: Candidate, budget: str) -> Plan:
        """Return the plan of a method at a budget."""
        return select(self.graph, candidate.gains, self.costs, budget=budget, selector=candidate.selector)

    def reproduce(self, candidate: Candidate, budget: str) -> str:
        """Return the command that makes the plan of a method at a budget."""
        selector = "" if candidate.selector == candidate.gains.selector else f" --selector {candidate.selector}"
        return self.command.format(gains=gains_file(candidate.title), budget=budget, selector=selector)


def run_subject(run: RunFolder, budget: str | None = None) -> Subject:
    """Return a run as far as it got; `budget` is the study's middle one unless given."""
    study, graph, costs, gains = run.study, run.graph, run.costs, run.gains
    if not study.methods:
        raise InputError(
            f"{study.name} compares quantizers and no methods, of which a page would be: `bitplan compare {run.path}` "
            "and `bitplan run tables --which quantizers` show them"
        )
    if not gains and run.bound_gains:
        raise InputError(
            f"every method of {study.name} that is done chose within one budget, and a page needs gains that hold for "
            "all: add a method to the study, such as uniform; `bitplan compare` and `bitplan run tables` "
            "show the scores"
        )
    if graph is None or costs is None or not gains:
        missing = "graph" if graph is None else "costs" if costs is None else "gains of any method"
        raise FileError(f"{run.path} has no {missing} yet, so there is nothing to show: go on with `bitplan sweep`")
    candidates = tuple(
        Candidate(method.title, gains[method.title], method.selector or gains[method.title].selector)
        for method in study.methods
        if method.title in gains
    )
    chosen = budget or _middle(study.budgets)
    limits = [Budget.parse(written) for written in (chosen, *study.budgets)]
    if limits[0].axis != limits[1].axis:
        raise InputError(f"budget {chosen} is of another kind than those of the study ({', '.join(study.budgets)})")
    folder = _literal(run.path)
    files = " ".join(_literal(run.file_of(kind)) for kind in (Graph, Costs))
    return Subject(
        title=study.name,
        graph=graph,
        costs=tuple(add_limited([costs], limits, graph, costs.choices)),
        candidates=candidates,
        budget=chosen,
        budgets=tuple(dict.fromkeys((*study.budgets, chosen))),
        command=f"bitplan steps select {files} {folder}/{{gains}} --budget {{budget}}{{selector}} -o plan.json",
        study=study,
        results=tuple(run.results),
        failures=tuple(run.failures),
        pairs=run.pairs,
        fit=run.fit,
        spends=spends_of(run),
        ceilings=tuple(run.found_ceilings),
    )


def plan_subject(plan: Plan, graph: Graph, gains: Gains, costs: tuple[Costs, ...], command: str) -> Subject:
    """Return a single plan without any training."""
    first, *others = [limit.budget for limit in plan.limits]
    return Subject(
        title=graph.model,
        graph=graph,
        costs=costs,
        candidates=(Candidate(gains.method, gains, plan.selector),),
        budget=first,
        budgets=(first,),
        command=command.replace("{", "{{").replace("}", "}}"),
        others=tuple(others),
        plan=plan,
    )


def _literal(path: Path) -> str:
    """Return a path for a text that `format` fills in later."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _middle(budgets: tuple[str, ...]) -> str:
    ordered = sorted(budgets, key=lambda written: Budget.parse(written).place())
    return ordered[len(ordered) // 2]
