"""Selection against HiGHS (scipy) and CBC (PuLP) with a gap of 0, by CPU time of one thread, in turn.

python -m benchmarks.select            every case, and what was proven
python -m benchmarks.select random     the cases whose name has this in it

HiGHS works in floating point: its answer is right where it is within the budgets and worth what ours is. Where it stops
at its time limit, the ratio is at most what is shown.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array

import bitplan
from benchmarks.rows import Row, table
from benchmarks.timing import cpu_seconds, in_turn
from bitplan.core.precision import Precision, parse_choices
from bitplan.core.records import Costs, Gains, Graph, Layer
from bitplan.models.zoo import load_model
from bitplan.selection.base import make_problem
from bitplan.selection.exact import exact_each
from bitplan.selection.problem import Integers, Problem, Selection

BUDGETS = (95, 90, 85, 80, 75, 70, 65, 60)
TARGET = 1.2  # of HiGHS's CPU time
MILLISECONDS = 3.0  # for eight budgets on ResNet-50
LIMIT = 5.0  # seconds that HiGHS and CBC are given, so that the whole ends in three minutes
SHORT = 0.5  # seconds; what takes less is solved thrice more, and the best counts
BITS = np.array([2, 3, 4, 8])


@dataclass(frozen=True)
class Case:
    """One or more problems that are asked for together."""

    name: str
    problems: list[Problem]


def main() -> None:
    """Print a table; with a word, of the cases whose name has it."""
    print(table(rows(sys.argv[1] if len(sys.argv) > 1 else "")))


def rows(wanted: str = "") -> list[Row]:
    """CPU time of one thread, ours and a peer in turn."""
    measured = []
    for case in cases():
        if wanted in case.name:
            measured += measure(case)
    return measured


def measure(case: Case) -> list[Row]:
    """Solve a case with all, in turn, and say what they found."""
    found: dict[str, Any] = {}

    def ours() -> None:
        found["ours"] = exact_each(case.problems)

    def theirs() -> None:
        found["HiGHS"] = [highs(problem) for problem in case.problems]

    ours()  # the first call imports
    contestants = {"ours": ours, "HiGHS": theirs}
    if len(case.problems) > 1:
        contestants["CBC"] = lambda: [cbc(problem) for problem in case.problems]
    taken = in_turn(contestants, rounds=1, clock=cpu_seconds)
    again = in_turn({"ours": ours}, rounds=3 if taken["ours"] < SHORT else 0, clock=cpu_seconds)
    best = 1e3 * min(taken["ours"], again.get("ours", taken["ours"]))
    note = f"{proof(found['ours'])}; HiGHS: {verdict(case, found['ours'], found['HiGHS'])}"
    made = [Row(case.name, best, 1e3 * taken["HiGHS"], "HiGHS, gap 0", "ms", TARGET, note=note)]
    if "CBC" in taken:
        made.append(Row(case.name, best, 1e3 * taken["CBC"], "CBC (PuLP), gap 0", "ms", TARGET))
    if case.name.startswith("resnet50"):
        made.append(Row(case.name, best, unit="ms", target=MILLISECONDS))
    return made


def proof(selections: list[Selection]) -> str:
    """What our answers are proven to be."""
    gaps = [selection.gap or 0 for selection in selections]
    return "proven best" if not any(gaps) else f"at most {max(gaps)} below the best"


def verdict(case: Case, ours: list[Selection], theirs: list[OptimizeResult]) -> str:
    """How HiGHS's answers compare."""
    said = []
    for problem, own, other in zip(case.problems, ours, theirs, strict=True):
        if other.x is None:
            said.append("nothing found")
            continue
        picks = other.x.reshape(problem.values.shape).argmax(axis=1)
        over = bool((spent(problem, picks) > problem.capacities).any())
        more = value(problem, picks) - value(problem, np.array(own.picks))
        ended = "" if other.status == 0 else " at its time limit"
        said.append(("over budget" if over else "the same" if not more else f"{more:+}") + ended)
    return ", ".join(f"{said.count(one)} × {one}" if len(said) > 1 else one for one in dict.fromkeys(said))


def value(problem: Problem, picks: Integers) -> int:
    """What the picks are worth."""
    return int(problem.values[np.arange(len(picks)), picks].sum())


def spent(problem: Problem, picks: Integers) -> Integers:
    """What the picks cost."""
    total: Integers = problem.costs[:, np.arange(len(picks)), picks].sum(axis=1)
    return total


