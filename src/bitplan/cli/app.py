"""The verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitplan.cli import ceilings, datasets, exporting, inspecting, measuring, reporting, studies, tabling, training
from bitplan.cli.inputs import runs_network, typed
from bitplan.cli.options import (
    Budgets,
    BudgetsOfSearches,
    Choices,
    Cost,
    Data,
    Device,
    EngineName,
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
    QuantizerName,
    RecipeFile,
    Seed,
    Selector,
    Set,
    Store,
    Target,
    TaskName,
    TaskOption,
    Teacher,
    TeacherWeights,
    Threads,
    Trust,
    WithValues,
)
from bitplan.cli.steps import (
    Using,
    Wanted,
    aimed,
    check_asked,
    emit,
    estimated,
    on_device,
    only,
    priced,
    read_rules,
    refuse_bound,
    sureness,
    told_graph,
    weights_and_graph,
)
from bitplan.cli.terminal import say
from bitplan.cli.words import App, Verbs
from bitplan.core.defaults import AUTO, CHOICES, COST
from bitplan.core.errors import InputError

app = App(
    name="bitplan",
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="How many bits each layer of a neural network should get, under a budget.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from bitplan import __version__

        say(f"bitplan {__version__}")
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
    gain: Gain = AUTO,
    cost: Cost = [COST],
    choices: Choices = CHOICES,
    option: Option = [],
    selector: Selector = None,
    levels: Levels = None,
    seed: Seed = 0,
    input: Input = None,
    values: WithValues = False,
    trust: Trust = False,
    fix: Fix = [],
    free: Free = [],
    link: Link = [],
    first: First = None,
    last: Last = None,
    narrow: Narrow = None,
    threads: Threads = None,
    device: Device = "cpu",
    task: TaskName = None,
    task_option: TaskOption = [],
    data: Data = None,
    recipe: RecipeFile = None,
    set: Set = [],
    teacher: Teacher = None,
    teacher_weights: TeacherWeights = None,
    engine: EngineName = "local",
    store: Store = None,
    quantizer: QuantizerName = None,
    explain: Annotated[bool, typer.Option(help="Say for each layer gain, cost, reason, and how sure it is.")] = False,
    output: Output = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to look at (.html).")] = None,
    json: Json = False,
) -> None:
    """Choose a precision for every layer: trace, estimate, price and select in one go."""
    from bitplan.cli.show import show_plan
    from bitplan.plan.base import select as select_plan

    rules = read_rules(choices, first=first, last=last, narrow=narrow, fix=fix, free=free)
    thing, wanted = typed(target, input, values, trust, gain, task or data), Wanted(gain, choices, option)
    using = Using(seed, threads, task, task_option, recipe, set, teacher, teacher_weights, engine, store, trust, data)
    weights, graph = weights_and_graph(thing, rules, link, wanted)
    costs, using = priced(graph, cost, budget, choices, selector), using.of(thing, quantizer)
    gains = estimated(wanted, on_device(weights, device), graph, using, aimed(graph, costs, budget, choices))
    chosen = select_plan(graph, gains, costs, budget=budget, selector=selector, levels=levels)
    reporting.write_page(chosen, graph, gains, costs, html)
    if not emit(chosen, output, json):
        show_plan(chosen, graph, gains, costs, explain, sureness(graph, gains, costs, budget, selector, seed, explain))


@app.command()
def frontier(
    target: Target,
    at: Annotated[str, typer.Option(help="Budgets to show, with commas.")] = "95%,90%,85%,80%,75%,70%,65%,60%",
    gain: Gain = AUTO,
    cost: Annotated[str, typer.Option(help="A cost by name, or a table.")] = COST,
    choices: Choices = CHOICES,
    option: Option = [],
    seed: Seed = 0,
    input: Input = None,
    values: WithValues = False,
    trust: Trust = False,
    fix: Fix = [],
    free: Free = [],
    link: Link = [],
    first: First = None,
    last: Last = None,
    narrow: Narrow = None,
    device: Device = "cpu",
    task: TaskName = None,
    task_option: TaskOption = [],
    data: Data = None,
    json: Json = False,
) -> None:
    """Show the best plans for many budgets, all found in one pass."""
    from bitplan.cli.show import show_frontier
    from bitplan.costs.base import price as price_graph
    from bitplan.plan.frontier import select_all

    rules = read_rules(choices, first=first, last=last, narrow=narrow, fix=fix, free=free)
    thing, wanted = typed(target, input, values, trust, gain, task or data), Wanted(gain, choices, option)
    refuse_bound(wanted)
    weights, graph = weights_and_graph(thing, rules, link, wanted)
    costs, budgets = price_graph(cost, graph, choices), [budget.strip() for budget in at.split(",")]
    for budget in budgets:
        check_asked(graph, [costs], [budget], choices, None)
    using = Using(seed, task=task, task_option=task_option, data=data, trust=trust, network=thing)
    found = select_all(graph, estimated(wanted, on_device(weights, device), graph, using), costs)
    show_frontier(found, budgets, as_json=json)


@app.command()
def trace(
    target: Target,
    input: Input = None,
    values: WithValues = False,
    trust: Trust = False,
    choices: Choices = CHOICES,
    fix: Fix = [],
    free: Free = [],
    link: Link = [],
    first: First = None,
    last: Last = None,
    narrow: Narrow = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Find a model's layers, their links and what is fixed: model → graph."""
    from bitplan.cli.door import Beside, what_is

    rules = read_rules(choices, first=first, last=last, narrow=narrow, fix=fix, free=free)
    graph = told_graph(what_is(target, Beside(shape=input, values=values, trust=trust)), rules, link)
    if not emit(graph, output, json):
        from bitplan.cli.show import show_graph

        show_graph(graph)


