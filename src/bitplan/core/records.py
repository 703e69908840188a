"""The nouns of the flow: Graph, Gains, Costs, Plan (trials have their own file, `core/trials.py`)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, JsonValue, model_validator

from bitplan.core.errors import suggestion
from bitplan.core.integers import Integers
from bitplan.core.layers import Count as Count
from bitplan.core.layers import Group as Group
from bitplan.core.layers import Layer as Layer
from bitplan.core.layers import Link as Link
from bitplan.core.layers import Name as Name
from bitplan.core.older import graph_of_format_1
from bitplan.core.precision import Precision, PrecisionLike, why_not_choices
from bitplan.core.record import Record, Upgrade, Value, identity
from bitplan.core.spend import EPOCH, Spend
from bitplan.core.uses import Use, Uses, check_uses


class _Noted(Record):
    """What says in words which decisions were left to bitplan, one line each: ids do not tell it."""

    outside_id: ClassVar[frozenset[str]] = Record.outside_id | {"notes"}
    unless_usual: ClassVar[frozenset[str]] = frozenset({"notes"})

    notes: tuple[str, ...] = ()


class _Used(_Noted):
    """What may know where a network uses its layers; that is the network's, so ids do not tell it.

    `integers` is what integer kernels compute beside them. None means that nobody looked.
    """

    outside_id: ClassVar[frozenset[str]] = _Noted.outside_id | {"uses", "integers"}
    unless_usual: ClassVar[frozenset[str]] = _Noted.unless_usual | {"uses", "integers"}

    uses: Uses | None = None
    integers: Integers | None = None

    def uses_of(self, layer: str) -> tuple[Use, ...]:
        """What is told of a layer's uses: nothing where its name says it, or nobody looked."""
        return (self.uses or {}).get(layer, ())


