"""A judge that adds up numbers of a table, and aims whose best plan is known by trying all of them."""

import itertools
import random
from dataclasses import dataclass

import numpy as np

from bitplan.core.precision import parse_choices
from bitplan.core.records import Graph, Layer
from bitplan.core.spend import PassMeter, Spend
from bitplan.plugins.methods.searches.base import Bench, Judged, search
from bitplan.selection.budget_constraint import BudgetConstraint

PRICE = Spend(forwards=10, evaluations=1)


@dataclass
class Additive(Bench):
    """Every group is worth a number at each choice; `seen` are the plans that it was asked for."""

    aim: BudgetConstraint
    worth: np.ndarray  # (G, C)
    price: Spend = PRICE

    def __post_init__(self):
        self.seen = []

    def total(self, picks):
        return float(self.worth[range(len(picks)), list(picks)].sum())

    def judged(self, plans):
        made = [tuple(self._pick(plan, name) for name in self.aim.groups) for plan in plans]
        self.seen += made
        return [Judged(self.total(picks)) for picks in made]

    def _pick(self, plan, name):
        return self.aim.choices.index(plan[name]) if name in plan else len(self.aim.choices) - 1


def problem(groups, choices="w2a2,w4a4", share=0.7, seed=0):
    """A graph of so many layers, an aim within a share of their cost, and a judge of random worths."""
    draw, precisions = random.Random(seed), parse_choices(choices)
    layers = tuple(
        Layer(name=f"g{place}", kind="conv2d", macs=draw.randint(50, 500), weights=90 * (1 + place % 3), in_features=9)
        for place in range(groups)
    )
    graph = Graph(model="additive", layers=layers)
    costs = np.array([[[layer.macs * bits.weight_bits for bits in precisions] for layer in layers]])
    capacity = int(share * costs[0, :, -1].sum())
    aim = BudgetConstraint(tuple(layer.name for layer in layers), precisions, costs, np.array([capacity]), ("a share",))
    steps = [[0.0, *(draw.random() for _ in precisions[1:])] for _ in layers]
    return graph, aim, Additive(aim, np.cumsum(steps, axis=1))


def best_of_all(aim, bench):
    """The greatest worth within the aim, by trying every plan."""
    every = itertools.product(range(len(aim.choices)), repeat=len(aim.groups))
    return max(bench.total(picks) for picks in every if aim.fits(picks))


def found(method, groups, evaluations, seed, problem_seed=0, **more):
    """What a search finds with so many evaluations."""
    graph, aim, bench = problem(groups, seed=problem_seed, **more)
    return search(method, aim, graph, bench, PassMeter(evaluations * PRICE.passes), seed=seed)
