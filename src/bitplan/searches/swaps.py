"""Which plans to train next, so that the best one is among them: by an additive model and its doubts, and by swaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from bitplan.searches.additive_model import AdditiveModel, Floats
from bitplan.selection.budget_constraint import BudgetConstraint, Picks

By = Literal["method", "random", "model", "draw", "swap", "again"]
"""Why a plan is tried: a method chose it, at random, the model's best, the best of a draw, near the best, once more."""
Proposal = tuple[Picks, str]
_LOTS = 20  # draws for a proposal that is not among those of its round


@dataclass
class Swaps:
    """Proposals within an aim. All depend on the seed and on the scores so far, so that a killed search repeats them.

    `given` are plans to begin with, with who chose them. Then `randoms` plans that use the budget up, so that every
    group is seen at several choices; then rounds of four: the best plan by the model, that is by an additive
    regression; the best plan by values drawn from what the model knows (Thompson's way to try what may be best); the
    best of the plans that are a swap away from the best so far; and once more the one that may be best of those tried.
    """

    aim: BudgetConstraint
    seed: int
    given: Sequence[Proposal] = ()
    randoms: int = 0
    scored: list[tuple[Picks, float]] = field(default_factory=list)

    @property
    def model(self) -> AdditiveModel:
        """What the scores so far say."""
        return AdditiveModel.fit(len(self.aim.choices), self.scored)

    def learn_(self, scored: Sequence[tuple[Picks, float]]) -> None:
        """Take in what trainings reached; more is better."""
        self.scored += scored

    def first(self) -> list[Proposal]:
        """What is tried before anything is known, each plan once."""
        found: dict[Picks, str] = {}
        for picks, who in self.given:
            found[picks] = f"{found[picks]}, {who}" if picks in found else who
        chance = np.random.default_rng([self.seed, len(self.aim.groups)])
        for _ in range(self.randoms):
            order = [int(place) for place in chance.permutation(len(self.aim.groups))]
            low = self.aim.lowered(self.aim.top, order)
            found.setdefault(self.aim.raised(low, order[::-1]), "random")
        return list(found.items())

    def propose(self) -> list[Proposal]:
        """A round, each plan once; it may have fewer than four where there are few plans."""
        model, chance = self.model, np.random.default_rng([self.seed, len(self.scored)])
        tried, found = set(model.plans), dict[Picks, str]()
        best = self.aim.best(model.gains())
        if best not in tried:
            found[best] = "model"

        def add(by: By, make: Callable[[Floats], Picks | None]) -> None:
            for _ in range(_LOTS):
                picks = make(model.draw(chance))
                if picks is not None and picks not in found:
                    found[picks] = "again" if picks in tried else by
                    return

        add("draw", lambda values: self.aim.best(model.gains(values)))
        add("swap", lambda values: self._swapped(model.best_tried(), model.gains(values), tried | found.keys()))
        add("again", model.best_tried)
        return list(found.items())

    def _swapped(self, picks: Picks, gains: Floats, known: set[Picks]) -> Picks | None:
        """The best plan that is not known and differs from this one in one group, or in two, by a choice each."""
        groups, choices = gains.shape
        moves = [
            (group, picks[group] + step) for group in range(groups) for step in (-1, 1)
            if 0 <= picks[group] + step < choices
        ]  # fmt: skip
        worth = [float(gains[group, to] - gains[group, picks[group]]) for group, to in moves]
        near: list[tuple[float, Picks]] = []
        for first, (group, to) in enumerate(moves):
            for second in range(first, len(moves)):
                other, where = moves[second]
                if second != first and other == group:
                    continue
                changed = list(picks)
                changed[group], changed[other] = to, where
                near.append((worth[first] + (worth[second] if second != first else 0.0), tuple(changed)))
        near.sort(key=lambda one: -one[0])
        return next((plan for _, plan in near if plan not in known and self.aim.fits(plan)), None)
