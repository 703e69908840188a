"""The nouns of curvature: some probes of a network's Hessian, and what they gave."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bitplan.core.jobs import _Outcome
from bitplan.core.record import Record
from bitplan.core.records import Name
from bitplan.core.studies import Finite
from bitplan.core.trials import Count, NotNegative


class Probes(Record):
    """A job: probes number `first` and following of the loss of some samples; everything that they depend on."""

    network: str
    weights: str
    task: str
    layers: tuple[Name, ...]
    sizes: tuple[Count, ...]
    seed: int
    first: Annotated[int, Field(ge=0)]
    count: Count

    @property
    def words(self) -> str:
        """Which probes, for people."""
        return f"Hessian probes {self.first + 1} to {self.first + self.count}"


class Powers(Probes):
    """A job: power iterations of the layers number `first` and following."""

    iterations: Count
    tolerance: NotNegative

    @property
    def words(self) -> str:
        """Which layers, for people."""
        return f"power iteration of layers {self.first + 1} to {self.first + self.count}"


class Probed(_Outcome):
    """vᵀHv of each probe, for each layer."""

    products: Annotated[tuple[tuple[Finite, ...], ...], Field(min_length=1)]


class Eigenvalues(_Outcome):
    """The eigenvalue of largest magnitude of each layer's block."""

    values: Annotated[tuple[Finite, ...], Field(min_length=1)]
