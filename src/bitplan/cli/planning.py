"""The verbs that go all the way from a model to plans: plan and frontier."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitplan.cli import reporting
from bitplan.cli.inputs import typed
from bitplan.cli.options import (
    Budgets,
    Choices,
    Cost,
    Data,
    Device,
    EngineName,
    First,
    Fix,
    ForTarget,
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
    TextFile,
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
    priced,
    read_rules,
    refuse_bound,
    sureness,
    weights_and_graph,
)
from bitplan.cli.terminal import tell
from bitplan.core.defaults import AUTO, CHOICES, COST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bitplan.cli.things import Typed
    from bitplan.core.records import Costs, Gains, Graph, Plan
    from bitplan.costs.files import FileCost, Form


def add(app: typer.Typer) -> None:
    """Put the verbs on the command line."""
    app.command()(plan)
    app.command()(frontier)


def plan(
    target: Target,
    budget: Budgets,
    for_: ForTarget = None,
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
    text: TextFile = None,
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
    form, choices, quantizer = _form(for_, choices, quantizer, budget)
    task, task_option = _as_task(task, task_option, text, data)
    rules = _rules(form, choices, first=first, last=last, narrow=narrow, fix=fix, free=free)
    thing, wanted = typed(target, input, values, trust, gain, task or data), Wanted(gain, choices, option)
    using = Using(seed, threads, task, task_option, recipe, set, teacher, teacher_weights, engine, store, trust, data)
    weights, graph = weights_and_graph(thing, rules, link, wanted)
    costs, using = _priced(form, thing, graph, cost, budget, choices, selector), using.of(thing, quantizer)
    gains = estimated(wanted, on_device(weights, device), graph, using, aimed(graph, costs, budget, choices))
    chosen = _selected(graph, gains, costs, html, budget=budget, selector=selector, levels=levels)
    if not emit(chosen, output, json):
        _show(chosen, graph, gains, costs, explain, sureness(graph, gains, costs, budget, selector, seed, explain))


def _form(
    written: str | None, choices: str, quantizer: str | None, budgets: Sequence[str]
) -> tuple[Form | None, str, str | None]:
    """How the target that was typed stores weights, if one was; what there is to choose from for it, and by what."""
    from bitplan.costs.files import read_form

    if written is None:
        _tell_of_groups(quantizer, budgets)
        return None, choices, quantizer
    form = read_form(written)
    return form, form.choices if choices == CHOICES else choices, quantizer or form.method


def _tell_of_groups(quantizer: str | None, budgets: Sequence[str]) -> None:
    """Say that a budget in bits or bytes counts weights without the steps of groups, and which one would."""
    from bitplan.core.budget import WEIGHT_BITS, Budget
    from bitplan.core.option_parsing import read_named
    from bitplan.exporters.packed import PackedForm

    name, options = read_named(quantizer, "--method") if quantizer else ("", {})
    asked = [Budget.parse(one) for one in budgets] if name == "groups" else []
    stored = [str(one) for one in asked if (one.cost or one.unit.usual) in ("memory", WEIGHT_BITS)]
    if stored:
        form = PackedForm(**{key: value for key, value in options.items() if key in ("size", "zeros")})
        tell(f"{stored[0]} is of weights alone: --for {form.written} counts the steps of groups and all else as well")


def _as_task(task: str | None, option: list[str], text: Path | None, data: str | None) -> tuple[str | None, list[str]]:
    from bitplan.cli.inputs import as_task

    return as_task(task, option, text, data)


def _selected(graph: Graph, gains: Gains, costs: Sequence[Costs], html: Path | None, **asked: Any) -> Plan:
    """The plan, and its page where one is wanted."""
    from bitplan.selection.base import select as select_plan

    chosen = select_plan(graph, gains, costs, **asked)
    reporting.write_page(chosen, graph, gains, costs, html)
    return chosen


def _show(*told: Any) -> None:
    from bitplan.cli.show import show_plan

    show_plan(*told)


def _rules(form: Form | None, choices: str, **written: Any) -> Any:
    """The rules as typed; for a target that has no codes in tables and in the last layer, these stay as they are."""
    if form is None or form.tables:
        return read_rules(choices, **written)
    ends = {name: written[name] or "w16a16" for name in ("first", "last")}
    return read_rules(choices, **written | ends | {"embeddings": "w16a16"})


def _priced(
    form: Form | None,
    thing: Typed,
    graph: Graph,
    names: Sequence[str],
    budgets: Sequence[str],
    choices: str,
    selector: str | None,
) -> list[Costs]:
    """The bytes of the target's file first, if there is one, then the costs asked for or that a budget names."""
    if form is None:
        return priced(graph, names, budgets, choices, selector)
    from bitplan.core.budget import Budget
    from bitplan.costs.base import add_limited
    from bitplan.costs.base import price as price_graph

    others = [] if list(names) == [COST] else [price_graph(name, graph, choices) for name in dict.fromkeys(names)]
    known = [price_graph(_file_cost(form, thing), graph, choices), *others]
    costs = add_limited(known, [Budget.parse(one) for one in budgets], graph, choices)
    check_asked(graph, costs, budgets, choices, selector)
    return costs


def _file_cost(form: Form, thing: Typed) -> FileCost:
    """The cost that counts the bytes of the target's file."""
    from bitplan.cli.things import RecordFile
    from bitplan.costs.files import FileCost
    from bitplan.models.file_tensors import file_cost

    if isinstance(thing, RecordFile):
        tell("a graph file tells nothing of norms and biases: the bytes are those of its layers alone")
        return FileCost(form)
    return file_cost(form.written, thing.weights, thing.pretrained)


def frontier(
    target: Target,
    at: Annotated[str, typer.Option(help="Budgets to show, with commas.")] = "95%,90%,85%,80%,75%,70%,65%,60%",
    for_: ForTarget = None,
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
    text: TextFile = None,
    data: Data = None,
    quantizer: QuantizerName = None,
    json: Json = False,
) -> None:
    """Show the best plans for many budgets, all found in one pass."""
    from bitplan.cli.show import show_frontier
    from bitplan.selection.frontier import select_all

    form, choices, quantizer = _form(for_, choices, quantizer, at.split(","))
    task, task_option = _as_task(task, task_option, text, data)
    rules = _rules(form, choices, first=first, last=last, narrow=narrow, fix=fix, free=free)
    thing, wanted = typed(target, input, values, trust, gain, task or data), Wanted(gain, choices, option)
    refuse_bound(wanted)
    weights, graph = weights_and_graph(thing, rules, link, wanted)
    costs, budgets = _one_cost(form, thing, graph, cost, choices), [budget.strip() for budget in at.split(",")]
    for budget in budgets:
        check_asked(graph, [costs], [budget], choices, None)
    using = Using(seed, task=task, task_option=task_option, data=data, trust=trust).of(thing, quantizer)
    found = select_all(graph, estimated(wanted, on_device(weights, device), graph, using), costs)
    show_frontier(found, budgets, as_json=json)


def _one_cost(form: Form | None, thing: Typed, graph: Graph, name: str, choices: str) -> Costs:
    """The bytes of the target's file, or the cost by this name."""
    from bitplan.core.errors import InputError
    from bitplan.costs.base import price as price_graph

    if form is None:
        return price_graph(name, graph, choices)
    if name != COST:
        raise InputError(f"a frontier has one cost, and --for {form.name} counts the bytes of a file: leave --cost out")
    return price_graph(_file_cost(form, thing), graph, choices)
