"""From a model to a plan: `plan`, `show frontier`, and the steps trace, price, estimate and select."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitplan.cli.options import (
    Bits,
    Budgets,
    CostNames,
    Data,
    Device,
    EngineName,
    Files,
    FileTarget,
    Gain,
    InputShape,
    Json,
    ModelName,
    Output,
    QuantizerName,
    RecipeWords,
    RuleWords,
    Seed,
    Selector,
    Store,
    Target,
    TaskName,
    Trust,
    must_run,
    read_data,
    read_engine,
    read_recipe,
    read_rules,
    read_selector,
)
from bitplan.cli.terminal import say_json, showing_progress, tell
from bitplan.core.defaults import AUTO, CHOICES, COST
from bitplan.core.errors import InputError

if TYPE_CHECKING:
    from bitplan.cli.inputs import Input, InputOptions
    from bitplan.core.record import Record
    from bitplan.core.records import Costs, Gains, Graph, Plan
    from bitplan.core.rules import Rules
    from bitplan.costs.files import FileCost, FileForm
    from bitplan.gains.base import Context
    from bitplan.selection.budget_constraint import BudgetConstraint
    from bitplan.selection.confidence import Confidence

GraphOrModel = Annotated[str, typer.Argument(metavar="GRAPH", help="A graph file, or a model as `bitplan plan` takes.")]
Explain = Annotated[bool, typer.Option("--explain", help="Say for each layer gain, cost, reason, and how sure it is.")]
OUTSIDE_TABLES = dict.fromkeys(("first", "last", "embeddings"), "w16a16")


def plan(
    target: Target,
    budget: Budgets,
    file_target: FileTarget = None,
    gain: Gain = AUTO,
    cost: CostNames = [COST],
    bits: Bits = CHOICES,
    quantizer: QuantizerName = None,
    rules: RuleWords = [],
    selector: Selector = None,
    seed: Seed = 0,
    input: InputShape = None,
    trust: Trust = False,
    task: TaskName = None,
    data: Data = None,
    device: Device = "cpu",
    recipe: RecipeWords = [],
    engine: EngineName = "local",
    store: Store = None,
    explain: Explain = False,
    output: Annotated[
        list[Path],
        typer.Option(
            "--output",
            "-o",
            show_default="the terminal alone",
            help="Write the plan (.json), or a page to look at (.html). Repeats.",
        ),
    ] = [],
    json: Json = False,
) -> None:
    """Choose a precision for every layer: trace, estimate, price and select in one go."""
    from bitplan.cli.inputs import InputOptions, read_input
    from bitplan.selection.base import select as select_plan

    form, bits, quantizer = read_target(file_target, bits, quantizer, budget)
    fixed, links = read_rules(bits, rules, usual_rules(form))
    options = InputOptions(input=input, trust=trust, must_run=must_run(gain, task or data))
    network, method = read_input(target, options), Method(gain, bits)
    means = Means(seed, task, data, recipe, engine, store, trust, network, quantizer)
    weights, graph = load_and_trace(network, fixed, links, method)
    selecting = read_selector(selector)
    costs = price_with_target(form, network, graph, cost, budget, bits, selecting["selector"])
    goal = read_goal(graph, costs, budget, bits)
    gains = estimate_gains(method, move_to_device(weights, device), graph, means, goal)
    chosen = select_plan(graph, gains, costs, budget=budget, **selecting)
    for page in (path for path in output if path.suffix == ".html"):
        write_page(chosen, graph, gains, costs, page)
    if not write_record(chosen, [path for path in output if path.suffix != ".html"], json):
        sure = find_confidence(graph, gains, costs, budget, selecting["selector"], seed) if explain else None
        show_chosen(chosen, graph, gains, costs, explain, sure)


def frontier(
    target: Target,
    budgets: Annotated[str, typer.Option(help="Budgets to show, with commas.")] = "95%,90%,85%,80%,75%,70%,65%,60%",
    file_target: FileTarget = None,
    gain: Gain = AUTO,
    cost: Annotated[str, typer.Option(help="A cost by name, or a table (.csv, .json).")] = COST,
    bits: Bits = CHOICES,
    quantizer: QuantizerName = None,
    rules: RuleWords = [],
    seed: Seed = 0,
    input: InputShape = None,
    trust: Trust = False,
    task: TaskName = None,
    data: Data = None,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Show the best plans for many budgets, all found in one pass."""
    from bitplan.cli.inputs import InputOptions, read_input
    from bitplan.cli.show import show_frontier
    from bitplan.selection.frontier import select_all

    limits = [budget.strip() for budget in budgets.split(",")]
    form, bits, quantizer = read_target(file_target, bits, quantizer, limits)
    fixed, links = read_rules(bits, rules, usual_rules(form))
    options = InputOptions(input=input, trust=trust, must_run=must_run(gain, task or data))
    network, method = read_input(target, options), Method(gain, bits)
    method.refuse_single_budget()
    weights, graph = load_and_trace(network, fixed, links, method)
    limited = _price_one(form, network, graph, cost, bits)
    for limit in limits:
        check_possible(graph, [limited], [limit], bits, None)
    means = Means(seed, task, data, trust=trust, network=network, quantizer=quantizer)
    gains = estimate_gains(method, move_to_device(weights, device), graph, means)
    show_frontier(select_all(graph, gains, limited), limits, as_json=json)


