"""Where a network uses its layers, as tracing saw it: what `quantize` cannot tell from names (docs/decisions/0012)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from bitplan.core.errors import suggestion
from bitplan.core.record import Value


class Use(Value):
    """One place at which a layer is multiplied: by which function, in the forward of which module.

    `module` is its path, empty for the model itself. `computed` says that a weight is computed there from parameters,
    where otherwise it is a parameter, a part of one or the same numbers in another order; `softmax` that a product of
    activations is followed by one before the next product, whose input is quantized too.
    """

    unless_usual: ClassVar[frozenset[str]] = frozenset({"computed", "softmax"})

    module: str
    function: str
    computed: bool = False
    softmax: bool = True


Uses = dict[str, tuple[Use, ...]]
"""Layer → all its uses, for those that are not simply used by their own module; None in a record: nobody looked."""


def check_uses(uses: Mapping[str, object] | None, layers: Iterable[str]) -> None:
    """Raise unless every layer that is said to be used exists."""
    known = set(layers)
    for name in uses or ():
        if name not in known:
            raise ValueError(f"layer {name!r}, of which uses are told, does not exist{suggestion(name, known)}")
