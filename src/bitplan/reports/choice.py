"""choose: the trial that a run's page recommends, or the one asked for."""

from __future__ import annotations

from collections.abc import Sequence

from bitplan.core.budget import Budget
from bitplan.core.errors import InputError, UnknownName
from bitplan.core.runs import RunFolder
from bitplan.core.trials import Result
from bitplan.reports.scores import answer, gather
from bitplan.reports.subject import run_subject


def choose(
    run: RunFolder, *, method: str | None = None, budget: str | None = None, seed: int | None = None
) -> Result:  # fmt: skip
    """A result of the run: of the page's method at the page's budget, with the first seed, unless said otherwise.

    `method` is a title; a reference, such as w4a4 (all layers at it), has no budget.
    """
    study, done = run.study, [result for result in run.results if result.training]
    if not done:
        raise InputError(f"{run.path} has no trained network yet: go on with `bitplan sweep`")
    titles = list(dict.fromkeys(study.title_of(result.trial) for result in done))
    if method is not None and method not in titles:
        raise UnknownName("method of this run", method, titles)
    if method is None or any(result.trial.budgets for result in _of(run, done, method)):
        subject = run_subject(run, None if budget is None else str(Budget.parse(budget)))
        budget = subject.budget
        method = method or answer(subject, gather(subject, run.plans)).title
    elif budget is not None:
        raise InputError(f"{method} has no budget: leave out --budget {budget}")
    return _pick(run, _of(run, done, method), method, budget, seed)


def _of(run: RunFolder, results: Sequence[Result], title: str) -> list[Result]:
    return [result for result in results if run.study.title_of(result.trial) == title]


def _pick(run: RunFolder, own: Sequence[Result], method: str, budget: str | None, seed: int | None) -> Result:
    """Of a method's own results, the one at this budget with this seed, or with the first that is there."""
    budgets = (budget,) if budget else ()
    at_budget = [result for result in own if result.trial.budgets == budgets]
    if not at_budget:
        known = list(dict.fromkeys(", ".join(result.trial.budgets) for result in own))
        there = f"there is {', '.join(known)}" if known else "it has no result at all"
        raise InputError(f"no trained network of {method} at the budget {budget}: {there}")
    for wanted in run.study.seeds:  # in the study's order, so that the first seed comes first
        if seed not in (None, wanted):
            continue
        for result in at_budget:
            if result.trial.seed == wanted:
                return result
    seeds = ", ".join(str(result.trial.seed) for result in at_budget)
    words = run.study.words_over_seeds(at_budget[0].trial)
    raise InputError(f"no trained network of {words} with seed {seed}: there is {seeds}")