def highs(problem: Problem) -> OptimizeResult:
    """scipy.optimize.milp with gap 0; budgets scaled to 1 and values to 10,000, which suits its tolerances."""
    groups, choices = problem.values.shape
    index = np.arange(groups * choices)
    each = csr_array((np.ones(len(index)), (index // choices, index)))
    scales = problem.capacities.astype(float)
    within = problem.costs.reshape(len(scales), -1) / scales[:, None]
    return milp(
        -problem.values.ravel() / max(float(problem.values.max()) / 10_000, 1.0),
        integrality=np.ones(len(index)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(each, 1, 1), LinearConstraint(within, -np.inf, 1.0)],
        options={"mip_rel_gap": 0.0, "time_limit": LIMIT},
    )


def cbc(problem: Problem) -> None:
    """PuLP with the CBC it ships, for one budget."""
    groups, choices = problem.values.shape
    model = pulp.LpProblem("plan", pulp.LpMaximize)
    chosen = [[model.add_variable(f"x{g}_{c}", cat="Binary") for c in range(choices)] for g in range(groups)]
    pairs = [(g, c) for g in range(groups) for c in range(choices)]
    model += pulp.lpSum(int(problem.values[g, c]) * chosen[g][c] for g, c in pairs)
    for row in chosen:
        model += pulp.lpSum(row) == 1
    model += pulp.lpSum(int(problem.costs[0, g, c]) * chosen[g][c] for g, c in pairs) <= int(problem.capacities[0])
    model.solve(pulp.PULP_CBC_CMD(msg=False, gapRel=0, timeLimit=LIMIT))


def cases() -> Iterator[Case]:
    """Networks at eight budgets; then one, two and three budgets at once on tables of several hundred layers."""
    for name in ("resnet50", "resnet101", "pspnet50", "bert-base"):
        yield network(name)
    yield ugly()
    for kind in TABLES:
        for budgets in (1, 2, 3):
            yield Case(f"{kind} 300 × 4, {told(budgets)}", [problem_of(kind, 300, 4, budgets)])


def told(budgets: int) -> str:
    """How many budgets, in words."""
    return "1 budget" if budgets == 1 else f"{budgets} budgets"


def network(name: str) -> Case:
    """A network with random gains at eight budgets."""
    model, example = load_model(name, weightless=True)
    graph = bitplan.trace(model, example, name=name)
    return eight(name, graph, bitplan.estimate("random", None, graph), bitplan.price("bmac", graph))


def ugly(layers: int = 500) -> Case:
    """Costs without a common divisor, gains without a pattern."""
    draw = random.Random(0)
    choices = parse_choices("w2a2,w3a3,w4a4,w8a8")
    names = [f"l{n}" for n in range(layers)]
    made = (Layer(name=name, kind="linear", macs=draw.randrange(1, 10**9), weights=1, in_features=1) for name in names)
    graph = Graph(model="ugly", layers=tuple(made))
    gains = {name: (0.0, *sorted(draw.random() for _ in range(3))) for name in names}
    costs = {name: tuple(sorted(draw.randrange(1, 10**9) for _ in range(4))) for name in names}
    return eight(
        "ugly 500 × 4", graph, Gains(method="random", choices=choices, rows=gains, graph=graph.id),
        Costs(name="measured", unit="ns", choices=choices, rows=costs, graph=graph.id),
    )  # fmt: skip


def eight(name: str, graph: Graph, gains: Gains, costs: Costs) -> Case:
    """Eight budgets; gains in the paper's 10,000 levels, which every solver can represent."""
    whole = sum(row[-1] for row in costs.rows.values())
    least = sum(min(row) for row in costs.rows.values())
    problem = make_problem(graph, gains, [costs], [whole], 10_000)
    capacities = [max(whole * percent // 100, least) for percent in BUDGETS]
    return Case(f"{name}, eight times 1 budget", [problem.within(np.array([capacity])) for capacity in capacities])


def problem_of(kind: str, layers: int, choices: int, budgets: int, share: float = 0.7) -> Problem:
    """A problem of a kind, at 70 % of all costs."""
    draw = np.random.default_rng(0)
    values, costs = TABLES[kind](draw, layers, choices, budgets)
    names = tuple(f"l{n}" for n in range(layers))
    precisions = tuple(Precision(weight_bits=int(bits), act_bits=int(bits)) for bits in BITS[:choices])
    capacities = (costs[:, :, -1].sum(axis=1) * share).astype(np.int64)
    return Problem(names, precisions, values, costs, capacities)


Table = tuple[Integers, Integers]


def _random(draw: np.random.Generator, layers: int, choices: int, budgets: int) -> Table:
    values = np.sort(draw.integers(0, 10_000, (layers, choices)), axis=1)
    return values, np.sort(draw.integers(1, 10**9, (budgets, layers, choices)), axis=2)


def _hawq(draw: np.random.Generator, layers: int, choices: int, budgets: int) -> Table:
    """Gains over ten powers of ten that flatten out with bits; costs in proportion to bits."""
    bits = BITS[:choices]
    gains = 10 ** draw.uniform(0, 10, (layers, 1)) * (1 - 4.0 ** -(bits - 2.0))
    return (gains * 1e5).astype(np.int64), (10 ** draw.uniform(6, 9, (budgets, layers, 1))).astype(np.int64) * bits


TABLES: dict[str, Callable[[np.random.Generator, int, int, int], Table]] = {"random": _random, "hawq": _hawq}


if __name__ == "__main__":
    main()
