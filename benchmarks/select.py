"""Selection for eight budgets against HiGHS (scipy) with a gap of 0, by CPU time of one thread, interleaved.

HiGHS works in floating point: its plan is right if it is within the budget and worth as much as ours. If it stops at
its time limit, the ratio is at most the one shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array

import bitplan
from benchmarks.rows import Row
from benchmarks.timing import cpu_seconds, in_turn
from bitplan.core.precision import parse_choices
from bitplan.models.zoo import load_model
from bitplan.selection.base import make_problem
from bitplan.selection.exact import exact_each
from bitplan.selection.problem import Problem, Selection

BUDGETS = (95, 90, 85, 80, 75, 70, 65, 60)
TARGET = 1.2  # of HiGHS's CPU time
TIME_LIMIT = 5.0  # seconds of HiGHS for one budget


def rows() -> list[Row]:
    """Return the CPU time of our selection beside that of HiGHS, for every case."""
    return [measure(name, problems) for name, problems in cases()]


def measure(name: str, problems: list[Problem]) -> Row:
    """Solve all problems of a case with both solvers and compare their plans."""
    plans: dict[str, Any] = {}

    def ours() -> None:
        plans["ours"] = exact_each(problems)

    def theirs() -> None:
        plans["HiGHS"] = [solve_with_highs(problem) for problem in problems]

    ours()  # the first call imports and compiles
    peer = in_turn({"HiGHS": theirs}, rounds=1, clock=cpu_seconds)["HiGHS"]
    best = 1e3 * in_turn({"ours": ours}, rounds=4, clock=cpu_seconds)["ours"]
    gap = max(selection.gap or 0 for selection in plans["ours"])
    proof = f"at most {gap} below the best" if gap else "proven best"
    note = f"{proof}; HiGHS: {compare(problems, plans['ours'], plans['HiGHS'])}"
    return Row(f"{name}, eight times 1 budget", best, 1e3 * peer, "HiGHS, gap 0", "ms", TARGET, note=note)


def compare(problems: list[Problem], ours: list[Selection], theirs: list[OptimizeResult]) -> str:
    """Return how often the plan of HiGHS is worth the same, more or less, or is over the budget."""
    verdicts = []
    for problem, own, other in zip(problems, ours, theirs, strict=True):
        if other.x is None:
            verdicts.append("nothing found")
            continue
        layers = np.arange(len(own.picks))
        picks = other.x.reshape(problem.values.shape).argmax(axis=1)
        is_over = bool((problem.costs[:, layers, picks].sum(axis=1) > problem.capacities).any())
        more = int(problem.values[layers, picks].sum() - problem.values[layers, list(own.picks)].sum())
        verdicts.append("over budget" if is_over else f"{more:+}" if more else "the same")
    return ", ".join(f"{verdicts.count(verdict)} × {verdict}" for verdict in dict.fromkeys(verdicts))


def solve_with_highs(problem: Problem) -> OptimizeResult:
    """Solve one problem by scipy.optimize.milp; budgets are scaled to 1 and values to 10,000 for its tolerances."""
    groups, choices = problem.values.shape
    index = np.arange(groups * choices)
    one_each = csr_array((np.ones(len(index)), (index // choices, index)))
    scales = problem.capacities.astype(float)
    shares = problem.costs.reshape(len(scales), -1) / scales[:, None]
    return milp(
        -problem.values.ravel() / max(float(problem.values.max()) / 10_000, 1.0),
        integrality=np.ones(len(index)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(shares, -np.inf, 1.0)],
        options={"mip_rel_gap": 0.0, "time_limit": TIME_LIMIT},
    )


def cases() -> Iterator[tuple[str, list[Problem]]]:
    """Yield networks with random gains, then tables without any pattern, each at eight budgets."""
    for name in ("resnet50", "resnet101", "bert-base"):
        model, example = load_model(name, weightless=True)
        graph = bitplan.trace(model, example, name=name)
        costs, gains = bitplan.price("bmac", graph), bitplan.estimate("random", None, graph)
        whole = sum(row[-1] for row in costs.rows.values())
        least = sum(min(row) for row in costs.rows.values())
        problem = make_problem(graph, gains, [costs], [whole], 10_000)  # levels, as in the paper
        yield name, [problem.within(np.array([max(whole * percent // 100, least)])) for percent in BUDGETS]
    draw, layers = np.random.default_rng(0), 500
    values = np.sort(draw.integers(0, 10_000, (layers, 4)), axis=1)
    prices = np.sort(draw.integers(1, 10**9, (1, layers, 4)), axis=2)  # no common divisor
    names = tuple(f"l{number}" for number in range(layers))
    whole = prices[:, :, -1].sum(axis=1)
    ugly = Problem(names, parse_choices("w2a2,w3a3,w4a4,w8a8"), values, prices, whole)
    yield "ugly 500 × 4", [ugly.within(whole * percent // 100) for percent in BUDGETS]
