"""What a Graph is made of: layers, links, and the groups that are chosen for at once."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StrictInt, model_validator

from bitplan.core.precision import Precision
from bitplan.core.record import Value
from bitplan.core.rules import RuleName

Name = Annotated[str, Field(min_length=1)]
Count = Annotated[StrictInt, Field(ge=0)]


class Layer(Value):
    """One operation with weights, or one product of activations; `macs` are those of the example.

    A fixed layer says which `rule` fixed it, and `why` in words. Where it is fixed only because it is linked to another
    layer, both are that layer's, which `linked_to` names.
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

    @property
    def weights(self) -> int:
        """Those of all members."""
        return sum(layer.weights for layer in self.layers)
