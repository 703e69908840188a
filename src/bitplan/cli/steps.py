"""The steps that verbs are made of; heavy imports only where they are needed."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.cli.progress import showing_progress
from bitplan.cli.terminal import say_json, tell
from bitplan.core.defaults import AUTO
from bitplan.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from bitplan.cli.things import Typed
    from bitplan.core.record import Record
    from bitplan.core.records import Costs, Gains, Graph
    from bitplan.core.rules import Rules
    from bitplan.gains.base import Context
    from bitplan.selection.budget_constraint import BudgetConstraint
    from bitplan.selection.confidence import Confidence


@dataclass(frozen=True)
class Using:
    """What a method may use, as typed."""

    seed: int = 0
    threads: int | None = None
    task: str | None = None
    task_option: Sequence[str] = ()
    recipe: Path | None = None
    set: Sequence[str] = ()
    teacher: str | None = None
    teacher_weights: str | None = None
    engine: str = "local"
    store: Path | None = None
    trust: bool = False
    data: str | None = None
    network: Typed | None = None
    quantizer: str | None = None

    def of(self, network: Typed | None, quantizer: str | None = None) -> Using:
        """The same for this network, whose tokenizer a task may need, and how its plan will be quantized."""
        return replace(self, network=network, quantizer=quantizer)

    def context(self) -> Context:
        """Load what was named, once."""
        from bitplan.cli.door import teacher_of
        from bitplan.cli.inputs import read_data, read_engine, read_recipe
        from bitplan.gains.base import Context

        return Context(
            task=read_data(self.task, self.task_option, self.data, self.network),
            recipe=read_recipe(self.recipe, self.set) if self.recipe or self.set else None,
            teacher=teacher_of(self.teacher, self.teacher_weights, trust=self.trust),
            seed=self.seed,
            engine=None if self.engine == "local" else read_engine(self.engine),
            store=self.store,
            quantizer=self.quantizer,
        )


@dataclass(frozen=True)
class Wanted:
    """An estimate as typed: the method, its options, and the precisions to choose from."""

    method: str
    choices: str
    option: Sequence[str] = ()

    @cached_property
    def options(self) -> dict[str, Any]:
        """What the method takes."""
        from bitplan.core.option_parsing import read_options

        return read_options(self.option)

    @cached_property
    def gain(self) -> Any:
        """The method itself."""
        from bitplan.gains.base import make_gain

        return make_gain(self.method, self.options)[0]

    def looks_at(self, target: Typed) -> bool:
        """Whether the weights of a thing are needed; `auto` takes what is there."""
        from bitplan.gains.base import looks_at_model

        return _has_weights(target) if self.method == AUTO else looks_at_model(self.gain)

    def taken(self, weights: Any, graph: Graph, task: Any) -> Any:
        """The method itself, also where it is left to bitplan."""
        from bitplan.core.precision import parse_choices
        from bitplan.gains.auto import taken_for
        from bitplan.gains.base import make_gain, usual_for

        found = taken_for(self.method, self.options, weights, graph, parse_choices(self.choices), task)
        return make_gain(found.method, {**usual_for(task, found.method), **found.options})[0]


def read_rules(choices: str, **written: Any) -> Rules:
    """The rules as typed, beside the precisions to choose from; what was not typed is as the library has it."""
    from bitplan.core.rules import Rules

    typed = {name: value for name, value in written.items() if value not in (None, [])}
    return Rules.read(**typed).for_choices(choices) if choices else Rules.read(**typed)


def refuse_rules(rules: Rules, why: str, *, but: Collection[str] = ()) -> None:
    """Refuse the rules that were typed and would have no effect."""
    idle = [f"--{name}" for name in rules.model_fields_set if name not in but]
    if idle:
        raise InputError(f"{', '.join(sorted(idle))} would have no effect: {why}")


def weights_and_graph(target: Typed, rules: Rules, link: Sequence[str], wanted: Wanted) -> tuple[Any, Graph]:
    """Build and trace; weights are loaded only where the method looks at them."""
    from bitplan.selection.base import check_selectable

    needed = wanted.looks_at(target)
    if needed:
        _refuse_without_weights(target, wanted.method)
        target.check_plannable()  # before weights are loaded, or a network is trained for them
    weights = target.weights if needed else None
    graph = told_graph(target, rules, link)
    check_selectable(graph)
    return weights, graph


def check_asked(
    graph: Graph, costs: Sequence[Costs], budgets: Sequence[str], choices: str, selector: str | None
) -> None:
    """See that there is the selector and that the budgets can be met, before gains are estimated for hours."""
    from bitplan.core.registry import SELECTORS
    from bitplan.gains.base import estimate as estimate_gains
    from bitplan.selection.base import pose

    if selector is not None:
        SELECTORS.get(selector)
    pose(graph, estimate_gains("uniform", None, graph, choices=choices), costs, budgets)


def _has_weights(target: Typed) -> bool:
    from bitplan.cli.things import RecordFile

    return not isinstance(target, RecordFile) and not target.has_random_weights


def _refuse_without_weights(target: Typed, gain: str) -> None:
    from bitplan.cli.things import RecordFile

    hint = "or use a method that looks at the structure only, such as --gain uniform"
    if isinstance(target, RecordFile):
        raise InputError(f"{gain} looks at the weights, which a graph file does not have: give the model, {hint}")
    if target.has_random_weights:
        raise InputError(
            f"{target.written} from the zoo has random weights, which say nothing to {gain}: give a factory "
            f"(package.module:factory) that loads yours, {hint}"
        )


def on_device(weights: Any, device: str) -> Any:
    """A network where it is to run; an opened file of weights stays where it is, and so does nothing."""
    if device == "cpu" and not hasattr(weights, "to"):
        return weights
    from bitplan.adapters.torch import usable_device

    place = usable_device(device)
    return weights.to(place) if hasattr(weights, "to") else weights


def estimated(wanted: Wanted, weights: Any, graph: Graph, setting: Using, aim: BudgetConstraint | None = None) -> Gains:
    """Estimate, telling how far it is; what takes long says first how long."""
    from bitplan.gains.base import estimate as estimate_gains
    from bitplan.gains.base import looks_at_model

    if weights is None and wanted.method != AUTO and looks_at_model(wanted.gain):
        raise InputError(f"{wanted.method} looks at the network: give it too, --model")
    limit_threads(setting.threads)
    context = replace(setting.context(), aim=aim)
    with showing_progress("estimating") as progress, fitting(weights, context.task):
        told = replace(context, progress=progress, announce=lambda expected: tell(f"{wanted.method}: {expected}"))
        gains = estimate_gains(wanted.method, weights, graph, choices=wanted.choices, context=told, **wanted.options)
    tell_notes(gains)
    return gains


def told_graph(target: Typed, rules: Rules, link: Sequence[str] = ()) -> Graph:
    """The graph of a thing; what was left to bitplan is said."""
    graph = target.graph(rules, link)
    tell_notes(graph)
    return graph


def tell_notes(record: Graph | Gains) -> None:
    """Say what was left to bitplan, a line each."""
    for note in record.notes:
        tell(note)


def refuse_bound(wanted: Wanted) -> None:
    """Refuse a method that chooses within one budget where many are asked for."""
    from bitplan.gains.base import is_bound

    if wanted.method != AUTO and is_bound(wanted.gain):
        raise InputError(
            f"{wanted.method} chooses within one budget, and a frontier asks for many: bitplan plan … --gain "
            f"{wanted.method} --budget 70%, once for each"
        )


def aimed(graph: Graph, costs: Sequence[Costs], budgets: Sequence[str], choices: str) -> BudgetConstraint:
    """What must be met, for methods that choose within a budget."""
    from bitplan.core.precision import parse_choices
    from bitplan.selection.budget_constraint import BudgetConstraint

    return BudgetConstraint.of(graph, parse_choices(choices), costs, budgets)


def priced(
    graph: Graph, names: Sequence[str], budgets: Sequence[str], choices: str, selector: str | None
) -> list[Costs]:
    """The costs asked for, and those that a budget names or brings; never none, so that `--explain` can show one.

    What cannot be selected by them is refused here.
    """
    from bitplan.core.budget import Budget
    from bitplan.costs.base import price as price_graph
    from bitplan.costs.base import price_for

    found = price_for([Budget.parse(budget) for budget in budgets], names, graph, choices)
    costs = found or [price_graph("memory", graph, choices)]
    check_asked(graph, costs, budgets, choices, selector)
    return costs


def sureness(
    graph: Graph,
    gains: Gains,
    costs: Sequence[Costs],
    budgets: Sequence[str],
    selector: str | None,
    seed: int = 0,
    asked: bool = True,
) -> Confidence | None:
    """How sure each choice is, where that was asked for and the gains carry standard errors."""
    from bitplan.selection.confidence import confidence

    if not asked or gains.errors is None:
        return None
    return confidence(graph, gains, costs, budget=budgets, selector=selector, seed=seed)


def only(records: Sequence[Record], kind: type[Any]) -> Any:
    """The one record of a kind."""
    found = [record for record in records if isinstance(record, kind)]
    if len(found) != 1:
        raise InputError(f"exactly one {kind.kind()} file is needed, got {len(found)}")
    return found[0]


def emit(record: Record, output: Path | None, json: bool) -> bool:
    """Write the record where asked for; tell whether that was the whole answer."""
    from bitplan.store.files import save

    if output is not None:
        save(record, output)
        tell(f"wrote {output} ({record.kind()} {record.id})")
    if json:
        say_json(record.to_json())
    return json


@contextmanager
def fitting(model: Any, task: Any) -> Iterator[None]:
    """Say of a network that fails on a task's data where it does not fit; what fails otherwise is let through."""
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


def limit_threads(threads: int | None) -> None:
    """Let torch use so many CPU threads, where that was asked for."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
