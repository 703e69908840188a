"""What a comparison of an exported file with its model found."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from bitplan.core.record import Record, Value
from bitplan.core.records import Count

ENOUGH = 0.999  # the share of predictions that must be equal
NEAR = 0.9  # the same where a runtime rounds what the network does not
NEAR_SCORE = 0.02  # by so much of itself a score may then differ


class Speed(Value):
    """Size and time of an exported file beside the float network, both in one runtime."""

    runtime: str
    batch: Count
    threads: Count
    bytes: Count
    float_bytes: Count
    seconds: Annotated[float, Field(gt=0)]
    float_seconds: Annotated[float, Field(gt=0)]

    @property
    def smaller(self) -> float:
        """How many times smaller the file is."""
        return self.float_bytes / self.bytes

    @property
    def faster(self) -> float:
        """How many times faster it runs; below 1 it is slower."""
        return self.float_seconds / self.seconds


class Verdict(Record):
    """One file against one model, sample by sample.

    A sample is `close` if all its outputs are within the tolerance. The others begin at a `tie` (a value that falls
    between two codes, within floating-point error), are `unexplained`, or were not looked at. `control` is the share of
    predictions that the model itself keeps in double precision, on `control_samples`: in a deep network a flipped code
    flips others behind it, so that no two ways to add up agree. `rounds` says what a runtime rounds that the
    network does not; then no output is close, and predictions and scores tell how near it is.
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
    control: Annotated[float, Field(ge=0, le=1)] | None = None
    control_samples: Count = 0
    speed: Speed | None = None
    rounds: str = ""

    @property
    def share(self) -> float:
        """Of predictions that are equal."""
        return self.predictions_equal / self.predictions if self.predictions else 1.0

    @property
    def enough(self) -> bool:
        """Whether at least 99.9 % of the predictions are equal."""
        return self.share >= ENOUGH

    @property
    def as_itself(self) -> bool:
        """Whether the file is as near to the model as the model is to itself, within three standard errors.

        A control without any difference counts as half a sample of one: few samples are no certainty.
        """
        if self.control is None or not self.control_samples or not self.samples:
            return False
        control = min(self.control, 1 - 0.5 / self.control_samples)
        error = math.sqrt(control * (1 - control) * (1 / self.control_samples + 1 / self.samples))
        return self.share >= self.control - 3 * error

    @property
    def passed(self) -> bool:
        """Equal codes, nothing unexplained, and enough equal predictions, or as many as the model has with itself."""
        if self.rounds:
            return self.codes_equal and self.near
        return self.codes_equal and not self.unexplained and (self.enough or self.as_itself)

    @property
    def near(self) -> bool:
        """Whether nine of ten predictions are equal, and scores, where there are any, differ by 2 % at most."""
        if self.score is None or self.reference is None:
            return self.share >= NEAR
        return self.share >= NEAR and abs(self.score - self.reference) <= NEAR_SCORE * abs(self.reference)
