"""Networks of 20,000 layers: what plans, frontiers, records and the page of a plan take in time and memory.

python -m benchmarks.large        Each case in a process of its own; memory is the most that the process ever had.

The issue's starting point was 29 s and 1.3 GB for two choices, and no end in minutes for three with links.
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import bitplan
from benchmarks.rows import Row, table
from bitplan.core.precision import parse_choices
from bitplan.core.records import Gains, Graph, Layer, Link
from bitplan.reports.document import report_plan
from bitplan.selection.frontier import select_all

LAYERS = 20_000
SECONDS, MEMORY = 10.0, 500.0  # the most that a selection may take, and MB
CASES = {
    "two choices": ("w2a2,w4a4", False),
    "three choices, every layer linked with its neighbour": ("w2a2,w3a3,w4a4", True),
}


def rows() -> list[Row]:
    """Seconds of the processor and MB of each case."""
    made = []
    for name, (choices, linked) in CASES.items():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            seconds, gaps, memory = alone.submit(measured, choices, linked).result()
        title = f"{LAYERS:,} layers, {name}"
        for what, taken in seconds.items():
            note = f"gap {gaps[what]:.1g} of the gain" if what in gaps else ""
            made.append(Row(f"{title}: {what}", taken, unit="CPU s", target=SECONDS, note=note))
        made.append(Row(f"{title}: all of this", memory, unit="MB", target=MEMORY))
    return made


def measured(choices: str, linked: bool) -> tuple[dict[str, float], dict[str, float], float]:
    """Seconds by what was done, proven gaps relative to the gain, and the most memory; nothing else was imported."""
    graph, seconds, gaps = network(linked), {}, {}
    clock = time.process_time
    start = clock()
    gains = drawn(graph, choices)
    bits, memory = (bitplan.price(name, graph, choices=choices) for name in ("bmac", "memory"))
    seconds["gains and costs"] = clock() - start
    for what, budgets in (("one budget", ["70%"]), ("two budgets", ["70%", "memory=70%"])):
        start = clock()
        plan = bitplan.select(graph, gains, [bits, memory], budget=budgets)
        seconds[what] = clock() - start
        gaps[what] = (plan.gap or 0.0) / plan.gain
    start = clock()
    select_all(graph, gains, bits)
    seconds["the frontier"] = clock() - start
    with tempfile.TemporaryDirectory() as folder:
        start = clock()
        for number, record in enumerate((graph, gains, bits, plan)):
            bitplan.save(record, Path(folder) / f"{number}.json")
            bitplan.load(Path(folder) / f"{number}.json")
        seconds["four records written and read"] = clock() - start
        start = clock()
        report_plan(plan, graph, gains, (bits, memory), Path(folder) / "plan.html", "bitplan plan")
        seconds["the page of a plan"] = clock() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return seconds, gaps, peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def network(linked: bool) -> Graph:
    """Layers of random sizes."""
    draw = random.Random(0)
    layers = tuple(
        Layer(
            name=f"layer{n}", kind="linear", macs=draw.randrange(1, 10**9), weights=draw.randrange(1, 10**6),
            in_features=1_024,
        )
        for n in range(LAYERS)
    )  # fmt: skip
    pairs = range(0, LAYERS - 1, 2) if linked else ()
    links = tuple(Link(layers=(layers[n].name, layers[n + 1].name), through=f"tensor{n}") for n in pairs)
    return Graph(model="large", layers=layers, links=links)


def drawn(graph: Graph, choices: str) -> Gains:
    """Random gains that rise with bits."""
    draw, parsed = random.Random(1), parse_choices(choices)
    rows = {group.name: (0.0, *sorted(draw.random() for _ in parsed[1:])) for group in graph.selectable}
    return Gains(method="random", choices=parsed, rows=rows, graph=graph.id)


def main() -> None:
    """Print the table."""
    print(table(rows()))


if __name__ == "__main__":
    main()
