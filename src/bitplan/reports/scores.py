"""The scores of a run's trials: the frontier, and the method to take at a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitplan.core.budget import Budget
from bitplan.core.errors import InputError, UnknownName
from bitplan.core.records import Plan
from bitplan.core.trials import Result
from bitplan.reports.subject import Subject, run_subject
from bitplan.stats.compare import ALPHA, CORRECTION, Cell, Comparison, belongs, cells, compare, metric_of, warning
from bitplan.stats.ranksum import name_test
from bitplan.store.run_folder import RunFolder

Tests = dict[str, Comparison]
"""The title of a rival → its comparison with the best method."""


@dataclass(frozen=True)
class Scores:
    """Cells of the methods and of the references, every comparison, and which way the score goes."""

    methods: tuple[Cell, ...]
    references: tuple[Cell, ...]
    comparisons: tuple[Comparison, ...]
    higher_is_better: bool
    metric: str
    planned: int
    done: int
    single_seed: bool

    def at(self, budget: str) -> list[Cell]:
        """Return the methods that have scores at a budget, best mean first; equal ones in the study's order."""
        sign = -1 if self.higher_is_better else 1
        return sorted((cell for cell in self.methods if cell.budget == budget), key=lambda cell: sign * cell.mean)

    def reference(self, title: str) -> Cell | None:
        """Return a reference by its title, such as float or w4a4."""
        return next((cell for cell in self.references if cell.title == title), None)

    def between(self, first: str, second: str, budget: str) -> Comparison | None:
        """Return the comparison of two methods at a budget, in either order."""
        return next(
            (one for one in self.comparisons if one.budget == budget and {one.first, one.second} == {first, second}),
            None,
        )


@dataclass(frozen=True)
class Answer:
    """The method to take at a budget, and how sure that is, in sentences."""

    title: str
    budget: str
    cell: Cell | None
    sentences: tuple[str, ...]


def gather(subject: Subject, plans: dict[str, Plan]) -> Scores | None:
    """Return the scores of a run; None for a plan without a study."""
    study = subject.study
    if study is None:
        return None
    found = cells(study, subject.results, plans)
    known = [result for result in subject.results if belongs(study, result.trial)]
    return Scores(
        methods=tuple(cell for cell in found if cell.budget),
        references=tuple(cell for cell in found if not cell.budget),
        comparisons=compare(study, subject.results, plans, spends=subject.spends),
        higher_is_better=all(result.higher_is_better for result in known),
        metric=metric_of(study, known),
        planned=len(study.methods) * len(study.budgets) * len(study.seeds) * max(1, len(study.start.seeds)),
        done=sum(len(cell.scores) for cell in found if cell.budget),
        single_seed=all(len(cell.scores) == 1 for cell in found if cell.budget),
    )


def answer(subject: Subject, scores: Scores | None) -> Answer:
    """Return the best method by mean score at the chosen budget, with ties; without scores the first method.

    A method that saw test scores to choose is left out, unless there is no other.
    """
    budget, first = subject.budget, subject.candidates[0].title
    titles = {candidate.title for candidate in subject.candidates}
    if scores is None:
        return Answer(first, budget, None, ("No network was trained for this page: the gains are estimates.",))
    ranked = [cell for cell in scores.at(budget) if cell.title in titles]
    if not ranked:
        return Answer(first, budget, None, (_explain_missing(budget, scores),))
    oracles = [cell.title for cell in ranked if cell.title in subject.spends and subject.spends[cell.title].tested]
    best, *rivals = [cell for cell in ranked if cell.title not in oracles] or ranked
    left_out = [f"Without {_join(oracles)}, which saw test scores."] if oracles and best.title not in oracles else []
    return Answer(best.title, budget, best, (*left_out, *_describe_lead(best, rivals, scores)))


def _explain_missing(budget: str, scores: Scores) -> str:
    if not scores.methods:
        return "No trial is done yet, so no method is proven better: this is the plan of the study's first method."
    return f"No trial is done at {budget}, so no method is proven better there: this is the plan of the first method."


