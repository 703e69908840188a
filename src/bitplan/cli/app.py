"""The verbs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bitplan.cli import exporting
from bitplan.cli.options import (
    Budgets,
    Choices,
    Cost,
    Device,
    Files,
    First,
    Fix,
    Free,
    Gain,
    Input,
    Json,
    Last,
    Levels,
    Link,
    Narrow,
    Option,
    Output,
    Seed,
    Selector,
    Target,
    Threads,
)
from bitplan.cli.steps import emit, estimated, graph_and_gains, model_of, only, priced
from bitplan.core.errors import FileError, InputError

app = typer.Typer(
    name="bitplan",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="How many bits each layer of a neural network should get, under a budget.",
)

TWO = "w2a2,w4a4"


def _version(wanted: bool) -> None:
    if wanted:
        from bitplan import __version__

        print(f"bitplan {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def plan(
    target: Target,
    budget: Budgets,
    gain: Gain = "eagl",
    cost: Cost = ["bmac"],
    choices: Choices = TWO,
    option: Option = [],
    selector: Selector = None,
    levels: Levels = None,
    seed: Seed = 0,
    input: Input = None,
    fix: Fix = [],
    free: Free = [],
    link: Link = [],
    first: First = "w8a8",
    last: Last = "w8a8",
    narrow: Narrow = 128,
    threads: Threads = None,
    device: Device = "cpu",
    explain: Annotated[bool, typer.Option(help="Say for each layer its gain, its cost and the reason.")] = False,
    output: Output = None,
    json: Json = False,
) -> None:
    """Choose a precision for every layer: trace, estimate, price and select in one go."""
    from bitplan.cli.inputs import RuleOptions
    from bitplan.plan.base import select as select_plan

    graph, gains = graph_and_gains(
        target, gain, choices, option, seed, input, RuleOptions(first, last, narrow, fix, free, link), threads, device
    )
    costs = priced(graph, cost, budget, choices)
    chosen = select_plan(graph, gains, costs, budget=budget, selector=selector, levels=levels)
    if not emit(chosen, output, json):
        from bitplan.cli.show import show_plan

        show_plan(chosen, graph, gains, costs, explain)


@app.command()
def frontier(
    target: Target,
    at: Annotated[str, typer.Option(help="Budgets to show, with commas.")] = "95%,90%,85%,80%,75%,70%,65%,60%",
    gain: Gain = "eagl",
    cost: Annotated[str, typer.Option(help="A cost by name, or a table.")] = "bmac",
    choices: Choices = TWO,
    option: Option = [],
    seed: Seed = 0,
    input: Input = None,
    fix: Fix = [],
    free: Free = [],
    link: Link = [],
    first: First = "w8a8",
    last: Last = "w8a8",
    narrow: Narrow = 128,
    json: Json = False,
) -> None:
    """Show the best plans for many budgets, all found in one pass."""
    from bitplan.cli.inputs import RuleOptions
    from bitplan.cli.show import show_frontier
    from bitplan.costs.base import price as price_graph
    from bitplan.plan.frontier import select_all

    rules = RuleOptions(first, last, narrow, fix, free, link)
    graph, gains = graph_and_gains(target, gain, choices, option, seed, input, rules, None, "cpu")
    found = select_all(graph, gains, price_graph(cost, graph, choices))
    show_frontier(found, [budget.strip() for budget in at.split(",")], as_json=json)


@app.command()
def trace(
    target: Target,
    input: Input = None,
    fix: Fix = [],
    free: Free = [],
    link: Link = [],
    first: First = "w8a8",
    last: Last = "w8a8",
    narrow: Narrow = 128,
    output: Output = None,
    json: Json = False,
) -> None:
    """Find a model's layers, their links and what is fixed: model → graph."""
    from bitplan.cli.inputs import RuleOptions, read_target

    graph = read_target(target, input, RuleOptions(first, last, narrow, fix, free, link)).graph
    if not emit(graph, output, json):
        from bitplan.cli.show import show_graph

        show_graph(graph)