def trace(
    target: Target,
    input: InputShape = None,
    trust: Trust = False,
    bits: Bits = CHOICES,
    rules: RuleWords = [],
    output: Output = None,
    json: Json = False,
) -> None:
    """Find a model's layers, their links and the fixed ones: model → graph."""
    from bitplan.cli.inputs import InputOptions, read_input

    fixed, links = read_rules(bits, rules)
    graph = trace_input(read_input(target, InputOptions(input=input, trust=trust)), fixed, links)
    if not write_record(graph, output, json):
        from bitplan.cli.show import show_graph

        show_graph(graph)


def price(
    cost: Annotated[str, typer.Argument(help="A cost by name, or a table (.csv, .json).")],
    graph: GraphOrModel,
    bits: Bits = CHOICES,
    trust: Trust = False,
    output: Output = None,
    json: Json = False,
) -> None:
    """Price every group at every precision: graph → costs."""
    from bitplan.cli.inputs import InputOptions, read_input
    from bitplan.costs.base import price as price_graph

    fixed, _ = read_rules(bits, [])
    costs = price_graph(cost, trace_input(read_input(graph, InputOptions(trust=trust)), fixed), bits)
    if not write_record(costs, output, json):
        from bitplan.cli.show import show_rows

        show_rows(costs)


