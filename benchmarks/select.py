"""Selection for eight budgets against HiGHS (scipy) with a gap of 0, by CPU time of one thread, interleaved.

HiGHS works in floating point: its plan is right if it is within the budget and worth as much as ours. If it stops at
its time limit, the ratio is at most the one shown.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array

import bitplan
from benchmarks.rows import Row
from benchmarks.timing import cpu_seconds, in_turn
from bitplan.core.precision import parse_choices
from bitplan.core.records import Costs, Gains, Graph, Layer
from bitplan.models.zoo import load_model
from bitplan.selection.base import make_problem
from bitplan.selection.exact import exact_each
from bitplan.selection.problem import Problem, Selection

BUDGETS = (95, 90, 85, 80, 75, 70, 65, 60)
TARGET = 1.2  # of HiGHS's CPU time
MILLISECONDS = 3.0  # for eight budgets on ResNet-50
TIME_LIMIT = 5.0  # seconds of HiGHS for one budget


def rows() -> list[Row]:
    """Return the CPU time of our selection beside that of HiGHS, for every case."""
    return [row for name, problems in cases() for row in measure(name, problems)]


def measure(name: str, problems: list[Problem]) -> list[Row]:
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
    title = f"{name}, eight times 1 budget"
    made = [Row(title, best, 1e3 * peer, "HiGHS, gap 0", "ms", TARGET, note=note)]
    return [*made, Row(title, best, unit="ms", target=MILLISECONDS)] if name == "resnet50" else made


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
    """Yield networks with random gains, then costs without a common divisor."""
    for name in ("resnet50", "resnet101", "bert-base"):
        model, example = load_model(name, weightless=True)
        graph = bitplan.trace(model, example, name=name)
        gains = bitplan.estimate("random", None, graph)
        yield name, at_eight_budgets(graph, gains, bitplan.price("bmac", graph))
    yield "ugly 500 × 4", at_eight_budgets(*ugly_tables(500))


def ugly_tables(count: int) -> tuple[Graph, Gains, Costs]:
    """Return layers whose costs have no common divisor and whose gains have no pattern."""
    draw = random.Random(0)
    choices = parse_choices("w2a2,w3a3,w4a4,w8a8")
    names = [f"l{n}" for n in range(count)]
    fields = {"kind": "linear", "weights": 1, "in_features": 1}
    layers = tuple(Layer(name=name, macs=draw.randrange(1, 10**9), **fields) for name in names)
    graph = Graph(model="ugly", layers=layers)
    gains = {name: (0.0, *sorted(draw.random() for _ in range(3))) for name in names}
    costs = {name: tuple(sorted(draw.randrange(1, 10**9) for _ in range(4))) for name in names}
    return (
        graph,
        Gains(method="random", choices=choices, rows=gains, graph=graph.id),
        Costs(name="measured", unit="ns", choices=choices, rows=costs, graph=graph.id),
    )


def at_eight_budgets(graph: Graph, gains: Gains, costs: Costs) -> list[Problem]:
    """Return one problem per budget; gains have the paper's 10,000 levels, which every solver can represent."""
    whole = sum(row[-1] for row in costs.rows.values())
    least = sum(min(row) for row in costs.rows.values())
    problem = make_problem(graph, gains, [costs], [whole], 10_000)
    return [problem.within(np.array([max(whole * percent // 100, least)])) for percent in BUDGETS]
