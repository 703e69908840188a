"""Searches and judges that break one clause each."""

import itertools
import math
from dataclasses import dataclass

import torch

from bitplan.core.spend import Spend
from bitplan.gains.base import LayerGains
from bitplan.plugins.methods.searches.base import Bench, Judged, PlanJudge, Proposer, Search
from bitplan.plugins.methods.searches.evolution import RandomSearch
from bitplan.testing import check_judge, check_search

CALLS = itertools.count()


@dataclass
class Listing(Proposer):
    """Proposes whatever is next."""

    plans: itertools.chain

    def propose(self):
        return [next(self.plans)]

    def learn_(self, scored):
        pass


def searching(first):
    """A search that proposes what this gives for an aim, then every group at the lowest, then the highest."""

    @dataclass(frozen=True)
    class Mine(Search):
        def start(self, aim, graph, seed):
            low = (0,) * len(aim.groups)
            return Listing(itertools.cycle([first(aim), low, aim.top]))

    return Mine()


def finding(change):
    """A search whose gains are changed."""

    @dataclass(frozen=True)
    class Mine(RandomSearch):
        def layer_gains(self, model, graph, choices, context):
            found = super().layer_gains(model, graph, choices, context)
            values, counts = change(dict(found.values), dict(found.counts), model, context)
            return LayerGains(values, counts=counts)

    return Mine()


def kept_apart(values, counts, model, context):
    return values, counts | {"stored": int(context.store is not None and next(CALLS) % 2)}


def counted(values, counts, model, context):
    return values, counts | {"calls": next(CALLS)}


def spendthrift(values, counts, model, context):
    return values, counts | {"spend": 10**6}


def blended(values, counts, model, context):
    return {name: tuple(value / 2 for value in row) for name, row in values.items()}, counts


@dataclass
class Scoring(Bench):
    score: object
    price: Spend

    def judged(self, plans):
        return [Judged(self.score(plan)) for plan in plans]


ONE = Spend(forwards=1, evaluations=1)


def judging(score, price=ONE, touch=lambda model: None):
    @dataclass(frozen=True)
    class Mine(PlanJudge):
        def bench(self, method, model, graph, choices, context):
            touch(model)
            return Scoring(score, price)

    return Mine()


def shift(model):
    with torch.no_grad():
        next(model.parameters()).add_(1)


def failing(*given):
    raise ZeroDivisionError("no such luck")


BROKEN = [
    ("it is derived from Search", lambda: check_search(object())),
    ("it finds a plan", lambda: check_search(searching(failing))),
    ("the same seed finds the same", lambda: check_search(finding(counted))),
    ("what is in the store is found there", lambda: check_search(finding(kept_apart))),
    ("no more is spent than may be", lambda: check_search(finding(spendthrift))),
    ("the best selection is the plan that it found", lambda: check_search(finding(blended))),
    ("it has all that a judge has", lambda: check_judge(object())),
    ("it judges every plan", lambda: check_judge(judging(failing))),
    ("a plan has a price", lambda: check_judge(judging(lambda plan: 0.0, Spend()))),
    ("one finite score for each plan", lambda: check_judge(judging(lambda plan: math.nan))),
    ("a plan is judged alike, alone or beside others", lambda: check_judge(judging(lambda plan: next(CALLS)))),
    ("the model stays as it was", lambda: check_judge(judging(lambda plan: 0.0, touch=shift))),
]


def right():
    check_search(searching(lambda aim: aim.top))
    check_judge(judging(len))
