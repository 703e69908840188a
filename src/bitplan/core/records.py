"""The nouns of the flow: Graph, Gains, Costs, Plan (trials have their own file, `core/trials.py`)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, JsonValue, StrictInt, model_validator

from bitplan.core.errors import suggestion
from bitplan.core.naming import join_names
from bitplan.core.precision import Precision, PrecisionLike, why_not_choices
from bitplan.core.record import Record, Value
from bitplan.core.rules import RuleName, precision_beside
from bitplan.core.spend import EPOCH, Spend

Name = Annotated[str, Field(min_length=1)]
Count = Annotated[StrictInt, Field(ge=0)]


class Layer(Value):
    """One operation with weights, or one product of activations; `macs` are those of the example.

    A fixed layer says which `rule` fixed it, `why` in words, and whether somebody wrote that rule's precision. Where it
    is fixed only because it is linked to another layer, all three are that layer's, which `linked_to` names.
    """

    name: Name
    kind: Name
    macs: Count
    weights: Count
    in_features: Count
    fixed: Precision | None = None
    rule: RuleName | None = None
    linked_to: str = ""
    why: str = ""
    written: bool = False

    @model_validator(mode="after")
    def _reasoned(self) -> Self:
        if not (self.fixed is None) == (self.rule is None) == (not self.why):
            raise ValueError(f"layer {self.name!r}: a fixed precision, its rule and its reason go together")
        if self.linked_to and self.rule is None:
            raise ValueError(f"layer {self.name!r} shares the rule of {self.linked_to!r} but is not fixed")
        return self

    @property
    def is_end(self) -> bool:
        """True if it is fixed as the first or the last layer itself, not through a link."""
        return self.rule in ("first", "last") and not self.linked_to

    @property
    def usual(self) -> bool:
        """True if a default rule fixes it, not one that somebody wrote."""
        return self.fixed is not None and self.rule != "pattern" and not self.written

    def fixed_beside(self, choices: Sequence[Precision]) -> Precision:
        """Return the precision of a fixed layer beside such choices."""
        assert self.fixed is not None
        assert self.rule is not None
        return precision_beside(self.rule, self.fixed, choices) if self.usual else self.fixed


class Link(Value):
    """Layers that read one and the same tensor, and where that tensor comes from."""

    layers: Annotated[tuple[Name, ...], Field(min_length=2)]
    through: str


class Group(Value):
    """What is chosen at once: a layer, or linked layers. Its name is that of its first member."""

    layers: Annotated[tuple[Layer, ...], Field(min_length=1)]

    @property
    def name(self) -> str:
        """The first member's."""
        return self.layers[0].name

    @property
    def fixed(self) -> Precision | None:
        """The precision that a rule gives to all members, if any."""
        return self.layers[0].fixed

    def fixed_beside(self, choices: Iterable[Precision]) -> Precision | None:
        """Return the same beside such choices, as `precision_beside` says of rules that nobody wrote."""
        if self.fixed is None:
            return None
        offered = list(choices)
        return max((layer.fixed_beside(offered) for layer in self.layers), key=Precision.height)

    @property
    def weights(self) -> int:
        """Those of all members."""
        return sum(layer.weights for layer in self.layers)


class Use(Value):
    """One place at which a layer is multiplied: by which function, in the forward of which module.

    `module` is its path, empty for the model itself. `computed` says that a weight is computed there from parameters,
    where otherwise it is a parameter, a part of one or the same numbers in another order; `softmax` that a product of
    activations is followed by one before the next product, whose input is quantized too.
    """

    module: str
    function: str
    computed: bool = False
    softmax: bool = True


Uses = dict[str, tuple[Use, ...]]
"""Layer → all its uses, for those that are not simply used by their own module; None in a record: nobody looked."""


def check_uses(uses: Mapping[str, object] | None, layers: Iterable[str]) -> None:
    """Raise ValueError unless every layer with uses exists."""
    known = set(layers)
    for name in uses or ():
        if name not in known:
            raise ValueError(f"layer {name!r}, of which uses are told, does not exist{suggestion(name, known)}")


