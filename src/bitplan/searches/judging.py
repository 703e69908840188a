"""What a judge is: it says how good a whole plan is, by one job per plan, and what that costs."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from bitplan.core.jobs import Dropped, Lowered
from bitplan.core.precision import Precision
from bitplan.core.protocols import check_is
from bitplan.core.record import Record
from bitplan.core.records import Graph
from bitplan.core.registry import JUDGES
from bitplan.core.spend import Spend
from bitplan.core.written import read_named
from bitplan.gains.base import Context
from bitplan.gains.finetuned import Expected
from bitplan.gains.measuring import finish

Lowering = Mapping[str, Precision]
"""A plan as it is judged: the groups that are below the highest choice, and what they are at."""
Job = TypeVar("Job", bound=Lowered | Dropped)
Outcome = TypeVar("Outcome", bound=Record)


class Judged(NamedTuple):
    """How good a plan is, more is better, and the seconds that it took to tell."""

    score: float
    seconds: float = 0.0


class Bench(Protocol):
    """A judge with a network before it; `price` is that of one plan, `once` what is paid before the first."""

    price: Spend
    once: Spend = Spend()

    @abstractmethod
    def judged(self, plans: Sequence[Lowering]) -> list[Judged]:
        """Score some plans at once, in their order."""

    def expected(self, plans: int) -> Expected | None:
        """What training so many plans is going to take; None where none is trained."""
        return None


class PlanJudge(Protocol):
    """A frozen dataclass derived from this class, whose fields are its options.

    It leaves the model as it was, and says the same of the same plan for a seed.
    """

    @abstractmethod
    def bench(self, method: str, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Bench:
        """Look at the network at the highest choice and at the data; what cannot work is one line about `method`."""


def judge_of(written: str) -> PlanJudge:
    """Read "drift" or "drift:samples=256,batch_size=32": a judge and its options."""
    judge: PlanJudge = JUDGES.make(*read_named(written, "judge"))
    check_is(judge, PlanJudge, "judge")
    return judge


@dataclass(frozen=True)
class JobBench(Bench, Generic[Job, Outcome]):
    """A bench whose plans are jobs, with outcomes of one kind; kept in the context's store, done on its engine."""

    price: Spend
    method: str
    context: Context
    work: Callable[[Job], Outcome]
    kind: type[Outcome]
    job: Callable[[Lowering], Job]
    score: Callable[[Outcome], float]
    forecast: Callable[[int], Expected] | None = None
    once: Spend = Bench.once

    def judged(self, plans: Sequence[Lowering]) -> list[Judged]:
        """One job each, and each once; the loop tells how far it is, not they."""
        jobs = [self.job(plan) for plan in plans]
        silent = dataclasses.replace(self.context, progress=None)
        done = finish(self.work, jobs, self.kind, silent, self.method)
        return [Judged(self.score(done[job.id]), getattr(done[job.id], "seconds", 0.0)) for job in jobs]

    def expected(self, plans: int) -> Expected | None:
        """As whoever made the bench can tell."""
        return None if self.forecast is None else self.forecast(plans)