def estimate(
    gain: Annotated[
        str, typer.Argument(help="A method with its options, NAME:KEY=VALUE, or a table of gains (.csv, .json).")
    ],
    graph: GraphOrModel,
    model: ModelName = None,
    trust: Trust = False,
    budget: Annotated[
        list[str],
        typer.Option(show_default="none", help="For searches and relaxations, which choose within it. Repeats."),
    ] = [],
    cost: CostNames = [COST],
    bits: Bits = CHOICES,
    quantizer: QuantizerName = None,
    seed: Seed = 0,
    task: TaskName = None,
    data: Data = None,
    device: Device = "cpu",
    recipe: RecipeWords = [],
    engine: EngineName = "local",
    store: Store = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Estimate how much each group gains from more bits: model + graph → gains."""
    from bitplan.cli.inputs import InputOptions

    method, options = Method(gain, bits), InputOptions(trust=trust, must_run=must_run(gain, task or data))
    network, weights, loaded = _load_graph(graph, model, method, options)
    means = Means(seed, task, data, recipe, engine, store, trust, network, quantizer)
    goal = read_goal(loaded, price_limited(loaded, cost, budget, bits, None), budget, bits) if budget else None
    gains = estimate_gains(method, move_to_device(weights, device), loaded, means, goal)
    if not write_record(gains, output, json):
        from bitplan.cli.show import show_rows

        show_rows(gains)


def select(
    files: Files,
    budget: Budgets,
    selector: Selector = None,
    explain: Explain = False,
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
    graph, gains = _find_one(records, Graph), _find_one(records, Gains)
    costs = [record for record in records if isinstance(record, Costs)]
    if not costs:
        raise InputError("no costs among the files: make some with `bitplan steps price`")
    costs, selecting = (
        add_limited(costs, [Budget.parse(one) for one in budget], graph, gains.choices),
        read_selector(selector),
    )
    chosen = select_plan(graph, gains, costs, budget=budget, **selecting)
    if not write_record(chosen, output, json):
        sure = find_confidence(graph, gains, costs, budget, selecting["selector"]) if explain else None
        show_chosen(chosen, graph, gains, costs, explain, sure)


@dataclass(frozen=True)
class Method:
    """A method as typed, with the precisions to choose from."""

    typed: str
    bits: str

    @cached_property
    def name_and_options(self) -> tuple[str, dict[str, Any]]:
        """Its name and its options; a table of gains is its file."""
        from bitplan.core.option_parsing import read_named
        from bitplan.store.user_tables import is_table

        return (self.typed, {}) if is_table(self.typed) else read_named(self.typed, "--gain")

    @property
    def name(self) -> str:
        """Its name, or the file of a table."""
        return self.name_and_options[0]

    @property
    def options(self) -> dict[str, Any]:
        """Its options."""
        return self.name_and_options[1]

    @cached_property
    def gain(self) -> Any:
        """The method itself."""
        from bitplan.gains.base import make_gain

        return make_gain(self.name, self.options)[0]

    def needs_weights(self, network: Input) -> bool:
        """Return True if it looks at the weights of an input; `auto` takes them if there are any."""
        from bitplan.gains.base import needs_model

        return _has_weights(network) if self.name == AUTO else needs_model(self.gain)

    def refuse_single_budget(self) -> None:
        """Refuse a method that chooses within one budget where many are asked for."""
        from bitplan.gains.base import is_bound

        if self.name != AUTO and is_bound(self.gain):
            raise InputError(
                f"{self.name} chooses within one budget, and a frontier asks for many: bitplan plan … --gain "
                f"{self.name} --budget 70%, once for each"
            )


@dataclass(frozen=True)
class Means:
    """Everything that a method may use, as typed."""

    seed: int = 0
    task: str | None = None
    data: str | None = None
    recipe: Sequence[str] = ()
    engine: str = "local"
    store: Path | None = None
    trust: bool = False
    network: Input | None = None
    quantizer: str | None = None

    def load(self) -> Context:
        """Load everything that was named, once."""
        from bitplan.cli.inputs import load_teacher
        from bitplan.gains.base import Context

        recipe, teacher = read_recipe(self.recipe, trust=self.trust)
        return Context(
            task=read_data(self.task, self.data, self.network),
            recipe=recipe,
            teacher=load_teacher(teacher.get("teacher"), teacher.get("teacher_weights"), trust=self.trust),
            seed=self.seed,
            engine=read_engine(self.engine),
            store=self.store,
            quantizer=self.quantizer,
        )


def read_target(
    typed: str | None, bits: str, quantizer: str | None, budgets: Sequence[str]
) -> tuple[FileForm | None, str, str | None]:
    """Return how the target stores weights, if one was typed; its precisions and its quantizer unless others were."""
    from bitplan.costs.files import read_form

    if typed is None:
        _tell_of_groups(quantizer, budgets)
        return None, bits, quantizer
    form = read_form(typed)
    return form, form.choices if bits == CHOICES else bits, quantizer or form.method


def _tell_of_groups(quantizer: str | None, budgets: Sequence[str]) -> None:
    """Say that a budget in bits or bytes counts weights without the scales of groups, and which target would."""
    from bitplan.core.budget import WEIGHT_BITS, Budget
    from bitplan.core.option_parsing import read_named
    from bitplan.exporters.packed import PackedForm

    name, options = read_named(quantizer, "--quantizer") if quantizer else ("", {})
    asked = [Budget.parse(one) for one in budgets] if name == "groups" else []
    stored = [str(one) for one in asked if (one.cost or one.unit.usual) in ("memory", WEIGHT_BITS)]
    if stored:
        form = PackedForm(**{key: value for key, value in options.items() if key in ("size", "zeros")})
        tell(f"{stored[0]} counts weights alone: --target {form.written} also counts the scales of groups and all else")


def usual_rules(form: FileForm | None) -> dict[str, str]:
    """Return rules for a target that has no codes in tables and in the last layer: these stay as they are."""
    return {} if form is None or form.tables else OUTSIDE_TABLES


def load_and_trace(network: Input, rules: Rules, links: Sequence[str], method: Method) -> tuple[Any, Graph]:
    """Return weights, loaded only if the method looks at them, and the graph."""
    from bitplan.selection.base import check_selectable

    needs_weights = method.needs_weights(network)
    if needs_weights:
        _refuse_without_weights(network, method.name)
        network.check_plannable()  # before weights are loaded, or a network is trained for them
    weights = network.weights if needs_weights else None
    graph = trace_input(network, rules, links)
    check_selectable(graph)
    return weights, graph


def _load_graph(
    graph: str, model: str | None, method: Method, options: InputOptions
) -> tuple[Input | None, Any, Graph]:
    """Return the network that a method looks at, its weights, and the graph: from a graph file and a model, or one."""
    from bitplan.cli.inputs import RecordFile, read_input

    source, (rules, _) = read_input(graph, options), read_rules(method.bits, [])
    if not isinstance(source, RecordFile):
        if model is not None:
            raise InputError(f"--model is the network of a graph file, and {graph} is {source.is_a}: leave one out")
        return source, *load_and_trace(source, rules, (), method)
    loaded = trace_input(source, rules)
    network = None if model is None else read_input(model, options)
    if network is None or (method.name == AUTO and network.has_random_weights):
        return network, None, loaded
    return network, network.weights, loaded


def trace_input(network: Input, rules: Rules, links: Sequence[str] = ()) -> Graph:
    """Return the graph of an input, and tell the choices that bitplan made."""
    graph = network.graph(rules, links)
    _tell_notes(graph)
    return graph


def _tell_notes(record: Graph | Gains) -> None:
    for note in record.notes:
        tell(note)


def _has_weights(network: Input) -> bool:
    from bitplan.cli.inputs import RecordFile

    return not isinstance(network, RecordFile) and not network.has_random_weights


def _refuse_without_weights(network: Input, gain: str) -> None:
    from bitplan.cli.inputs import RecordFile

    hint = "or use a method that looks at the structure only, such as --gain uniform"
    if isinstance(network, RecordFile):
        raise InputError(f"{gain} looks at the weights, which a graph file does not have: give the model, {hint}")
    if network.has_random_weights:
        raise InputError(
            f"{network.name} from the zoo has random weights, which say nothing to {gain}: give a factory "
            f"(package.module:factory) that loads yours, {hint}"
        )


def move_to_device(weights: Any, device: str) -> Any:
    """Return a network on its device; an opened file of weights stays where it is."""
    if device == "cpu" and not hasattr(weights, "to"):
        return weights
    from bitplan.adapters.torch import usable_device

    place = usable_device(device)
    return weights.to(place) if hasattr(weights, "to") else weights


def estimate_gains(
    method: Method, weights: Any, graph: Graph, means: Means, goal: BudgetConstraint | None = None
) -> Gains:
    """Estimate with a bar; a long estimate says first how long it takes."""
    from bitplan.gains.base import estimate as estimate_all
    from bitplan.gains.base import needs_model

    if weights is None and method.name != AUTO and needs_model(method.gain):
        raise InputError(f"{method.name} looks at the network: give it too, --model")
    context = replace(means.load(), aim=goal)
    with showing_progress("estimating") as progress, fitting(weights, context.task):
        context = replace(context, progress=progress, announce=lambda expected: tell(f"{method.name}: {expected}"))
        gains = estimate_all(method.name, weights, graph, choices=method.bits, context=context, **method.options)
    _tell_notes(gains)
    return gains


def read_goal(graph: Graph, costs: Sequence[Costs], budgets: Sequence[str], bits: str) -> BudgetConstraint:
    """Return the budgets as methods take them that choose within one."""
    from bitplan.core.precision import parse_choices
    from bitplan.selection.budget_constraint import BudgetConstraint

    return BudgetConstraint.of(graph, parse_choices(bits), costs, budgets)


def check_possible(
    graph: Graph, costs: Sequence[Costs], budgets: Sequence[str], bits: str, selector: str | None
) -> None:
    """Raise if there is no such selector, or if a budget cannot be met, before gains are estimated for hours."""
    from bitplan.core.registry import SELECTORS
    from bitplan.gains.base import estimate as estimate_all
    from bitplan.selection.base import pose

    if selector is not None:
        SELECTORS.get(selector)
    pose(graph, estimate_all("uniform", None, graph, choices=bits), costs, budgets)


def price_limited(
    graph: Graph, names: Sequence[str], budgets: Sequence[str], bits: str, selector: str | None
) -> list[Costs]:
    """Return the costs asked for and those of the budgets; never none, so that `--explain` can show one."""
    from bitplan.core.budget import Budget
    from bitplan.costs.base import price as price_graph
    from bitplan.costs.base import price_for

    found = price_for([Budget.parse(budget) for budget in budgets], names, graph, bits)
    costs = found or [price_graph("memory", graph, bits)]
    check_possible(graph, costs, budgets, bits, selector)
    return costs


def price_with_target(
    form: FileForm | None,
    network: Input,
    graph: Graph,
    names: Sequence[str],
    budgets: Sequence[str],
    bits: str,
    selector: str | None,
) -> list[Costs]:
    """Return the bytes of the target's file first, if there is one, then the costs asked for or that a budget names."""
    if form is None:
        return price_limited(graph, names, budgets, bits, selector)
    from bitplan.core.budget import Budget
    from bitplan.costs.base import add_limited
    from bitplan.costs.base import price as price_graph

    others = [] if list(names) == [COST] else [price_graph(name, graph, bits) for name in dict.fromkeys(names)]
    first = price_graph(_count_bytes(form, network), graph, bits)
    costs = add_limited([first, *others], [Budget.parse(one) for one in budgets], graph, bits)
    check_possible(graph, costs, budgets, bits, selector)
    return costs


def _price_one(form: FileForm | None, network: Input, graph: Graph, name: str, bits: str) -> Costs:
    """Return the bytes of the target's file, or the cost by this name."""
    from bitplan.costs.base import price as price_graph

    if form is None:
        return price_graph(name, graph, bits)
    if name != COST:
        raise InputError(
            f"a frontier has one cost, and --target {form.name} counts the bytes of a file: leave --cost out"
        )
    return price_graph(_count_bytes(form, network), graph, bits)


def _count_bytes(form: FileForm, network: Input) -> FileCost:
    """Return the cost that counts the bytes of the target's file."""
    from bitplan.cli.inputs import RecordFile
    from bitplan.costs.files import FileCost
    from bitplan.models.file_tensors import file_cost

    if isinstance(network, RecordFile):
        tell("a graph file tells nothing of norms and biases: the bytes are those of its layers alone")
        return FileCost(form)
    return file_cost(form.written, network.weights, network.pretrained)


def find_confidence(
    graph: Graph,
    gains: Gains,
    costs: Sequence[Costs],
    budgets: Sequence[str],
    selector: str | None,
    seed: int = 0,
) -> Confidence | None:
    """Return how sure each choice is, or None if the gains carry no standard errors."""
    from bitplan.selection.confidence import confidence

    if gains.errors is None:
        return None
    return confidence(graph, gains, costs, budget=budgets, selector=selector, seed=seed)


def show_chosen(
    chosen: Plan, graph: Graph, gains: Gains, costs: Sequence[Costs], explain: bool, sure: Confidence | None
) -> None:
    """Print a plan."""
    from bitplan.cli.show import show_plan

    show_plan(chosen, graph, gains, costs, explain, sure)


def write_page(chosen: Plan, graph: Graph, gains: Gains, costs: Sequence[Costs], path: Path) -> None:
    """Write the page of a single plan, with the command that made it."""
    from bitplan.reports.document import report_plan

    command = shlex.join(["bitplan", *sys.argv[1:]])
    tell_written(report_plan(chosen, graph, gains, tuple(costs), path, command=command))


def tell_written(path: Path) -> None:
    """Say which file was written, and its size."""
    tell(f"wrote {path} ({path.stat().st_size / 1e3:,.0f} kB)")


def write_record(record: Record, output: Path | Sequence[Path] | None, json: bool) -> bool:
    """Write the record where asked for; return True if its JSON was printed, so that no table has to be."""
    from bitplan.store.files import save

    for path in [output] if isinstance(output, Path) else output or ():
        save(record, path)
        tell(f"wrote {path} ({record.kind()} {record.id})")
    if json:
        say_json(record.to_json())
    return json


def _find_one(records: Sequence[Record], kind: type[Any]) -> Any:
    found = [record for record in records if isinstance(record, kind)]
    if len(found) != 1:
        raise InputError(f"exactly one {kind.kind()} file is needed, got {len(found)}")
    return found[0]


@contextmanager
def fitting(model: Any, task: Any) -> Iterator[None]:
    """Say where a network does not fit a task's data if it fails on it; let other failures through."""
    try:
        yield
    except (RuntimeError, IndexError, TypeError) as error:
        if task is None or not hasattr(model, "named_modules"):
            raise
        from bitplan.core.errors import TraceError
        from bitplan.core.parsing import first_line
        from bitplan.graph.trace import trace

        try:
            trace(model, task.example())
        except TraceError as refused:
            raise InputError(f"the network does not fit the task {task.name}: {refused}") from error
        if not isinstance(error, IndexError):
            raise
        raise InputError(
            f"the network does not fit the task {task.name}, such as by its classes: {first_line(error)}"
        ) from error
