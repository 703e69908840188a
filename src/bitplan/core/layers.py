"""What a Graph is made of: layers, links, and the groups that are chosen for at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field, StrictInt, model_validator

from bitplan.core.precision import Precision
from bitplan.core.record import Value
from bitplan.core.rules import RuleName, precision_beside

Name = Annotated[str, Field(min_length=1)]
Count = Annotated[StrictInt, Field(ge=0)]


class Layer(Value):
    """One operation with weights, or one product of activations; `macs` are those of the example.

    A fixed layer says which `rule` fixed it, `why` in words, and whether somebody wrote that rule's precision. Where it
    is fixed only because it is linked to another layer, all three are that layer's, which `linked_to` names.
    """

    unless_usual: ClassVar[frozenset[str]] = frozenset({"written"})

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
        """Whether it is fixed as the first or the last layer itself, not through a link with it."""
        return self.rule in ("first", "last") and not self.linked_to

    @property
    def usual(self) -> bool:
        """Whether it is fixed by a rule that nobody wrote."""
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
