"""What measuring a network's layers on a machine found."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from bitplan.core.precision import Precision
from bitplan.core.record import Record, Value
from bitplan.core.records import Count

Seconds = Annotated[float, Field(ge=0)]


class MeasuredTime(Value):
    """Nanoseconds: the median over all rounds, and how far apart the middle half of them lies."""

    ns: Count
    spread: Count = 0


class WholeNetworkTime(Value):
    """A network measured as a whole, and what the times of its layers added up to when they were taken one by one."""

    taken: MeasuredTime
    layers: Count

    @property
    def share(self) -> float:
        """What the layers came to, as a share of the whole."""
        return self.layers / self.taken.ns if self.taken.ns else 0.0


class MixedNetworkTime(Value):
    """A network with every second group at the lowest choice, the others at the highest: what the layers' times say
    it takes, and what it took. `among_others` is by what what raising a layer adds was multiplied for it."""

    expected: Count
    taken: MeasuredTime
    among_others: Annotated[float, Field(gt=0)] = 1.0

    @property
    def error(self) -> float:
        """By how much it took longer than expected, as a share."""
        return self.taken.ns / self.expected - 1 if self.expected else 0.0


class Measuring(Record):
    """What is measured, and how: whatever differs makes another measurement of it."""

    again: ClassVar[str] = "delete the folder, and everything is measured again"
    model: str
    graph: str
    on: str
    runtime: str
    machine: str
    threads: Count
    batch: Count
    integer: bool
    options: dict[str, str | int | float | bool] = {}
    choices: tuple[Precision, ...]


class Rounds(Record):
    """Some rounds of a measurement: the seconds of each network as a whole, and of its layers, round by round."""

    again: ClassVar[str] = "delete it, and these rounds are run again"
    whole: dict[str, tuple[Seconds, ...]]
    layers: dict[str, dict[str, tuple[Seconds, ...]]]


class Latency(Record):
    """How long each layer of a network takes at each choice: as part of the whole network, which runs in `runtime`.

    `rows` are scaled so that they add up to the time of the whole network, of which `whole` says how far they were off;
    then what raising a layer adds is multiplied until they add up to a mixed network (`mixed.among_others`). What runs
    between layers counts for the layer before it. `alike` are choices that take the same time: their rows are equal.
    `beside` are layers that the runtime does not tell apart: their time is in those before them. `macs` tell whether
    another graph has layers of the same size.
    """

    about: Measuring
    rounds: Count
    macs: dict[str, Count]
    rows: dict[str, dict[Precision, MeasuredTime]]
    whole: dict[Precision, WholeNetworkTime]
    alike: tuple[tuple[Precision, ...], ...] = ()
    mixed: MixedNetworkTime | None = None
    beside: tuple[str, ...] = ()
