"""The steps that verbs are made of; heavy imports only where they are needed."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bitplan.core.record import Record
    from bitplan.core.records import Costs, Gains, Graph
    from bitplan.gains.base import Context
    from bitplan.plan.confidence import Confidence


@dataclass(frozen=True)
class MethodOptions:
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

    def context(self, progress: Any) -> Context:
        """Load what was named."""
        from bitplan.cli.inputs import read_engine, read_recipe, read_task
        from bitplan.cli.networks import load_teacher
        from bitplan.gains.base import Context

        return Context(
            task=None if self.task is None else read_task(self.task, self.task_option),
            recipe=read_recipe(self.recipe, self.set) if self.recipe or self.set else None,
            teacher=load_teacher(self.teacher, self.teacher_weights),
            seed=self.seed,
            engine=None if self.engine == "local" else read_engine(self.engine),
            store=self.store,
            progress=progress,
        )


def graph_and_gains(
    target: str, gain: str, choices: str, option: Sequence[str],
    shape: str | None, rules: Any, device: str, setting: MethodOptions,
) -> tuple[Graph, Gains]:  # fmt: skip
    """Build, trace and estimate; weights are loaded only where the method looks at them."""
    from bitplan.cli.inputs import read_target
    from bitplan.gains.base import looks_at_model, make_gain
    from bitplan.plan.feasible import check_selectable

    method, _ = make_gain(gain, _options(option))
    needs = looks_at_model(method)
    if needs:
        _refuse_without_weights(target, gain)
    found = read_target(target, shape, rules, weights=needs)
    check_selectable(found.graph)
    model: Any = found.model if needs else None
    if hasattr(model, "to"):  # a module, not an opened checkpoint
        model = model.to(device)
    return found.graph, estimated(gain, model, found.graph, choices, option, setting)


def _refuse_without_weights(target: str, gain: str) -> None:
    from bitplan.cli.inputs import is_checkpoint

    hint = "or use a method that looks at the structure only, such as --gain uniform"
    if is_checkpoint(target):
        return
    if Path(target).suffix == ".json":
        raise InputError(f"{gain} looks at the weights, which a graph file does not have: give the model, {hint}")
    if ":" not in target:
        raise InputError(f"{target} from the zoo has random weights, which say nothing to {gain}: give a factory "
                         f"(package.module:factory) that loads yours, {hint}")  # fmt: skip


def _options(written: Sequence[str]) -> dict[str, Any]:
    from bitplan.cli.inputs import read_options

    return read_options(written)


def model_of(name: str | None, device: str) -> Any:
    """The model of that name, with its weights, or None."""
    if name is None:
        return None
    from bitplan.cli.inputs import is_checkpoint, spec_of

    if spec_of(Path(name)):
        from bitplan.cli.networks import load_network

        return load_network(name, None, ()).model.to(device)
    if is_checkpoint(name):
        return name
    from bitplan.models.zoo import load_model

    return load_model(name)[0].to(device)


def estimated(
    method: str, model: Any, graph: Graph, choices: str, option: Sequence[str], setting: MethodOptions
) -> Gains:
    """Estimate with a progress bar; what takes long says first how long."""
    from bitplan.gains.base import estimate as estimate_gains

    limit_threads(setting.threads)
    _announce(method, model, graph, choices, option, setting)
    with progress_bar("estimating") as progress:
        context = setting.context(progress)
        return estimate_gains(method, model, graph, choices=choices, context=context, **_options(option))


def _announce(
    method: str, model: Any, graph: Graph, choices: str, option: Sequence[str], setting: MethodOptions
) -> None:
    """Say what a method that trains is going to take, before it starts."""
    from bitplan.core.precision import parse_choices
    from bitplan.gains.base import Foreseeing, make_gain

    gain, _ = make_gain(method, _options(option))
    if not isinstance(gain, Foreseeing):
        return
    told = gain.expected(model, graph, parse_choices(choices), setting.context(None))
    clock = f"{told.seconds / 60:.0f} minutes" if told.seconds > 90 else f"{told.seconds:.0f} seconds"
    left = f"{told.samples:,} samples left: about {clock} of one worker"
    print(f"{method}: {told.jobs} trainings ({told.done} of them done), {left}", file=sys.stderr)


def priced(graph: Graph, names: Sequence[str], budgets: Sequence[str], choices: str) -> list[Costs]:
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


def sureness(
    graph: Graph, gains: Gains, costs: Sequence[Costs], budgets: Sequence[str], selector: str | None, seed: int = 0
) -> Confidence | None:
    """How sure each choice is, where the gains carry standard errors."""
    from bitplan.plan.confidence import confidence

    if gains.errors is None:
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
    from bitplan.core.store import save

    if output is not None:
        save(record, output)
        print(f"wrote {output} ({record.kind()} {record.id})", file=sys.stderr)
    if json:
        print(record.to_json(), end="")
    return json


def limit_threads(threads: int | None) -> None:
    """Let torch use so many CPU threads, where that was asked for."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


@contextmanager
def progress_bar(what: str) -> Iterator[Any]:
    """A bar on the terminal during long work; nothing where the output is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