@app.command()
def price(
    cost: Annotated[str, typer.Argument(help="A cost by name, or a table (.csv, .json).")],
    graph: Annotated[Path, typer.Argument(help="A graph file.")],
    choices: Choices = CHOICES,
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
    trust: Trust = False,
    budget: BudgetsOfSearches = [],
    cost: Cost = [COST],
    choices: Choices = CHOICES,
    option: Option = [],
    seed: Seed = 0,
    threads: Threads = None,
    device: Device = "cpu",
    task: TaskName = None,
    task_option: TaskOption = [],
    data: Data = None,
    recipe: RecipeFile = None,
    set: Set = [],
    teacher: Teacher = None,
    teacher_weights: TeacherWeights = None,
    engine: EngineName = "local",
    store: Store = None,
    quantizer: QuantizerName = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Estimate what each group gains from more bits: model + graph → gains."""
    from bitplan.cli.door import Beside, what_is
    from bitplan.core.records import Graph
    from bitplan.core.store import load

    loaded, wanted = load(graph, Graph), Wanted(method, choices, option)
    thing = None if model is None else what_is(model, Beside(trust=trust, runs=runs_network(method, task or data)))
    looked_at = thing is not None and not (method == AUTO and thing.has_random_weights)
    weights = on_device(thing.weights, device) if thing is not None and looked_at else None
    using = Using(seed, threads, task, task_option, recipe, set, teacher, teacher_weights, engine, store, trust, data)
    aim = aimed(loaded, priced(loaded, cost, budget, choices, None), budget, choices) if budget else None
    gains = estimated(wanted, weights, loaded, using.of(thing, quantizer), aim)
    if not emit(gains, output, json):
        from bitplan.cli.show import show_rows

        show_rows(gains)


@app.command()
def select(
    files: Files,
    budget: Budgets,
    selector: Selector = None,
    levels: Levels = None,
    explain: Annotated[bool, typer.Option(help="Say for each layer gain, cost, reason, and how sure it is.")] = False,
    output: Output = None,
    json: Json = False,
) -> None:
    """Choose under a budget: graph + gains + costs → plan. Files in any order."""
    from bitplan.core.budget import Budget
    from bitplan.core.record import Record
    from bitplan.core.records import Costs, Gains, Graph
    from bitplan.core.store import load
    from bitplan.costs.base import add_limited
    from bitplan.plan.base import select as select_plan

    records = [load(file, Record) for file in files]
    graph, gains = only(records, Graph), only(records, Gains)
    costs = [record for record in records if isinstance(record, Costs)]
    if not costs:
        raise InputError("no costs among the files: make some with `bitplan price`")
    costs = add_limited(costs, [Budget.parse(one) for one in budget], graph, gains.choices)
    chosen = select_plan(graph, gains, costs, budget=budget, selector=selector, levels=levels)
    if not emit(chosen, output, json):
        from bitplan.cli.show import show_plan

        sure = sureness(graph, gains, costs, budget, selector) if explain else None
        show_plan(chosen, graph, gains, costs, explain, sure)


for verbs in (inspecting, datasets, measuring, training, studies, ceilings, tabling, reporting, exporting):
    verbs.add(app)
