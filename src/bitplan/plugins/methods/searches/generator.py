"""SAQ's generator: a recurrent network that emits a choice for group after group, and learns from what plans score."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.core.method_facts import About
from bitplan.core.records import Graph
from bitplan.plugins.methods.searches.base import Proposer, Scored, Search
from bitplan.plugins.methods.searches.evolution import shuffled
from bitplan.plugins.methods.searches.haq import states_of
from bitplan.selection.budget_constraint import BudgetConstraint, Picks

_TRIES = 3  # rounds that bring nothing new, before one is drawn from flatter chances
_FLATTER = 4.0  # what the logarithms of those are divided by
_REMEMBERED = 64  # draws that are learned from again
_PRICED = 64  # draws whose cost is looked at for a step: a cost needs no judge


@dataclass(frozen=True)
class Generator(Search):
    """A recurrent network that emits a choice for group after group, and learns by policy gradient.

    Liu et al. 2021, "Sharpness-aware Quantization for Deep Neural Networks", after the authors' code: an LSTM of
    `hidden` sees the choice before and gives chances for the next; it minimizes log p·(loss + λ·(cost − target)²) −
    `entropy`·H over what it draws, λ being `weight`, by Adam at `rate` with β₁ = 0.5. `together` plans are drawn and
    judged at once.

    Otherwise than there: the loss is the judge's score in standard deviations of those seen so far, and the cost is
    divided by the budget (of several, the one that is exceeded most counts), so that neither has a unit; the authors'
    λ is 1e-4 for millions of operations and 5e-3 for billions. From both, a mean is taken off: rewards of one sign
    only ever raise chances, or only lower them. A draw that was judged is learned from 64 draws long, weighted by how
    likely it still is, at most 1; the cost is learned from 64 draws that nobody judges. The LSTM sees a group's sizes
    and its place too, as HAQ's agent does. A draw is judged as the plan that it becomes within the budget: groups in a
    random order are lowered until it fits, and then others raised as far as it goes. The published `rate` of 5e-4 is
    for a hundred epochs of draws. The authors' network is trained on plans while they are drawn, with a step towards
    sharpness; the judge `shared` trains one before.
    """

    about: ClassVar[About] = About(True, passes="P · judge, per budget", source="SAQ, Liu et al. 2021")

    hidden: int = 64
    rate: float = 0.02
    weight: float = 10.0
    entropy: float = 5e-3
    together: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("hidden", 1), ("together", 2)):
            if getattr(self, name) < least:
                raise InputError(f"generator: {name} must be at least {least}, not {getattr(self, name)}")
        if not (0 < self.rate < math.inf and 0 <= self.weight < math.inf and 0 <= self.entropy < math.inf):
            raise InputError(
                "generator needs a rate above 0, and a weight and an entropy from 0, not "
                f"{self.rate}, {self.weight} and {self.entropy}"
            )

    def start(self, aim: BudgetConstraint, graph: Graph, seed: int) -> Proposer:
        """A generator whose first chances are nearly alike."""
        draw = torch.Generator().manual_seed(seed)
        emitter = Emitter.of(self.hidden, states_of(graph, aim), len(aim.choices), draw)
        return _Generating(self, aim, emitter, draw, random.Random(seed))


class DrawnChoices(NamedTuple):
    """Draws: choices (B, G), the logarithm of the chance of each (B), and the entropy of the chances behind it (B)."""

    choices: Tensor
    logp: Tensor
    entropy: Tensor


class Remembered(NamedTuple):
    """A draw, what the plan that it became is worth, and how likely it was."""

    drawn: Picks
    score: float
    logp: float


class Emitter(nn.Module):
    """features (G, F) → choices, one group after the other: an LSTM that sees a group and the choice before."""

    def __init__(self, hidden: int, features: Tensor, choices: int) -> None:
        super().__init__()
        self.features, self.choices = features, choices
        self.cell = nn.utils.skip_init(nn.LSTMCell, features.shape[1] + choices, hidden)
        self.head = nn.utils.skip_init(nn.Linear, hidden, choices)

    @classmethod
    def of(cls, hidden: int, features: Tensor, choices: int, draw: torch.Generator) -> Emitter:
        """With weights from the generator alone; those of the last layer are 0, so that all choices are as likely."""
        made = cls(hidden, features, choices)
        for name, parameter in made.named_parameters():
            bound = 0.0 if name.startswith("head") else 1 / math.sqrt(hidden)
            parameter.data = (2 * torch.rand(parameter.shape, generator=draw) - 1) * bound
        return made

    def drawn(self, count: int, draw: torch.Generator, *, flatter: float = 1.0) -> Tensor:
        """So many draws, (B, G), from chances whose logarithms are divided by `flatter`."""
        with torch.no_grad():
            return self._walk(torch.empty(count, 0, dtype=torch.long), draw, flatter).choices

    def told(self, choices: Tensor) -> DrawnChoices:
        """How likely draws, (B, G), are."""
        return self._walk(choices, None, 1.0)

    def _walk(self, given: Tensor, draw: torch.Generator | None, flatter: float) -> DrawnChoices:
        count = len(given)
        state: tuple[Tensor, Tensor] | None = None
        before = torch.zeros(count, self.choices)
        taken, logps, entropies = [], [], []
        for place, features in enumerate(self.features):
            state = self.cell(torch.cat([features.expand(count, -1), before], dim=1), state)
            logs = (self.head(state[0]) / flatter).log_softmax(dim=1)
            chosen = given[:, place] if draw is None else torch.multinomial(logs.exp(), 1, generator=draw)[:, 0]
            before = nn.functional.one_hot(chosen, self.choices).float()
            taken.append(chosen)
            logps.append(logs.gather(1, chosen[:, None])[:, 0])
            entropies.append(-(logs.exp() * logs).sum(dim=1))
        return DrawnChoices(torch.stack(taken, 1), torch.stack(logps).sum(0), torch.stack(entropies).sum(0))


@dataclass
class _Generating(Proposer):
    """Rounds of draws: what becomes of them within the budget is judged, and the chances of the better ones rise."""

    options: Generator
    aim: BudgetConstraint
    emitter: Emitter
    draw: torch.Generator
    order: random.Random
    judged: dict[Picks, float] = field(default_factory=dict)
    drawn: list[tuple[Picks, Picks]] = field(default_factory=list)
    """The last round: what was drawn, and the plan that it became."""
    memory: list[Remembered] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.Adam(self.emitter.parameters(), lr=self.options.rate, betas=(0.5, 0.999))

    def propose(self) -> Sequence[Picks]:
        """A round of draws; from one that brings nothing new is learned at once, and there is another."""
        for _ in range(_TRIES):
            self.drawn = [(row, self._fitted(row)) for row in self._rows()]
            if any(made not in self.judged for _, made in self.drawn):
                return [made for _, made in self.drawn]
            self._learn_()
        self.drawn = []  # what is drawn from other chances is judged, and not learned from
        return [self._fitted(row) for row in self._rows(flatter=_FLATTER)]

    def learn_(self, scored: Scored) -> None:
        """A step of policy gradient by what the round was worth."""
        self.judged |= dict(scored)
        self._learn_()

    def _rows(self, *, flatter: float = 1.0) -> list[Picks]:
        return [tuple(row) for row in self.emitter.drawn(self.options.together, self.draw, flatter=flatter).tolist()]

    def _fitted(self, picks: Picks) -> Picks:
        groups = range(len(picks))
        lowered = self.aim.lowered(picks, shuffled(groups, self.order))
        return self.aim.raised(lowered, shuffled(groups, self.order))

    def _learn_(self) -> None:
        known = [(row, self.judged[made]) for row, made in self.drawn if made in self.judged]
        if not known:
            return
        with torch.no_grad():
            likely = self.emitter.told(torch.tensor([row for row, _ in known])).logp
        self.memory += [Remembered(row, score, float(logp)) for (row, score), logp in zip(known, likely, strict=True)]
        self.memory = self.memory[-_REMEMBERED:]
        priced = self.emitter.told(self.emitter.drawn(_PRICED, self.draw))
        self._optimizer.zero_grad()
        (self._loss() + self._excess(priced) - self.options.entropy * priced.entropy.mean()).backward()
        self._optimizer.step()

    def _loss(self) -> Tensor:
        """What has the gradient of the expected score, less a baseline, by the draws that are remembered."""
        now = self.emitter.told(torch.tensor([one.drawn for one in self.memory])).logp
        then = torch.tensor([one.logp for one in self.memory])
        counts = (now.detach() - then).exp().clamp(max=1)
        counts = counts / counts.sum().clamp_min(1e-12)
        seen = torch.tensor(list(self.judged.values()), dtype=torch.float64)
        spread = float(seen.std()) if len(seen) > 1 else 0.0
        rewards = torch.tensor([(one.score - float(seen.mean())) / (spread or 1.0) for one in self.memory])
        return -(counts * (rewards - (counts * rewards).sum()) * now).sum()

    def _excess(self, priced: DrawnChoices) -> Tensor:
        """The same of λ·(cost − 1)², the budget being 1."""
        shares = torch.tensor([max(self._shares(row)) for row in priced.choices.tolist()])
        excess = self.options.weight * (shares - 1).square()
        return ((excess - excess.mean()) * priced.logp).mean()

    def _shares(self, picks: Sequence[int]) -> Iterator[float]:
        for cost, capacity in zip(self.aim.cost(picks), self.aim.capacities, strict=True):
            yield cost / max(int(capacity), 1)
