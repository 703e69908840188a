"""The nouns of curvature: some probes of a network's Hessian, and what they gave."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bitplan.core.record import Record
from bitplan.core.records import Name
from bitplan.core.studies import Finite
from bitplan.core.trials import Count


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


class Probed(Record):
    """vᵀHv of each probe, for each layer."""

    products: Annotated[tuple[tuple[Finite, ...], ...], Field(min_length=1)]
