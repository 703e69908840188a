"""Selection at eight budgets: bitplan against HiGHS (scipy) and CBC (PuLP), whose optimality is checked as well.

python -m benchmarks.select
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pulp
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

import bitplan
from benchmarks.timing import in_turn
from bitplan.core.precision import parse_choices
from bitplan.core.records import Costs, Gains, Graph, Layer
from bitplan.models.zoo import load_model
from bitplan.plan.base import make_problem
from bitplan.plan.exact import exact
from bitplan.plan.problem import Problem

BUDGETS = (95, 90, 85, 80, 75, 70, 65, 60)
Solver = Callable[[Problem], tuple[int, ...]]


def main() -> None:
    """Print one table per network."""
    for network in networks():
        compare(*network)


def compare(name: str, graph: Graph, gains: Gains, costs: Costs) -> None:
    """Solve eight budgets with each solver, in turn."""
    problems = problems_of(graph, gains, costs)
    best = [value(problem, exact(problem).picks) for problem in problems]
    solvers: dict[str, Solver] = {
        "bitplan": lambda problem: exact(problem).picks,
        "HiGHS (scipy), gap 0": lambda problem: highs(problem, 0.0),
        "HiGHS (scipy), its default": lambda problem: highs(problem, None),
        "CBC (PuLP), gap 0": cbc,
    }
    runs = {label: lambda solve=solve: [solve(problem) for problem in problems] for label, solve in solvers.items()}
    runs["bitplan, whole frontier"] = lambda: [bitplan.select_all(graph, gains, costs)]
    seconds = in_turn(runs, rounds=2 if len(graph.layers) > 200 else 3)
    print(f"\n{name}: {len(graph.selectable)} groups, {len(gains.choices)} choices, eight budgets")
    print(f"  {'solver':28} {'seconds':>9} {'× bitplan':>10}  best found")
    for label, taken in seconds.items():
        found = "every point" if label not in solvers else optimal(problems, solvers[label], best)
        print(f"  {label:28} {taken:9.4f} {taken / seconds['bitplan']:10.1f}  {found}")


def networks() -> list[tuple[str, Graph, Gains, Costs]]:
    """ResNet-50, ResNet-101 and BERT with random gains; 500 layers × 4 precisions with ugly costs."""
    made = []
    for name in ("resnet50", "resnet101", "bert-base"):
        model, example = load_model(name, weightless=True)
        graph = bitplan.trace(model, example, name=name)
        made.append((name, graph, bitplan.estimate("random", None, graph), bitplan.price("bmac", graph)))
    return [*made, ugly()]


def ugly(layers: int = 500) -> tuple[str, Graph, Gains, Costs]:
    """Costs without a common divisor, gains without a pattern."""
    draw = random.Random(0)
    choices = parse_choices("w2a2,w3a3,w4a4,w8a8")
    graph = Graph(
        model="ugly",
        layers=tuple(
            Layer(name=f"l{n}", kind="linear", macs=draw.randrange(1, 10**9), weights=1, in_features=1)
            for n in range(layers)
        ),
    )
    rows = {f"l{n}": (0.0, *sorted(draw.random() for _ in range(3))) for n in range(layers)}
    gains = Gains(method="random", choices=choices, rows=rows, graph=graph.id)
    costs = {f"l{n}": tuple(sorted(draw.randrange(1, 10**9) for _ in range(4))) for n in range(layers)}
    return "ugly", graph, gains, Costs(name="measured", unit="ns", choices=choices, rows=costs, graph=graph.id)


def problems_of(graph: Graph, gains: Gains, costs: Costs) -> list[Problem]:
    """One problem per budget; gains in the paper's 10,000 levels, which every solver can represent."""
    whole = sum(row[-1] for row in costs.rows.values())
    least = sum(min(row) for row in costs.rows.values())
    capacities = [max(whole * percent // 100, least) for percent in BUDGETS]
    return [make_problem(graph, gains, [costs], [capacity], 10_000) for capacity in capacities]


def value(problem: Problem, picks: tuple[int, ...]) -> int:
    """What the picks are worth; −1 if they are over budget."""
    groups = range(len(picks))
    over = problem.costs[0, groups, picks].sum() > problem.capacities[0]
    return -1 if over else int(problem.values[groups, picks].sum())


def optimal(problems: list[Problem], solve: Solver, best: list[int]) -> str:
    """How many budgets a solver got the best value for."""
    right = sum(value(problem, solve(problem)) == top for problem, top in zip(problems, best, strict=True))
    return f"{right} of {len(problems)}"


def highs(problem: Problem, gap: float | None) -> tuple[int, ...]:
    """scipy.optimize.milp, rows scaled."""
    groups, choices = problem.values.shape
    index = np.arange(groups * choices)
    each = csr_array((np.ones(len(index)), (index // choices, index)))
    scale = float(problem.capacities[0])
    found = milp(
        -problem.values.ravel().astype(float),
        integrality=np.ones(len(index)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(each, 1, 1),
            LinearConstraint(problem.costs[0].reshape(1, -1) / scale, -np.inf, 1.0),
        ],
        options={} if gap is None else {"mip_rel_gap": gap},
    )
    return tuple(int(pick) for pick in found.x.reshape(groups, choices).argmax(axis=1))


def cbc(problem: Problem) -> tuple[int, ...]:
    """PuLP with the CBC it ships."""
    groups, choices = problem.values.shape
    model = pulp.LpProblem("plan", pulp.LpMaximize)
    chosen = [[model.add_variable(f"x{g}_{c}", cat="Binary") for c in range(choices)] for g in range(groups)]
    pairs = [(g, c) for g in range(groups) for c in range(choices)]
    model += pulp.lpSum(int(problem.values[g, c]) * chosen[g][c] for g, c in pairs)
    for row in chosen:
        model += pulp.lpSum(row) == 1
    model += pulp.lpSum(int(problem.costs[0, g, c]) * chosen[g][c] for g, c in pairs) <= int(problem.capacities[0])
    model.solve(pulp.PULP_CBC_CMD(msg=False, gapRel=0))
    return tuple(max(range(choices), key=lambda c: row[c].value() or 0) for row in chosen)


if __name__ == "__main__":
    main()