class Graph(_Used):
    """The layers of a network in execution order, which of them are linked, and, if traced, where they are used."""

    older: ClassVar[Mapping[int, Upgrade]] = {1: graph_of_format_1}

    model: Name
    layers: Annotated[tuple[Layer, ...], Field(min_length=1)]
    links: tuple[Link, ...] = ()
    unreached: tuple[Name, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        layers: dict[str, Layer] = {}
        for layer in self.layers:
            if layer.name in layers:
                raise ValueError(f"layer {layer.name!r} appears twice")
            layers[layer.name] = layer
        check_links([link.layers for link in self.links], layers)
        check_uses(self.uses, layers)
        for link in self.links:
            if len({layers[name].fixed for name in link.layers}) > 1:
                raise ValueError(f"linked layers {', '.join(link.layers)} are fixed differently")
        return self

    @cached_property
    def id(self) -> str:
        """That of format 1, where `why` alone said the rule, so that gains of before still belong to their graph."""
        told = self.model_dump(mode="json", exclude={"layers": {"__all__": {"rule", "linked_to", "written"}}})
        return identity(told, type(self))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Linked layers together, every other layer alone, in execution order of first members."""
        layers = {layer.name: layer for layer in self.layers}
        linked = {name: link.layers for link in self.links for name in link.layers}
        together = {name: linked.get(name, (name,)) for name in layers}
        members = [names for name, names in together.items() if names[0] == name]
        return tuple(Group(layers=tuple(layers[name] for name in names)) for names in members)

    @cached_property
    def selectable(self) -> tuple[Group, ...]:
        """The groups that no rule fixes."""
        return tuple(group for group in self.groups if group.fixed is None)

    def fixed_beside(self, choices: Iterable[Precision]) -> dict[str, Precision]:
        """The precisions of the fixed layers, beside what the others have to choose from."""
        beside = [(group, group.fixed_beside(choices)) for group in self.groups]
        return {layer.name: fixed for group, fixed in beside if fixed for layer in group.layers}

    def describe_rules(self, fixed: Mapping[str, Precision]) -> tuple[str, ...]:
        """Return a line for each rule that fixed layers: which, and at which of these precisions."""
        ruled: dict[str, list[str]] = {}
        for layer in self.layers:
            if layer.rule is not None:
                ruled.setdefault(layer.rule, []).append(layer.name)
        return tuple(
            f"rule {rule!r} fixes {', '.join(names) if len(names) < 3 else f'{names[0]} and {len(names) - 1} more'} at "
            f"{', '.join(dict.fromkeys(str(fixed[name]) for name in names))}"
            for rule, names in ruled.items()
        )

    def link_of(self, layer: str) -> Link | None:
        """The link a layer belongs to, if any."""
        return next((link for link in self.links if layer in link.layers), None)


class _PerGroup(_Noted):
    """One row per selectable group, one entry per choice."""

    choices: tuple[Precision, ...]
    rows: dict[str, tuple[Any, ...]]
    graph: str

    @property
    @abstractmethod
    def label(self) -> str:
        """What they are the rows of: the method or the cost."""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        problem = why_not_choices(self.choices)
        if problem:
            raise ValueError(problem)
        return self


class Gains(_PerGroup):
    """What each group gains at each choice over the lowest one, by one method.

    `seconds` are those of work: of jobs on all workers together, whether done now or found in a store. `budgets` are
    those that a method chose within and that its gains hold for; none where they hold for all. `spend` is what the
    method spent, None where it does not say, and `samples_per_epoch` how many samples an epoch of training has.
    """

    outside_id: ClassVar[frozenset[str]] = _PerGroup.outside_id | {"spend", "samples_per_epoch"}
    unless_usual: ClassVar[frozenset[str]] = _PerGroup.unless_usual | {"budgets", "spend", "samples_per_epoch"}

    method: Name
    options: dict[str, JsonValue] = {}
    rows: dict[str, tuple[float, ...]]
    errors: dict[str, tuple[float, ...]] | None = None
    histograms: dict[str, tuple[Count, ...]] | None = None
    counts: dict[str, Count] = {}
    selector: Name = "exact"
    seed: int = 0
    budgets: tuple[str, ...] = ()
    seconds: float = 0.0
    spend: Spend | None = None
    samples_per_epoch: Count | None = None

    @property
    def label(self) -> str:
        """The method."""
        return self.method

    @property
    def epochs(self) -> float | None:
        """What was spent, in epochs of training; None where that is not known."""
        if self.spend is None:
            return None
        if not self.spend.passes:
            return 0.0
        return self.spend.passes / (EPOCH.passes * self.samples_per_epoch) if self.samples_per_epoch else None

    @model_validator(mode="after")
    def _finite(self) -> Self:
        for name, row in self.rows.items():
            _check_width(name, row, self.choices)
            for choice, value in zip(self.choices, row, strict=True):
                if not math.isfinite(value):
                    raise ValueError(f"the gain of {name!r} at {choice} is {value}, not a finite number")
            if row[0] != 0:
                raise ValueError(f"the gain of {name!r} at the lowest choice must be 0, not {row[0]}")
        for name, row in (self.errors or {}).items():
            if name not in self.rows:
                raise ValueError(f"an error is given for {name!r}, which has no gain")
            _check_width(name, row, self.choices)
            if not all(math.isfinite(value) and value >= 0 for value in row):
                raise ValueError(f"the standard errors of {name!r} must be finite and ≥ 0")
        return self


class Costs(_PerGroup):
    """What each group costs at each choice, and each fixed layer, in whole numbers.

    They count `unit`s, such as bit-MACs, bits or ns. Fixed layers without a number are `lacking`, and count 0. Where
    they are those of a `target`'s file, `places` gives, for groups some of whose choices take the same place there, the
    index of the widest of these for every choice.
    """

    unless_usual: ClassVar[frozenset[str]] = _PerGroup.unless_usual | {"lacking", "target", "places"}

    name: Name
    unit: str
    rows: dict[str, tuple[Count, ...]]
    fixed: dict[str, Count] = {}
    lacking: tuple[Name, ...] = ()
    target: str = ""
    places: dict[str, tuple[Count, ...]] = {}

    @property
    def label(self) -> str:
        """The cost."""
        return self.name

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name, row in self.rows.items():
            _check_width(name, row, self.choices)
        for name, row in self.places.items():
            if name not in self.rows or len(row) != len(self.choices) or max(row) >= len(row):
                raise ValueError(f"the places of {name!r} are not those of its {len(self.choices)} choices")
        return self


class Limit(Value):
    """One budget of a plan: what was asked for, what that is in units, and what the plan costs.

    Both count the choosable layers. `fixed` is what the fixed ones take of a budget for the whole network, beside that;
    None where they stand outside the budget. `shadow_price` is what one more percent of all costs would gain: exactly
    where the selector lists all selections, otherwise by the linear relaxation.
    """

    unless_usual: ClassVar[frozenset[str]] = frozenset({"fixed"})

    budget: str
    cost_name: Name
    capacity: Count
    cost: Count
    shadow_price: float = 0.0
    fixed: Count | None = None

    @model_validator(mode="after")
    def _within(self) -> Self:
        if self.cost > self.capacity:
            raise ValueError(f"the plan costs {self.cost} {self.cost_name}, over its capacity {self.capacity}")
        return self

    @property
    def slack(self) -> int:
        """Units left over."""
        return self.capacity - self.cost


class Plan(_Used):
    """A precision for every layer, and how it came about.

    `gain` is within `gap` of the best that any plan under the same budgets can reach (None: not proven). So much of the
    gap as is `rounding` only says that gains were rounded to whole numbers, for which the plan is that much nearer.
    `uses` are those of the graph it was made from. `target` is whose file its budgets count the bytes of.
    """

    outside_id: ClassVar[frozenset[str]] = _Used.outside_id | {"rounding"}
    unless_usual: ClassVar[frozenset[str]] = _Used.unless_usual | {"rounding", "target"}

    model: Name
    precisions: dict[str, Precision]
    links: tuple[tuple[Name, ...], ...] = ()
    method: str
    selector: str
    limits: tuple[Limit, ...] = ()
    gain: float = 0.0
    gap: Annotated[float, Field(ge=0)] | None = None
    rounding: Annotated[float, Field(ge=0)] = 0.0
    sources: dict[str, str] = {}
    target: str = ""

    @property
    def proof(self) -> str:
        """What is proven of it, in words."""
        if self.gap is None:
            return "not proven"
        if self.gap > self.rounding:
            return f"at most {self.gap:.2g} of gain below the best"
        return f"proven best up to the rounding of gains ({self.gap:.1g})" if self.gap else "proven best"

    @model_validator(mode="after")
    def _linked_alike(self) -> Self:
        check_links(self.links, self.precisions)
        check_uses(self.uses, self.precisions)
        for link in self.links:
            if len({self.precisions[name] for name in link}) > 1:
                raise ValueError(f"linked layers {', '.join(link)} have different precisions")
        return self

    @classmethod
    def uniform(cls, graph: Graph, precision: PrecisionLike) -> Plan:
        """Every selectable layer at one precision, the fixed ones as they are."""
        chosen = Precision.parse(precision)
        fixed = graph.fixed_beside([chosen])
        return cls(
            model=graph.model,
            precisions={layer.name: fixed.get(layer.name, chosen) for layer in graph.layers},
            links=tuple(link.layers for link in graph.links),
            method=str(chosen),
            selector="uniform",
            sources={"graph": graph.id},
            uses=graph.uses,
            integers=graph.integers,
            notes=graph.describe_rules(fixed),
        )


def check_links(links: list[tuple[str, ...]] | tuple[tuple[str, ...], ...], layers: Mapping[str, object]) -> None:
    """Raise unless every linked layer exists and is in one link only."""
    seen: set[str] = set()
    for link in links:
        for name in link:
            if name not in layers:
                raise ValueError(f"linked layer {name!r} does not exist{suggestion(name, layers)}")
            if name in seen:
                raise ValueError(f"layer {name!r} is in two links")
            seen.add(name)


def _check_width(name: str, row: tuple[float, ...] | tuple[int, ...], choices: tuple[Precision, ...]) -> None:
    if len(row) != len(choices):
        raise ValueError(f"{name!r} has {len(row)} values for {len(choices)} choices")
