"""What choosing costs, in passes of one sample through the network, and the meter that holds a method to a limit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bitplan.core.errors import InputError


@dataclass(frozen=True)
class Spend:
    """What was spent, or one thing's price: a pass forward counts 1, one back 2, whichever method asks for them."""

    forwards: float = 0.0
    backwards: float = 0.0
    trainings: int = 0
    evaluations: int = 0

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
        )

    def __mul__(self, times: int) -> Spend:
        return Spend(
            self.forwards * times, self.backwards * times, self.trainings * times, self.evaluations * times
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


@dataclass
class PassMeter:
    """What may be spent, in passes, and what is; owned by whoever runs a method, never by the method itself."""

    limit: float
    spent: Spend = field(default_factory=Spend)

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
            raise InputError(
                f"spend={self.limit:,.0f} is too little for {what}, which takes {price.passes:,.0f} passes: spend at "
                f"least that, or {less}"
            )
