"""Which layers keep a fixed precision (the paper's section 3.4.1), as a value that reads what people write.

`graph/rules.py` applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializationInfo, field_validator, model_serializer

from bitplan.core.defaults import END, INSIDE, NARROW, NARROW_AT
from bitplan.core.precision import LEFT_ALONE, Precision, PrecisionLike
from bitplan.core.record import Value

RuleName = Literal["first", "last", "narrow", "embedding", "product", "pattern", "unquantized"]
"""Which rule fixed a layer: a field of the layer, so that nothing has to be read out of its reason."""

FREE = "free"
"""Written instead of a precision, it switches a rule off."""

_PRECISIONS: Mapping[str, RuleName] = {
    "first": "first",
    "last": "last",
    "narrow_at": "narrow",
    "embeddings": "embedding",
    "products": "product",
}
"""The fields of `Rules` that are the precision of a rule, and that rule."""


class Rules(Value):
    """The paper's rules by default. None, or "free", switches a precision rule off, `narrow=0` the one on width.

    A precision that nobody wrote follows the choices (`for_choices`). Layers with few inputs get the highest of them,
    which is w4a4 in the paper. No other rule then gives fewer bits than the lowest choice.

    The rule on width is left out where it would leave no choice, unless somebody wrote it: `narrow=128` holds.

    `fix` and `free` hold shell wildcards on layer names: `fix={"stem.*": "w8a8"}`, or as the command line writes it
    `fix=["stem.*=w8a8"]`. They come before the other rules, `free` before `fix`.
    """

    first: Precision | None = Precision.parse(END)
    last: Precision | None = Precision.parse(END)
    narrow: Annotated[int, Field(ge=0)] = NARROW
    narrow_at: Precision = Precision.parse(NARROW_AT)
    embeddings: Precision | None = Precision.parse(INSIDE)
    products: Precision = Precision.parse(INSIDE)
    fix: dict[str, Precision] = {}
    free: tuple[str, ...] = ()

    @classmethod
    def read(cls, **written: Any) -> Self:
        """The rules as people write them: `first="free"`, `fix=["stem.*=w8a8"]`."""
        return cls.model_validate(written)

    def for_choices(self, written: str | Iterable[PrecisionLike]) -> Self:
        """Return these rules with every precision that was not said as it is beside such choices (`precision_beside`).

        Beside w2a16 and w4a16 a first layer is w8a16, and products of activations are left alone. Patterns are as
        written.
        """
        parts = [part.strip() for part in written.split(",")] if isinstance(written, str) else list(written)
        choices = [Precision.parse(part) for part in parts]
        unsaid = {name: getattr(self, name) for name in _PRECISIONS if name not in self.model_fields_set}
        if not choices or not unsaid:
            return self
        changed = {name: precision_beside(_PRECISIONS[name], usual, choices) for name, usual in unsaid.items()}
        return self.model_construct(self.model_fields_set, **dict(self) | changed)  # what was said stays told apart

    def settled(self, choices: tuple[Precision, ...]) -> Self:
        """These rules beside a study's choices; its file, which is read again, does not tell what somebody said.

        Where inputs are left alone, all of it counts as said from now on; elsewhere only the width has to.
        """
        beside = self.for_choices(choices)
        quantizes = any(choice.quantizes_inputs for choice in choices)
        return self.model_construct({"narrow"} if quantizes else set(type(self).model_fields), **dict(beside))

    @field_validator("first", "last", "embeddings", mode="before")
    @classmethod
    def _read_free(cls, written: Any) -> Any:
        return None if written == FREE else written

    @field_validator("fix", mode="before")
    @classmethod
    def _read_fix(cls, written: Any) -> Any:
        if isinstance(written, Mapping) or not isinstance(written, Iterable) or isinstance(written, str):
            return written
        return dict(_read_pair(text) for text in written)

    @model_serializer(mode="plain")
    def _as_written(self, info: SerializationInfo) -> dict[str, Any]:
        """Return the fields as people write them."""
        usual = type(self)()
        names = list(type(self).model_fields)
        if info.exclude_defaults:
            names = [name for name in names if getattr(self, name) != getattr(usual, name)]
        return {name: _written(getattr(self, name)) for name in names}


def precision_beside(rule: RuleName, usual: Precision, choices: Sequence[Precision]) -> Precision:
    """Return the precision that a rule means, which nobody wrote, beside the choices that the other layers have.

    Narrow layers get the highest choice. All others keep what is usual, unless the lowest choice has more bits. If no
    choice quantizes inputs, products of activations are therefore left alone.
    """
    if rule == "narrow" and len(choices) > 1:
        return choices[-1]
    raised = usual.at_least(choices[0])
    return raised if rule != "product" or raised.quantizes_inputs else LEFT_ALONE


def _read_pair(text: str) -> tuple[str, PrecisionLike]:
    pattern, equals, precision = text.rpartition("=")
    if not equals or not pattern:
        raise ValueError(f"{text!r} is not PATTERN=PRECISION, such as 'stem.*=w8a8'")
    return pattern, precision


def _written(value: Any) -> Any:
    """The value of a field as JSON has it."""
    if value is None:
        return FREE
    if isinstance(value, dict):
        return [f"{pattern}={precision}" for pattern, precision in value.items()]
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Precision) else value
