"""What a search is: it proposes plans, a judge scores them, it learns. One loop for all of them."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

from bitplan.core.jobs import Job, Numbers, Outcome
from bitplan.core.method_facts import describe_method
from bitplan.core.option_parsing import read_named
from bitplan.core.precision import Precision
from bitplan.core.progress import Progress
from bitplan.core.records import Graph
from bitplan.core.registry import CHOOSERS, JUDGES, check_is
from bitplan.core.spend import PassMeter, Spend, charge
from bitplan.gains.base import Context, Gain, LayerGains, check_constraint, check_spend, meter_for
from bitplan.gains.finetuning import Trainings
from bitplan.gains.jobs import do_jobs
from bitplan.gains.lowering import rows_by_layer
from bitplan.selection.budget_constraint import BudgetConstraint, Picks, Repair
from bitplan.tasks.base import samples_per_epoch

Scored = Sequence[tuple[Picks, float]]
"""Plans and how good they are; more is better."""

_FRUITLESS = 50  # rounds in which nothing new is proposed, before a search is over


class Proposer(Protocol):
    """A search under way. It draws all its random numbers from the seed that it was started with."""

    @abstractmethod
    def propose(self) -> Sequence[Picks]:
        """Plans to be judged next, at once, on as many workers as there are; how many does not depend on these."""

    @abstractmethod
    def learn_(self, scored: Scored) -> None:
        """Take in how good they are: those within the budgets that came of what was proposed, known ones included."""


@dataclass(frozen=True)
class Search(Gain):
    """A frozen dataclass derived from this class, whose fields are its options, and which can be started.

    `judge` says how good a plan is: a registered name, with options behind a colon ("drift:samples=256"). `spend` is
    what may be spent, in passes of one sample through the network (backwards counts 2); where it is not said, the
    epochs of the context, or what `usual` evaluations take. The loop repairs what exceeds the budgets, judges no plan
    twice, stops where the next evaluation would exceed `spend`, and gives the best plan that it saw as gains for which
    that plan is the best selection. Its evaluations are jobs with ids, so that a killed search goes on from the
    context's store.
    """

    calibrates: ClassVar[bool] = True
    bound: ClassVar[bool] = True
    usual: ClassVar[int] = 256
    repair: ClassVar[Repair] = "exact"

    judge: str = "drift"
    spend: float | None = None

    def __post_init__(self) -> None:
        read_judge(self.judge)
        check_spend(self._name, self.spend)

    @abstractmethod
    def start(self, aim: BudgetConstraint, graph: Graph, seed: int) -> Proposer:
        """Begin, for an aim."""

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """Search, and give the best plan as gains."""
        aim = check_constraint(context.aim, self._name, graph, choices)
        bench, meter = self._begin(model, graph, choices, context)
        found = search(self, aim, graph, bench, meter, seed=context.seed, progress=context.progress)
        size = {} if context.task is None else {"samples_per_epoch": samples_per_epoch(context.task)}
        spent = f"{len(found.scores):,} plans, {meter.spent.passes:,.0f} passes"
        return LayerGains(
            rows_by_layer(graph, aim.rows(found.best)),
            counts=meter.spent.counts | size,
            work=found.seconds,
            spend=replace(meter.spent, labels=_looks_at_labels(self.judge)),
            notes=(f"gains: {self._name} gives the best of {spent}, for {', '.join(aim.budgets)} alone",),
        )

    def trainings(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Trainings | None:
        """Return the most trainings that the judge may do. None if it trains nothing."""
        bench, meter = self._begin(model, graph, choices, context)
        meter.charge(bench.once)
        return bench.trainings(meter.room(bench.price))

    def check_limit(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> None:
        """Refuse a limit that does not do for one evaluation."""
        self._begin(model, graph, choices, context)

    def _begin(
        self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context
    ) -> tuple[Bench, PassMeter]:  # fmt: skip
        """The judge at work, and a meter: what the options allow, else the context's epochs, else what is usual."""
        bench = read_judge(self.judge).bench(f"{self._name} (judge {self.judge})", model, graph, choices, context)
        meter = meter_for(self.spend, context, bench.once.passes + self.usual * bench.price.passes)
        meter.check(bench.once + bench.price, f"one evaluation by {self.judge}")
        return bench, meter

    @property
    def _name(self) -> str:
        return CHOOSERS.name_of(self)


