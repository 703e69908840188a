"""estimate: model + Graph (+ Task) → Gains, by any registered method; and what a method must be."""

from __future__ import annotations

import dataclasses
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from bitplan.core.budget import Budget, BudgetLike
from bitplan.core.defaults import COST
from bitplan.core.errors import InputError
from bitplan.core.method_facts import describe_method
from bitplan.core.precision import Precision, PrecisionLike, parse_choices
from bitplan.core.progress import Progress
from bitplan.core.record import Record
from bitplan.core.records import Gains, Graph
from bitplan.core.registry import CHOOSERS, check_is
from bitplan.core.spend import EPOCH, ChargeMeter, PassMeter, Spend, meter_spend
from bitplan.core.trials import Recipe
from bitplan.costs.base import CHOICES, price_for
from bitplan.gains.auto import choose_method
from bitplan.selection.base import check_selectable
from bitplan.selection.budget_constraint import BudgetConstraint
from bitplan.store.engines import Engine, keep_workers
from bitplan.store.record_store import RecordStore
from bitplan.store.user_tables import is_table

if TYPE_CHECKING:
    from bitplan.gains.finetuning import TimeEstimate, Trainings


@dataclass(frozen=True)
class Context:
    """What a method may use besides the model and its graph; most use little of it.

    `recipe` is the one that the model was trained with, `teacher` the float network where it distills. Jobs run on
    `engine`; their outcomes are kept in `store`, a folder or a shelf of a run, from where a killed estimate goes on.
    `aim` is what must be met, for methods that choose within a budget, and `epochs` what they may spend unless their
    options say so: of training, three passes of every sample each. `quantizer` is the method that the plan will be
    quantized by, as `quantize(method=…)` takes it, for a model that is not yet; where it is not said it is LSQ, and for
    weights alone `groups`. `announce` is told what a method is going to take, before one that takes long begins.
    """

    task: Any = None
    recipe: Recipe | None = None
    teacher: Any = None
    seed: int = 0
    engine: Engine | None = None
    store: str | Path | RecordStore[Record] | None = None
    progress: Progress | None = None
    aim: BudgetConstraint | None = None
    epochs: float | None = None
    quantizer: str | None = None
    announce: Callable[[TimeEstimate], None] | None = None

    def quantizer_for(self, choices: Sequence[Precision]) -> str:
        """The quantizer of a model that is not quantized yet."""
        weights_alone = not any(choice.quantizes_inputs for choice in choices)
        return self.quantizer or ("groups" if weights_alone else "lsq")

    @property
    def shelf(self) -> RecordStore[Record] | None:
        """The store as what keeps outcomes; None where nothing is kept."""
        return self.store if self.store is None or isinstance(self.store, RecordStore) else RecordStore.at(self.store)


@dataclass(frozen=True)
class LayerGains:
    """What a method found: for every selectable layer one value per choice, 0 at the lowest.

    `work` is the seconds of its jobs, on whichever workers and whenever they were done; `notes` are for people. `spend`
    is said by who keeps a meter of its own: else it is what was charged (`core/spend.py`).
    """

    values: Mapping[str, tuple[float, ...]]
    errors: Mapping[str, tuple[float, ...]] | None = None
    histograms: Mapping[str, tuple[int, ...]] | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    work: float = 0.0
    notes: tuple[str, ...] = ()
    spend: Spend | None = None


Streams = Literal["always", "large"]
"""When a method that runs a network takes it from its file, block after block."""


