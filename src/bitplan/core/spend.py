"""What choosing costs, in passes of one sample through the network: charged where passes are made, to an open meter.

Whoever runs a network says `charge(Spend(…))`; `with metering() as meter:` gathers what is charged meanwhile. Without
an open meter nothing is counted. What jobs spend is written into their outcomes and charged when these are taken, so
that an estimate from a store says what one without it says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from bitplan.core.errors import InputError

Amount = Annotated[float, Field(ge=0)]
Times = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Spend:
    """What was spent, or one thing's price: a pass forward counts 1, one back 2, whichever method asks for them.

    `evaluations` are networks other than the one that was given, lowered or disturbed, that were run or trained.
    `labels` says whether labels were looked at (None: nobody knows), `tested` whether samples of the test split were.
    """

    forwards: Amount = 0.0
    backwards: Amount = 0.0
    trainings: Times = 0
    evaluations: Times = 0
    labels: bool | None = False
    tested: bool = False

    @property
    def passes(self) -> float:
        """All of it in one number."""
        return self.forwards + 2 * self.backwards

    def __add__(self, other: Spend) -> Spend:
        return Spend(
            self.forwards + other.forwards,
            self.backwards + other.backwards,
            self.trainings + other.trainings,
            self.evaluations + other.evaluations,
            _either(self.labels, other.labels),
            self.tested or other.tested,
        )

    def __mul__(self, times: int) -> Spend:
        return Spend(
            self.forwards * times, self.backwards * times, self.trainings * times, self.evaluations * times,
            self.labels, self.tested,
        )  # fmt: skip

    @property
    def counts(self) -> dict[str, int]:
        """As gains write it down."""
        return {
            "spend": math.ceil(self.passes),
            "samples": math.ceil(self.forwards),
            "trainings": self.trainings,
            "evaluations": self.evaluations,
        }


EPOCH = Spend(forwards=1, backwards=1)
"""What an epoch of training takes for each of its samples."""


def _either(one: bool | None, other: bool | None) -> bool | None:
    """True where one is; where none is, unknown where one is."""
    return True if one or other else None if None in (one, other) else False


@dataclass
class ChargeMeter:
    """What was charged while it was open; `known` is False where some of it nobody could tell."""

    spent: Spend = field(default_factory=Spend)
    known: bool = True


_OPEN: ContextVar[ChargeMeter | None] = ContextVar("_OPEN", default=None)


@contextmanager
def meter_spend() -> Iterator[ChargeMeter]:
    """Gather what is charged in this block, and only here: a meter around it is not charged with it."""
    meter = ChargeMeter()
    token = _OPEN.set(meter)
    try:
        yield meter
    finally:
        _OPEN.reset(token)


@contextmanager
def pause_charging() -> Iterator[None]:
    """A block whose passes are nobody's choosing: trying a task out, looking whether a training does harm."""
    token = _OPEN.set(None)
    try:
        yield
    finally:
        _OPEN.reset(token)


def charge(spend: Spend | None) -> None:
    """Count what is spent, on the meter that is open, if one is; None is an amount that is not known."""
    meter = _OPEN.get()
    if meter is None:
        return
    if spend is None:
        meter.known = False
    else:
        meter.spent = meter.spent + spend


@dataclass
class PassMeter:
    """What may be spent, in passes, and what is; owned by whoever runs a method, never by the method itself."""

    limit: float
    spent: Spend = field(default_factory=Spend)
    epoch: float = 0.0
    """The passes of an epoch, where the limit was said in epochs."""

    def room(self, price: Spend) -> int:
        """How often this price can still be paid."""
        left = self.limit - self.spent.passes
        return max(0, math.floor(left / price.passes)) if price.passes else 2**62

    def charge(self, price: Spend, times: int = 1) -> None:
        """Count what is spent; who spends asks first whether there is room."""
        assert times <= self.room(price), f"{times} × {price.passes} passes do not fit into {self.limit}"
        self.spent = self.spent + price * times

    def check(self, price: Spend, what: str, *, less: str = "judge by fewer samples (judge=drift:samples=64)") -> None:
        """Refuse a limit that does not do for once; `less` says how it could take less."""
        if not self.room(price):
            allowed, takes = (f"={self.limit:,.0f}", "") if not self.epoch else (
                f" = {self.limit / self.epoch:.3g} epochs", f", {price.passes / self.epoch:.2g} epochs"
            )  # fmt: skip
            raise InputError(
                f"spend{allowed} is too little for {what}, which takes {price.passes:,.0f} passes{takes}: spend at "
                f"least that, or {less}"
            )
