"""`bitplan demo`: the paper's budgets on ResNet-50, with the methods that need nothing but its structure."""

from __future__ import annotations

import time

from bitplan.cli.show import console, headline, table
from bitplan.costs.base import price
from bitplan.costs.totals import total
from bitplan.gains.base import estimate
from bitplan.plan.base import select
from bitplan.plan.frontier import select_all

BUDGETS = ("95%", "90%", "85%", "80%", "75%", "70%", "65%", "60%")
METHODS = ("uniform", "first_to_last", "last_to_first")


def run() -> None:
    """Trace, price, estimate and select; then show the table."""
    from bitplan.graph.trace import trace
    from bitplan.models.zoo import load_model

    out = console()
    model, example = load_model("resnet50", weightless=True)
    graph = trace(model, example, name="resnet50")
    out.print(headline(graph))
    cost = price("bmac", graph)
    rows = table("budget", *(f">{column}" for method in METHODS for column in (f"{method}: 4-bit", "GBOPs", "smaller")))
    gains = {method: estimate(method, None, graph) for method in METHODS}
    start = time.perf_counter()
    frontier = select_all(graph, gains["uniform"], cost)
    plans = {("uniform", budget): frontier.plan(budget) for budget in BUDGETS}
    for method in METHODS[1:]:
        plans |= {(method, budget): select(graph, gains[method], cost, budget=budget) for budget in BUDGETS}
    seconds = time.perf_counter() - start
    for budget in BUDGETS:
        cells: list[str] = []
        for method in METHODS:
            chosen = plans[method, budget]
            high = sum(chosen.precisions[group.name] == cost.choices[-1] for group in graph.selectable)
            figures = total(chosen, graph)
            cells += [str(high), f"{figures.bops_without_ends / 1e9:.1f}", f"{figures.compression:.2f}×"]
        rows.add_row(budget, *cells)
    out.print(rows)
    out.print(
        f"\n{len(plans)} plans selected in {1000 * seconds:.0f} ms (the paper's solver: 2.3 s for one). GBOPs without "
        "the first and last layer; at 65% the paper reports 34 GBOPs and 10.31×.\nNext:"
    )
    out.print("  bitplan plan resnet50 --gain uniform --budget 70% --explain", style="bold")
