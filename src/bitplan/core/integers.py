"""What an integer kernel computes beside the layers, as tracing saw it: norms after convolutions, and additions."""

from __future__ import annotations

from typing import ClassVar

from bitplan.core.naming import inside
from bitplan.core.record import Value


class Addition(Value):
    """An addition of two activations of one shape, in the forward of a module, of which a convolution makes one.

    `call` is its name there, numbered like those of products (`core/naming.py`). `left` and `right` say which argument
    of the module's forward an operand is, empty where it is none; `layers` are the convolutions that make operands,
    also those before the module that only a norm, ReLU or max pooling lies behind.
    """

    unless_usual: ClassVar[frozenset[str]] = frozenset({"left", "right"})

    module: str
    call: str
    left: str = ""
    right: str = ""
    layers: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the addition is called."""
        return inside(self.module, self.call)


class Integers(Value):
    """What `quantize(…, integer=True)` does beside quantizing layers.

    `norms` maps a convolution to the batch normalization that alone reads what it makes. `floats` are the residual
    additions that stay float, since no convolution makes an operand: an integer kernel would gain nothing there.
    `feeds` maps a layer to the convolution whose output it reads, as that left a norm, or what only cuts off or picks
    (ReLU, max pooling): an integer kernel gives 8 bits at most, also to a layer that would take more.
    """

    unless_usual: ClassVar[frozenset[str]] = frozenset({"additions", "norms", "floats", "feeds"})

    additions: tuple[Addition, ...] = ()
    norms: dict[str, str] = {}
    floats: tuple[str, ...] = ()
    feeds: dict[str, str] = {}
