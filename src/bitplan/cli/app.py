"""The verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitplan.cli import (
    ceilings,
    datasets,
    exporting,
    inspecting,
    measuring,
    planning,
    reporting,
    studies,
    tabling,
    training,
)
from bitplan.cli.inputs import runs_network
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
    emit,
    estimated,
    on_device,
    only,
    priced,
    read_rules,
    sureness,
    told_graph,
    weights_and_graph,
)
from bitplan.cli.terminal import say
from bitplan.cli.words import App, Verbs
from bitplan.core.defaults import AUTO, CHOICES, COST
from bitplan.core.errors import InputError

if TYPE_CHECKING:
    from bitplan.cli.things import Beside, Typed
    from bitplan.core.records import Graph

GraphOrModel = Annotated[str, typer.Argument(metavar="GRAPH", help="A graph file, or what `bitplan plan` takes.")]

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
    graph: GraphOrModel,
    choices: Choices = CHOICES,
    trust: Trust = False,
    output: Output = None,
    json: Json = False,
) -> None:
    """Price every group at every choice: graph → costs."""
    from bitplan.cli.door import Beside, what_is
    from bitplan.costs.base import price as price_graph

    costs = price_graph(cost, told_graph(what_is(graph, Beside(trust=trust)), read_rules(choices)), choices)
    if not emit(costs, output, json):
        from bitplan.cli.show import show_rows

        show_rows(costs)


@app.command()
def estimate(
    method: Annotated[str, typer.Argument(help="A method by name, or a table of gains (.csv, .json).")],
    graph: GraphOrModel,
    model: Annotated[str | None, typer.Option(help="Of a graph file: the model, for methods that look at it.")] = None,
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
    from bitplan.cli.door import Beside

    wanted = Wanted(method, choices, option)
    thing, weights, loaded = _given(graph, model, wanted, Beside(trust=trust, runs=runs_network(method, task or data)))
    using = Using(seed, threads, task, task_option, recipe, set, teacher, teacher_weights, engine, store, trust, data)
    aim = aimed(loaded, priced(loaded, cost, budget, choices, None), budget, choices) if budget else None
    gains = estimated(wanted, on_device(weights, device), loaded, using.of(thing, quantizer), aim)
    if not emit(gains, output, json):
        from bitplan.cli.show import show_rows

        show_rows(gains)


def _given(graph: str, model: str | None, wanted: Wanted, beside: Beside) -> tuple[Typed | None, Any, Graph]:
    """The network that a method looks at, its weights, and the graph: of a graph file and a model, or of one thing."""
    from bitplan.cli.door import what_is
    from bitplan.cli.things import RecordFile

    source, rules = what_is(graph, beside), read_rules(wanted.choices)
    if not isinstance(source, RecordFile):
        if model is not None:
            raise InputError(f"--model is the network of a graph file, and {graph} is {source.is_a}: leave one out")
        return source, *weights_and_graph(source, rules, (), wanted)
    loaded = told_graph(source, rules)
    thing = None if model is None else what_is(model, beside)
    looked_at = thing is not None and not (wanted.method == AUTO and thing.has_random_weights)
    return thing, thing.weights if thing is not None and looked_at else None, loaded


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
    from bitplan.costs.base import add_limited
    from bitplan.selection.base import select as select_plan
    from bitplan.store.files import load

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


for verbs in (planning, inspecting, datasets, measuring, training, studies, ceilings, tabling, reporting, exporting):
    verbs.add(app)