@app.command()
def price(
    cost: Annotated[str, typer.Argument(help="A cost by name, or a table (.csv, .json).")],
    graph: Annotated[Path, typer.Argument(help="A graph file.")],
    choices: Choices = TWO,
    output: Output = None,
    json: Json = False,
) -> None:
    """Price every group at every choice: graph → costs."""
    from bitplan.core.records import Graph
    from bitplan.core.store import load
    from bitplan.costs.base import price as price_graph

    costs = price_graph(cost, load(graph, Graph), choices)
    if not emit(costs, output, json):
        from bitplan.cli.show import show_rows

        show_rows(costs)


@app.command()
def estimate(
    method: Annotated[str, typer.Argument(help="A method by name, or a table of gains (.csv, .json).")],
    graph: Annotated[Path, typer.Argument(help="A graph file.")],
    model: Annotated[str | None, typer.Option(help="The model, for methods that look at it.")] = None,
    choices: Choices = TWO,
    option: Option = [],
    seed: Seed = 0,
    threads: Threads = None,
    device: Device = "cpu",
    output: Output = None,
    json: Json = False,
) -> None:
    """Estimate what each group gains from more bits: model + graph → gains."""
    from bitplan.core.records import Graph
    from bitplan.core.store import load

    loaded = load(graph, Graph)
    gains = estimated(method, model_of(model, device), loaded, choices, option, seed, threads)
    if not emit(gains, output, json):
        from bitplan.cli.show import show_rows

        show_rows(gains)


@app.command()
def select(
    files: Files,
    budget: Budgets,
    selector: Selector = None,
    levels: Levels = None,
    explain: Annotated[bool, typer.Option(help="Say for each layer its gain, its cost and the reason.")] = False,
    output: Output = None,
    json: Json = False,
) -> None:
    """Choose under a budget: graph + gains + costs → plan. Files in any order."""
    from bitplan.core.record import Record
    from bitplan.core.records import Costs, Gains, Graph
    from bitplan.core.store import load
    from bitplan.plan.base import select as select_plan

    records = [load(file, Record) for file in files]
    graph, gains = only(records, Graph), only(records, Gains)
    costs = [record for record in records if isinstance(record, Costs)]
    if not costs:
        raise InputError("no costs among the files: make some with `bitplan price`")
    chosen = select_plan(graph, gains, costs, budget=budget, selector=selector, levels=levels)
    if not emit(chosen, output, json):
        from bitplan.cli.show import show_plan

        show_plan(chosen, graph, gains, costs, explain)


@app.command()
def diff(first: Path, second: Path, json: Json = False) -> None:
    """Show which layers of two plans differ."""
    from bitplan.cli.show import show_difference
    from bitplan.core.records import Plan
    from bitplan.core.store import load

    show_difference(load(first, Plan), load(second, Plan), as_json=json)


@app.command(name="list")
def list_names(
    what: Annotated[str, typer.Argument(help="gains, costs, selectors, models, tasks, exporters or engines.")],
    json: Json = False,
) -> None:
    """List what can be exchanged, by name."""
    from bitplan.cli.show import show_names
    from bitplan.core.errors import UnknownName
    from bitplan.core.registry import REGISTRIES

    if what not in REGISTRIES:
        raise UnknownName("list", what, REGISTRIES)
    if what == "models":
        from bitplan.models.zoo import model_names

        show_names({name: "" for name in model_names()}, as_json=json)
        return
    registry = REGISTRIES[what]
    show_names({name: (registry.get(name).__doc__ or "").split("\n")[0] for name in registry}, as_json=json)


@app.command()
def validate(files: Files) -> None:
    """Check record files: readable, complete, of a known format."""
    from bitplan.core.record import Record
    from bitplan.core.store import load

    bad = 0
    for file in files:
        try:
            record = load(file, Record)
            print(f"{file}: {record.kind()} {record.id}, format {record.format}, valid")
        except FileError as error:
            bad += 1
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    if bad:
        raise typer.Exit(2)


@app.command()
def demo() -> None:
    """Plan ResNet-50 at the paper's eight budgets, from nothing but its structure."""
    from bitplan.cli.demo import run

    run()


exporting.add(app)