def _looks_at_labels(judge: str) -> bool | None:
    """As the judge says of itself."""
    about = describe_method(read_judge(judge))
    return None if about is None else about.labels


@dataclass(frozen=True)
class FoundPlan:
    """The best plan, how good it is, how good every plan was in the order of judging, and the seconds of judging."""

    best: Picks
    score: float
    scores: tuple[float, ...]
    seconds: float


def search(
    method: Search,
    aim: BudgetConstraint,
    graph: Graph,
    bench: Bench,
    meter: PassMeter,
    *,
    seed: int,
    progress: Progress | None = None,
) -> FoundPlan:
    """Propose, judge, learn, until there is nothing left to spend or nothing new is proposed."""
    proposer, seen, seconds, fruitless = method.start(aim, graph, seed), dict[Picks, float](), 0.0, 0
    meter.charge(bench.once)
    charge(bench.once)
    total = min(meter.room(bench.price), aim.plans)
    while meter.room(bench.price) and len(seen) < aim.plans and fruitless < _FRUITLESS:
        asked = [aim.repair(picks, method.repair) for picks in proposer.propose()]
        new = list(dict.fromkeys(picks for picks in asked if picks not in seen))[: meter.room(bench.price)]
        fruitless = 0 if new else fruitless + 1
        meter.charge(bench.price, len(new))
        for picks, judged in zip(new, bench.judged([aim.lowered_groups(picks) for picks in new]), strict=True):
            seen[picks] = judged.score
            seconds += judged.seconds
        proposer.learn_([(picks, seen[picks]) for picks in asked if picks in seen])
        if progress is not None and new:
            progress(len(seen), total, f"best {max(seen.values()):.6g}")
    best = max(seen, key=lambda picks: seen[picks])  # of equals the first
    return FoundPlan(best, seen[best], tuple(seen.values()), seconds)


# --- What a judge is: it says how good a whole plan is, by one job per plan, and what that costs.

Lowering = Mapping[str, Precision]
"""A plan as it is judged: the groups that are below the highest choice, and what they are at."""


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

    def trainings(self, plans: int) -> Trainings | None:
        """Return the trainings for so many plans. None if nothing is trained."""
        return None


class PlanJudge(Protocol):
    """A frozen dataclass derived from this class, whose fields are its options.

    It leaves the model as it was, and says the same of the same plan for a seed.
    """

    @abstractmethod
    def bench(self, method: str, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Bench:
        """Look at the network at the highest choice and at the data; what cannot work is one line about `method`."""


def read_judge(written: str) -> PlanJudge:
    """Read "drift" or "drift:samples=256,batch_size=32": a judge and its options."""
    judge: PlanJudge = JUDGES.make(*read_named(written, "judge"))
    check_is(judge, PlanJudge, "judge")
    return judge


@dataclass(frozen=True)
class JobBench(Bench):
    """A bench whose plans are jobs: kept in the context's store, done on its engine.

    `job` makes the job of a plan, `work` does it, `score` reads its outcome. `train` returns the trainings of plans.
    """

    price: Spend
    method: str
    context: Context
    work: Callable[[Job], Numbers]
    job: Callable[[Lowering], Job]
    score: Callable[[Outcome], float]
    train: Callable[[int], Trainings] | None = None
    once: Spend = Bench.once

    def judged(self, plans: Sequence[Lowering]) -> list[Judged]:
        """One job each, and each once; the loop tells how far it is, not they."""
        jobs = [self.job(plan) for plan in plans]
        silent = dataclasses.replace(self.context, progress=None)
        done = do_jobs(self.work, jobs, silent, self.method)
        return [Judged(self.score(done[job.id]), done[job.id].seconds) for job in jobs]

    def trainings(self, plans: int) -> Trainings | None:
        """Return the trainings for so many plans. None if nothing is trained."""
        return None if self.train is None else self.train(plans)
