"""Random plans, and plans that descend from good ones: the searches that need nothing but scores."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from bitplan.core.errors import InputError
from bitplan.core.method_facts import About
from bitplan.core.records import Graph
from bitplan.plugins.methods.searches.base import Proposer, Scored, Search
from bitplan.selection.budget_constraint import BudgetConstraint, Picks

_TRIES = 20  # at a child that nobody has seen


@dataclass(frozen=True)
class RandomSearch(Search):
    """Random plans that use the budget up: the control of every search, with the same judge and the same spend.

    `together` plans are judged at once.
    """

    about: ClassVar[About] = About(True, passes="P · judge, per budget", source="a control")

    together: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("random_search", together=self.together)

    def start(self, aim: BudgetConstraint, graph: Graph, seed: int) -> Proposer:
        """Nothing is learned."""
        return _Lots(aim, random.Random(seed), self.together)


@dataclass(frozen=True)
class Evolution(Search):
    """Plans that descend from the best of a few that are drawn, by another choice at one group.

    The tournaments of JASQ (Chen et al. 2018, "Joint Neural Architecture Search and Quantization"), for bits alone. Of
    a `population` of random plans, `tournament` are drawn; the best of these gets another choice at one group, its
    child is judged and joins, and the worst of all is dropped. `together` children are judged at once. Recalled, not
    read: the sizes, and that a plan above the limit had its fitness divided by the excess. Here a child is made to fit
    instead: groups in a random order are lowered until it does, and then others raised as far as the budget goes.
    """

    about: ClassVar[About] = About(True, passes="P · judge, per budget", source="JASQ, Chen et al. 2018")

    population: int = 64
    tournament: int = 16
    together: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("evolution", population=self.population, tournament=self.tournament, together=self.together)

    def start(self, aim: BudgetConstraint, graph: Graph, seed: int) -> Proposer:
        """With nobody yet."""
        return _Evolving(aim, random.Random(seed), self)


def _check(method: str, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"{method}: {name} must be at least 1, not {count}")


@dataclass
class _Lots(Proposer):
    aim: BudgetConstraint
    draw: random.Random
    together: int

    def propose(self) -> Sequence[Picks]:
        return [drawn(self.aim, self.draw) for _ in range(self.together)]

    def learn_(self, scored: Scored) -> None:
        pass


@dataclass
class _Evolving(Proposer):
    aim: BudgetConstraint
    draw: random.Random
    options: Evolution
    living: dict[Picks, float] = field(default_factory=dict)
    known: set[Picks] = field(default_factory=set)

    def propose(self) -> Sequence[Picks]:
        """The first population, then children of those that live."""
        if not self.living:
            return [drawn(self.aim, self.draw) for _ in range(self.options.population)]
        return [self._child() for _ in range(self.options.together)]

    def learn_(self, scored: Scored) -> None:
        """Who is new joins, and as many of the worst are dropped."""
        self.living |= {picks: score for picks, score in scored if picks not in self.known}
        self.known |= {picks for picks, _ in scored}
        while len(self.living) > self.options.population:
            del self.living[min(self.living, key=lambda picks: self.living[picks])]

    def _child(self) -> Picks:
        """One that nobody has seen, if some tries find any."""
        child: Picks = ()
        for _ in range(_TRIES):
            child = self._mutated(self._parent())
            if child not in self.known:
                break
        return child

    def _parent(self) -> Picks:
        entered = self.draw.sample(list(self.living), min(self.options.tournament, len(self.living)))
        return max(entered, key=lambda picks: self.living[picks])

    def _mutated(self, picks: Picks) -> Picks:
        """Another choice at one group, and the others in a random order made to fit beside it."""
        groups = list(range(len(picks)))
        group = self.draw.choice(groups)
        others = [choice for choice in range(len(self.aim.choices)) if choice != picks[group]] or [picks[group]]
        child = (*picks[:group], self.draw.choice(others), *picks[group + 1 :])
        order = [other for other in shuffled(groups, self.draw) if other != group] + [group]
        return self.aim.raised(self.aim.lowered(child, order), order)


def drawn(aim: BudgetConstraint, draw: random.Random) -> Picks:
    """A random plan: groups in a random order lowered until it fits, then others raised as far as the budget goes."""
    groups = range(len(aim.groups))
    picks = [draw.randrange(len(aim.choices)) for _ in groups]
    return aim.raised(aim.lowered(picks, shuffled(groups, draw)), shuffled(groups, draw))


def shuffled(groups: Sequence[int], draw: random.Random) -> list[int]:
    """Them in a random order."""
    return draw.sample(groups, len(groups))
