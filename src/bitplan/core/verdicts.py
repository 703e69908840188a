"""What a comparison of an exported file with its model found."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bitplan.core.record import Record
from bitplan.core.records import Count

ENOUGH = 0.999  # the share of predictions that must be equal


class Verdict(Record):
    """One file against one model, sample by sample.

    A sample is `close` if all its outputs are within the tolerance. The others begin at a `tie` (a value that falls
    between two codes, within floating-point error), are `unexplained`, or were not looked at.
    """

    file: str
    codes_equal: bool
    layers: Count
    samples: Count
    close: Count
    ties: Count
    unexplained: Count
    predictions: Count
    predictions_equal: Count
    largest: float
    tolerance: Annotated[float, Field(gt=0)]
    metric: str = ""
    score: float | None = None
    reference: float | None = None

    @property
    def passed(self) -> bool:
        """Equal codes, nothing unexplained, and at least 99.9 % equal predictions."""
        enough = self.predictions_equal >= ENOUGH * self.predictions
        return self.codes_equal and not self.unexplained and enough