class Addition(Value):
    """An addition of two activations of one shape, in the forward of a module, of which a convolution makes one.

    `call` is its name there, numbered like those of products (`core/naming.py`). `left` and `right` say which argument
    of the module's forward an operand is, empty where it is none; `layers` are the convolutions that make operands,
    also those before the module that only a norm, ReLU or max pooling lies behind.
    """

    module: str
    call: str
    left: str = ""
    right: str = ""
    layers: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the addition is called."""
        return join_names(self.module, self.call)


class Integers(Value):
    """What `quantize(…, integer=True)` does beside quantizing layers.

    `norms` maps a convolution to the batch normalization that alone reads what it makes. `floats` are the residual
    additions that stay float, since no convolution makes an operand: an integer kernel would gain nothing there.
    `feeds` maps a layer to the convolution whose output it reads, as that left a norm, or what only cuts off or picks
    (ReLU, max pooling): an integer kernel gives 8 bits at most, also to a layer that would take more.
    """

    additions: tuple[Addition, ...] = ()
    norms: dict[str, str] = {}
    floats: tuple[str, ...] = ()
    feeds: dict[str, str] = {}


class _Noted(Record):
    """A record whose `notes` say which decisions bitplan made, one line each. The id leaves them out."""

    outside_id: ClassVar[frozenset[str]] = Record.outside_id | {"notes"}

    notes: tuple[str, ...] = ()


class _Used(_Noted):
    """A record that may say where a network uses its layers. The id leaves that out: it is a fact about the network.

    `integers` says what integer kernels compute beside the layers. None means that tracing did not look.
    """

    outside_id: ClassVar[frozenset[str]] = _Noted.outside_id | {"uses", "integers"}

    uses: Uses | None = None
    integers: Integers | None = None

    def uses_of(self, layer: str) -> tuple[Use, ...]:
        """Return the uses of a layer: none if its name says them, or if tracing did not look."""
        return (self.uses or {}).get(layer, ())


class Graph(_Used):
    """The layers of a network in execution order, which of them are linked, and, if traced, where they are used."""

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
        """Return the precisions of the fixed layers beside the choices of the others."""
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
        """Return the link that a layer belongs to, if any."""
        return next((link for link in self.links if layer in link.layers), None)


class _PerGroup(_Noted):
    """One row per selectable group, one entry per choice."""

    choices: tuple[Precision, ...]
    rows: dict[str, tuple[Any, ...]]
    graph: str

    @property
    @abstractmethod
    def label(self) -> str:
        """The method or the cost that gave the rows."""

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

    method: Name
    options: dict[str, JsonValue] = {}
    rows: dict[str, tuple[Annotated[float, Field(allow_inf_nan=True)], ...]]  # `_finite` says which are not
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
        """The passes that were spent, in epochs of training; None if that is not known."""
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
        """What is proven about its gain, in words."""
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


# The names of weight files.

ENDINGS = (".safetensors", ".pth", ".pt", ".bin", ".th", ".gguf")
"""How files of weights usually end; .gguf is a network of its own (`models/pretrained.py`), not weights for another."""

ABOUT, TENSORS = "checkpoint.json", "model.safetensors"
"""The two files of a checkpoint folder: this record, and the tensors."""


class Checkpoint(Record):
    """A model saved by bitplan: its plan (None: a float model), and where both come from.

    `spec` is a name of the zoo, or "config.json", which then describes a network of transformers' and lies beside it:
    the only ways a checkpoint names code. `tied` maps a tensor's name to the one
    it is stored under, where both are the same tensor. `sha256` is that of the file of tensors.
    """

    outside_id: ClassVar[frozenset[str]] = Record.outside_id | {"sha256"}

    plan: Plan | None = None
    options: dict[str, JsonValue] = {}
    spec: str | None = None
    graph: str | None = None
    tied: dict[str, str] = {}
    versions: dict[str, str] = {}
    sha256: str = ""