def _describe_lead(best: Cell, rivals: Sequence[Cell], scores: Scores) -> list[str]:
    """Return sentences about the best method's lead over each group of rivals."""
    if not rivals:
        return ["Only one method has scores at this budget, so there is nothing to compare it with."]
    tests: Tests = {}
    for rival in rivals:
        test = scores.between(best.title, rival.title, best.budget)
        if test is not None:
            tests[rival.title] = test
    shared = [title for title, test in tests.items() if test.shared]
    unequal = {title: test for title, test in tests.items() if test.unequal and not test.shared}
    apart = {title: test for title, test in tests.items() if not (test.shared or test.unequal)}
    level = [title for title, test in apart.items() if test.difference == 0]
    sentences = []
    if shared:
        sentences.append(f"{_join(shared)} chose the very same precisions.")
    if level:
        sentences.append(f"{_join(level)} reached exactly the same mean.")
    if unequal:
        reasons = "; ".join(dict.fromkeys(test.unequal for test in unequal.values()))
        sentences.append(f"Not tested against {_join(list(unequal))}, which are no equals: {reasons}.")
    return sentences + _describe_leads(best, apart)


def _describe_leads(best: Cell, apart: Tests) -> list[str]:
    """Return sentences on the significant leads, those significant only without correction, and the others."""
    # The best leads in every comparison, so a significant one is in its favour, whichever method is named first.
    corrected = {title: test for title, test in apart.items() if test.significant(corrected=True)}
    alone = {title: test for title, test in apart.items() if test.significant() and title not in corrected}
    undecided = {title: test for title, test in apart.items() if not test.significant()}
    sentences = []
    if corrected:
        sentences.append(f"Significantly better than {_join_with_p(corrected)} by the {_name_test(corrected)}.")
    if alone:
        sentences.append(
            f"Better than {_join_with_p(alone)} by the {_name_test(alone)}, not after {CORRECTION} over budgets."
        )
    if undecided:
        sentences.append(_explain_undecided(best, undecided))
    return sentences


def _name_test(tests: Tests) -> str:
    return name_test(test.exact for test in tests.values())


def _explain_undecided(best: Cell, rivals: Tests) -> str:
    """Return why a lead is not significant: too few seeds, or too small."""
    if len(best.scores) == 1:
        return "There is a single seed, so this order may be chance."
    if all(test.floor > ALPHA for test in rivals.values()):
        reason = warning(list(rivals.values()))
        return f"The lead over {_join(list(rivals))} is not proven: {reason}."
    return f"Not distinguishable from {_join_with_p(rivals)}."


def _join(titles: Sequence[str]) -> str:
    return titles[0] if len(titles) == 1 else f"{', '.join(titles[:-1])} and {titles[-1]}"


def _join_with_p(rivals: Tests) -> str:
    return _join([f"{title} (p = {test.p:.2g})" for title, test in rivals.items()])


def choose(
    run: RunFolder, *, method: str | None = None, budget: str | None = None, seed: int | None = None
) -> Result:  # fmt: skip
    """Return a result of the run: of the page's method at the page's budget, with the first seed, unless given.

    `method` is a title; a reference, such as w4a4 (all layers at it), has no budget.
    """
    study, done = run.study, [result for result in run.results if result.training]
    if not done:
        raise InputError(f"{run.path} has no trained network yet: go on with `bitplan sweep`")
    titles = list(dict.fromkeys(study.title_of(result.trial) for result in done))
    if method is not None and method not in titles:
        raise UnknownName("method of this run", method, titles)
    if method is None or any(result.trial.budgets for result in _results_of(run, done, method)):
        subject = run_subject(run, None if budget is None else str(Budget.parse(budget)))
        budget = subject.budget
        method = method or answer(subject, gather(subject, run.plans)).title
    elif budget is not None:
        raise InputError(f"{method} has no budget: leave out --budget {budget}")
    return _pick_result(run, _results_of(run, done, method), method, budget, seed)


def _results_of(run: RunFolder, results: Sequence[Result], title: str) -> list[Result]:
    return [result for result in results if run.study.title_of(result.trial) == title]


def _pick_result(run: RunFolder, own: Sequence[Result], method: str, budget: str | None, seed: int | None) -> Result:
    """Return a method's result at this budget with this seed, or with the first seed that is there."""
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
