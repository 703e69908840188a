"""The verbs."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitplan.core.errors import FileError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bitplan.core.record import Record
    from bitplan.core.records import Costs, Gains, Graph

app = typer.Typer(
    name="bitplan",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="How many bits each layer of a neural network should get, under a budget.",
)

Target = Annotated[str, typer.Argument(help="A zoo name, package.module:factory, or a graph file (.json).")]
Files = Annotated[list[Path], typer.Argument(help="Record files (.json).")]
Input = Annotated[str | None, typer.Option("--input", help="Example input, such as 1x3x224x224 or 1x128:int64.")]
Fix = Annotated[list[str], typer.Option(help="Fix layers: 'stem.*=w8a8'. Repeats.")]
Free = Annotated[list[str], typer.Option(help="Exempt layers from the rules: 'fc'. Repeats.")]
First = Annotated[str, typer.Option(help="Precision of the first layer, or 'free'.")]
Last = Annotated[str, typer.Option(help="Precision of the last layer, or 'free'.")]
Narrow = Annotated[int, typer.Option(min=0, help="Fix layers with fewer input features at w4a4; 0 for none.")]
Choices = Annotated[str, typer.Option(help="Precisions to choose from, ascending.")]
Cost = Annotated[list[str], typer.Option(help="A cost by name, or a table (.csv, .json). Repeats.")]
Budgets = Annotated[list[str], typer.Option(help="70%, memory=60%, 3.2bpw, or units. Repeats: all hold at once.")]
Gain = Annotated[str, typer.Option(help="A method by name, or a table of gains (.csv, .json).")]
Option = Annotated[list[str], typer.Option("--option", help="An option of the method: KEY=VALUE. Repeats.")]
Selector = Annotated[str | None, typer.Option(help="exact or greedy; the method's own unless said.")]
Levels = Annotated[int | None, typer.Option(min=1, help="Round gains to this many levels first (paper: 10000).")]
Seed = Annotated[int, typer.Option(help="For methods that draw random numbers.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the record to this file.")]
Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of a table.")]
Threads = Annotated[int | None, typer.Option(min=1, help="How many CPU threads to use.")]
Device = Annotated[str, typer.Option(help="Where the model is put for methods that run it: cpu, cuda, …")]
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

    graph, gains = _graph_and_gains(
        target, gain, choices, option, seed, input, RuleOptions(first, last, narrow, fix, free), threads, device
    )
    costs = _priced(graph, cost, budget, choices)
    chosen = select_plan(graph, gains, costs, budget=budget, selector=selector, levels=levels)
    if not _emit(chosen, output, json):
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

    rules = RuleOptions(first, last, narrow, fix, free)
    graph, gains = _graph_and_gains(target, gain, choices, option, seed, input, rules, None, "cpu")
    found = select_all(graph, gains, price_graph(cost, graph, choices))
    show_frontier(found, [budget.strip() for budget in at.split(",")], as_json=json)


@app.command()
def trace(
    target: Target,
    input: Input = None,
    fix: Fix = [],
    free: Free = [],
    first: First = "w8a8",
    last: Last = "w8a8",
    narrow: Narrow = 128,
    output: Output = None,
    json: Json = False,
) -> None:
    """Find a model's layers, their links and what is fixed: model → graph."""
    from bitplan.cli.inputs import RuleOptions, read_target

    graph = read_target(target, input, RuleOptions(first, last, narrow, fix, free)).graph
    if not _emit(graph, output, json):
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
    if not _emit(costs, output, json):
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
    gains = _estimated(method, _model(model, device), loaded, choices, option, seed, threads)
    if not _emit(gains, output, json):
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
    graph, gains = _only(records, Graph), _only(records, Gains)
    costs = [record for record in records if isinstance(record, Costs)]
    if not costs:
        raise InputError("no costs among the files: make some with `bitplan price`")
    chosen = select_plan(graph, gains, costs, budget=budget, selector=selector, levels=levels)
    if not _emit(chosen, output, json):
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


def _graph_and_gains(
    target: str, gain: str, choices: str, option: Sequence[str], seed: int,
    shape: str | None, rules: Any, threads: int | None, device: str,
) -> tuple[Graph, Gains]:  # fmt: skip
    from bitplan.cli.inputs import read_target
    from bitplan.gains.base import looks_at_model, make_gain
    from bitplan.plan.feasible import check_selectable

    method, _ = make_gain(gain, _options(option))
    needs = looks_at_model(method)
    if needs:
        _refuse_without_weights(target, gain)
    found = read_target(target, shape, rules, weights=needs)
    check_selectable(found.graph)
    model = found.model.to(device) if needs and found.model is not None else None
    return found.graph, _estimated(gain, model, found.graph, choices, option, seed, threads)


def _refuse_without_weights(target: str, gain: str) -> None:
    hint = "or use a method that looks at the structure only, such as --gain uniform"
    if Path(target).suffix == ".json":
        raise InputError(f"{gain} looks at the weights, which a graph file does not have: give the model, {hint}")
    if ":" not in target:
        raise InputError(f"{target} from the zoo has random weights, which say nothing to {gain}: give a factory "
                         f"(package.module:factory) that loads yours, {hint}")  # fmt: skip


def _options(written: Sequence[str]) -> dict[str, Any]:
    from bitplan.cli.inputs import read_options

    return read_options(written)


def _model(name: str | None, device: str) -> Any:
    if name is None:
        return None
    from bitplan.models.zoo import load_model

    return load_model(name)[0].to(device)


def _estimated(
    method: str, model: Any, graph: Graph, choices: str, option: Sequence[str], seed: int, threads: int | None
) -> Gains:
    from bitplan.gains.base import Context
    from bitplan.gains.base import estimate as estimate_gains

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    with _progress() as progress:
        context = Context(seed=seed, progress=progress)
        return estimate_gains(method, model, graph, choices=choices, context=context, **_options(option))


def _priced(graph: Graph, names: Sequence[str], budgets: Sequence[str], choices: str) -> list[Costs]:
    """The costs asked for, and those that a budget names."""
    from bitplan.core.budget import Budget
    from bitplan.core.registry import COSTS
    from bitplan.costs.base import price as price_graph

    parsed = [Budget.parse(budget) for budget in budgets]
    named = [budget.cost for budget in parsed if budget.cost in COSTS]
    wanted = [*names, *(name for name in named if name and name not in names)]
    if all(budget.unit == "bpw" for budget in parsed) and list(names) == ["bmac"]:
        wanted = ["memory"]  # bits per weight say nothing of activations, which bmac wants to be equal
    return [price_graph(name, graph, choices) for name in dict.fromkeys(wanted)]


def _only(records: Sequence[Record], kind: type[Any]) -> Any:
    found = [record for record in records if isinstance(record, kind)]
    if len(found) != 1:
        raise InputError(f"exactly one {kind.kind()} file is needed, got {len(found)}")
    return found[0]


def _emit(record: Record, output: Path | None, json: bool) -> bool:
    """Write the record where asked for; tell whether that was the whole answer."""
    from bitplan.core.store import save

    if output is not None:
        save(record, output)
        print(f"wrote {output} ({record.kind()} {record.id})", file=sys.stderr)
    if json:
        print(record.to_json(), end="")
    return json


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar on the terminal while a method works; nothing where the output is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("estimating", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