class Gain(Protocol):
    """A method: a frozen dataclass derived from this class, whose fields are its options.

    It leaves the model as it was, repeats for a seed, and gives every selectable layer finite values. `selector` names
    the selector that the method is defined with; `structural` says that the graph is enough, so that no weights need
    to be loaded. A method that trains for long says beforehand what to expect, as `gains/alps.py` does. One that runs a
    network at the highest choice, which need not be trained there, may say `calibrates = True`: a float network is then
    quantized and calibrated for it; with `from_float = True` too, where weights alone are quantized, it is given the
    float one, whose weights are switched on to be lowered (`is_float`). `streams` says when a folder of weights will do
    though there is data: "always", or where the network is too "large" to be loaded. `bound = True` says that its gains
    hold for one budget, that of the context's aim.
    """

    selector: ClassVar[str] = "exact"
    structural: ClassVar[bool] = False

    @abstractmethod
    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """Estimate what each selectable layer gains at each choice over the lowest."""

    def trainings(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Trainings | None:
        """Return the trainings that `layer_gains` does, at most. None if it trains nothing."""
        return None


def estimate(
    method: str | Gain,
    model: Any,
    graph: Graph,
    *,
    choices: str | Iterable[PrecisionLike] = CHOICES,
    context: Context | None = None,
    batches: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    budget: BudgetLike | Sequence[BudgetLike] | None = None,
    **options: Any,
) -> Gains:
    """Estimate the gains of all groups: the sums over their layers.

    `method` is a registered name with its options, of a gain, a search or a relaxation, the path of a table of numbers,
    or a `Gain` itself; "auto" takes the best for what is there and says in the record's notes what that was, and why.
    Searches and relaxations choose within `budget`, which may name its cost ("memory=60%"). `model` may be
    None where the method does not look at it. Methods that run the network do so on the context's task, or on
    `batches`: a DataLoader, a Dataset, or any iterable of batches (`bitplan.task` says how they are read), with
    `loss(outputs, labels)` for those that look at it, unless the model returns its own. Options that are not given are
    those that a task says are usual on it (`usual`), else the method's own.
    """
    check_selectable(graph)
    precisions, setting = parse_choices(choices), context or Context()
    if batches is not None or loss is not None:
        from bitplan.gains.start_network import add_data

        setting = add_data(setting, batches, loss)
    taken = choose_method(method, options, model, graph, precisions, setting.task)
    gain, name = make_gain(taken.method, {**usual_options(setting.task, taken.method), **taken.options})
    setting = add_budget(setting, graph, precisions, budget)
    if is_bound(gain):
        check_constraint(setting.aim, name, graph, precisions)
    start = time.perf_counter()
    notes = [taken.note] if taken.note else []
    if getattr(gain, "calibrates", False):
        from bitplan.gains.start_network import start_network

        model, more = start_network(gain, name, model, graph, precisions, setting)
        notes = notes or list(more) if hasattr(model, "named_modules") else [*notes, *more]  # auto speaks of a network
    if setting.announce is not None:
        trainings = gain.trainings(model, graph, precisions, setting)
        if trainings is not None:
            setting.announce(trainings.estimate_time())
    with meter_spend() as meter, keep_workers():
        found = gain.layer_gains(model, graph, precisions, setting)
    seconds = max(found.work, time.perf_counter() - start)
    record = make_record(gain, name, found, graph, precisions, setting.seed, seconds)
    held = setting.aim.budgets if is_bound(gain) and setting.aim else ()
    paid = {"spend": _spend(gain, found, meter), "samples_per_epoch": _samples_per_epoch(setting.task)}
    return record.model_copy(update={"notes": (*notes, *found.notes), "budgets": held, **paid})


def usual_options(task: Any, method: Any) -> Mapping[str, Any]:
    """The options of a method that is named that are usual on a task."""
    named: Mapping[str, Mapping[str, Any]] = getattr(task, "usual", {})
    return named.get(method, {}) if isinstance(method, str) else {}


def _spend(gain: Gain, found: LayerGains, meter: ChargeMeter) -> Spend | None:
    """What a method spent; None where it does not say, neither by `about` what it is nor by charging what it runs."""
    about = describe_method(gain)
    if found.spend is not None:
        return found.spend
    silent = about is None or (about.data and not meter.spent.passes)
    return meter.spent if meter.known and not silent else None


def _samples_per_epoch(task: Any) -> int | None:
    if task is None:
        return None
    from bitplan.tasks.base import samples_per_epoch

    return samples_per_epoch(task) or None


def make_record(
    gain: Gain, name: str, found: LayerGains, graph: Graph, choices: tuple[Precision, ...], seed: int, seconds: float
) -> Gains:
    """What a method found, added up over the layers of each group, with where it came from."""
    members = {group.name: [layer.name for layer in group.layers] for group in graph.selectable}
    errors = None
    if found.errors:
        errors = {group: _root_sum_square(found.errors, layers) for group, layers in members.items()}
    return Gains(
        method=name,
        options=_options(gain),
        choices=choices,
        rows={group: _sum(found.values, layers) for group, layers in members.items()},
        errors=errors,
        histograms=dict(found.histograms) if found.histograms else None,
        counts=dict(found.counts),
        selector=gain.selector,
        seed=seed,
        graph=graph.id,
        seconds=seconds,
    )


def needs_model(gain: Gain | type[Gain]) -> bool:
    """Tell whether a method needs the model, not only its graph."""
    return not gain.structural


def is_bound(gain: Gain | type[Gain]) -> bool:
    """Tell whether a method's gains hold for one budget, which it must then be given."""
    return bool(getattr(gain, "bound", False))


def make_gain(method: str | Gain, options: Mapping[str, Any]) -> tuple[Gain, str]:
    """The method of that name with these options, and the name it goes by."""
    if not isinstance(method, str):
        check_is(method, Gain, "gain")
        return method, CHOOSERS.name_of(method)
    if is_table(method):
        method, options = "table", {"path": method, **options}
    gain: Gain = CHOOSERS.make(method, options)
    check_is(gain, Gain, "gain")
    return gain, method


def _options(gain: Gain) -> dict[str, Any]:
    fields: dict[str, Any] = dataclasses.asdict(gain)  # type: ignore[call-overload]
    shown = {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
    return {key: value for key, value in shown.items() if value is not None}


def _sum(values: Mapping[str, tuple[float, ...]], layers: list[str]) -> tuple[float, ...]:
    return tuple(sum(column) for column in zip(*(values[name] for name in layers), strict=True))


def _root_sum_square(errors: Mapping[str, tuple[float, ...]], layers: list[str]) -> tuple[float, ...]:
    columns = zip(*(errors[name] for name in layers if name in errors), strict=True)
    return tuple(float(sum(error**2 for error in column) ** 0.5) for column in columns)


# --- The aim of a method that chooses within a budget, from what users write.


def make_constraint(
    graph: Graph, choices: tuple[Precision, ...], budget: BudgetLike | Sequence[BudgetLike], cost: str = COST
) -> BudgetConstraint:
    """What a budget, or several at once, allows by the cost of that name, or those that budgets name themselves."""
    written = [budget] if isinstance(budget, str | float | int | Budget) else list(budget)
    return BudgetConstraint.of(
        graph, choices, price_for([Budget.parse(one) for one in written], [cost], graph, choices), written
    )


def add_budget(
    context: Context, graph: Graph, choices: tuple[Precision, ...], budget: BudgetLike | Sequence[BudgetLike] | None
) -> Context:
    """The context with the aim that a budget makes; one of them is enough."""
    if budget is None:
        return context
    if context.aim is not None:
        raise InputError("there are a budget and an aim in the context: give one of them")
    return replace(context, aim=make_constraint(graph, choices, budget))


def check_spend(method: str, spend: float | None) -> None:
    """Refuse what is no number of passes."""
    if spend is not None and not 0 < spend < math.inf:
        raise InputError(f"{method}: spend is a number of passes above 0, not {spend}")


def meter_for(spend: float | None, context: Context, usual: float) -> PassMeter:
    """A meter of what a method may spend, in passes: as its options say, else the context's epochs, else as usual."""
    if spend is None and context.epochs is not None and context.task is not None:
        from bitplan.tasks.base import samples_per_epoch

        epoch = EPOCH.passes * samples_per_epoch(context.task)
        return PassMeter(context.epochs * epoch, epoch=epoch)
    return PassMeter(usual if spend is None else spend)


def check_constraint(
    aim: BudgetConstraint | None, method: str, graph: Graph, choices: tuple[Precision, ...]
) -> BudgetConstraint:
    """The aim, where there is one, for these groups and choices."""
    if aim is None:
        raise InputError(
            f"{method} chooses within a budget: say which, --budget 70% (in Python: estimate(…, budget='70%'))"
        )
    if aim.groups != tuple(group.name for group in graph.selectable) or aim.choices != choices:
        raise InputError(f"the aim of {method} is for other groups or choices than it is to choose for: make it again")
    return aim
