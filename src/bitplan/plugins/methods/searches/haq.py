"""HAQ: an agent that walks through the layers and gives each one a choice, learning from how good whole plans are."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.core.method_facts import About
from bitplan.core.records import Graph
from bitplan.plugins.methods.searches.base import Proposer, Scored, Search
from bitplan.selection.budget_constraint import BudgetConstraint, Picks, Repair

_REMEMBERED = 128  # episodes
_AT_ONCE = 256  # steps of walks that are learned from at once
_FOLLOW = 0.01  # how fast the target networks follow (τ)
_BASELINE = 0.5  # how fast the moving mean of rewards does
_CRITIC_IS_FASTER = 10
_FIRST_NOISE, _NOISE_LEFT = 0.5, 0.99
_LAST_WEIGHTS = 3e-3  # of the last layers, to begin with
_NORMAL = NormalDist()
_TRIES = 8  # at a plan that was not judged yet, each with more noise


@dataclass(frozen=True)
class Haq(Search):
    """An agent (DDPG) that walks through the groups and gives each a choice, rewarded for the whole plan.

    Wang et al. 2019, "HAQ: Hardware-Aware Automated Quantization with Mixed Precision", after the authors' code. DDPG:
    an actor sees a group (its sizes, its place, the action before) and answers a number a from 0 to 1, which is choice
    round(a·C − ½). Plans above the budget lose one choice from the last group backwards, again and again. The reward of
    a plan goes to every group of it. After `warmup` random plans, normal noise of 0.5·0.99^n is added, and actor and
    critic, of two layers of `hidden`, learn from the last 128 plans, with slow copies that follow by 0.01 and a moving
    baseline: `updates` times per plan, the actor at `rate`, the critic at ten times that.

    Otherwise than there: the reward is the judge's score in standard deviations of the warm-up's, which has no unit,
    where HAQ's is a tenth of the score that is lost after an epoch. `discount` is 0: with the reward at every group,
    HAQ's 1 makes values grow with the groups that are left. What a repair leaves of the budget goes to the groups of
    the greatest actions, and what is learned is what became of an action. A graph knows no strides; the state is input
    features, outputs, weights, positions, products, and which group it is. HAQ's own lengths, `rate=1e-4` and as many
    updates as groups on 64 steps, are for 600 plans of fifty layers: with two hundred plans they learn to give every
    group the most, which the repair takes back from the last ones.
    """

    about: ClassVar[About] = About(True, passes="P · judge, per budget", source="Wang et al. 2019")
    usual: ClassVar[int] = 600
    repair: ClassVar[Repair] = "last"

    warmup: int = 20
    hidden: int = 300
    rate: float = 1e-3
    updates: int = 4
    discount: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("warmup", 2), ("hidden", 1), ("updates", 1)):
            if getattr(self, name) < least:
                raise InputError(f"haq: {name} must be at least {least}, not {getattr(self, name)}")
        if not 0 < self.rate < math.inf or not 0 <= self.discount <= 1:
            raise InputError(
                f"haq needs a rate above 0 and a discount from 0 to 1, not {self.rate} and {self.discount}"
            )

    def start(self, aim: BudgetConstraint, graph: Graph, seed: int) -> Proposer:
        """An agent that knows nothing yet."""
        features, draw = states_of(graph, aim), torch.Generator().manual_seed(seed)
        agent = Agent.of(self, len(features), features.shape[1], draw)
        return _Walking(self, aim, features, draw, agent)


def choice_of(action: float, choices: int) -> int:
    """round(a·C − ½), within the choices: 0 is the lowest and 1 the highest."""
    return min(max(round(action * choices - 0.5), 0), choices - 1)


def states_of(graph: Graph, aim: BudgetConstraint) -> Tensor:
    """What is known of each group, (G, features), every column from 0 to 1."""
    groups = [group for group in graph.selectable if group.name in aim.groups]
    rows = []
    for place, group in enumerate(groups):
        weights, macs = sum(layer.weights for layer in group.layers), sum(layer.macs for layer in group.layers)
        inputs = max(layer.in_features for layer in group.layers)
        rows.append([inputs, weights / max(inputs, 1), weights, macs / max(weights, 1), macs, place])
    columns = torch.tensor(rows, dtype=torch.float64)
    low, high = columns.min(dim=0).values, columns.max(dim=0).values
    scaled = (columns - low) / (high - low).clamp(min=1e-12)
    return torch.cat([scaled, torch.eye(len(groups))], dim=1).float()


class Walk(NamedTuple):
    """What an agent saw and did: states (G, features), those behind them, and actions (G)."""

    states: Tensor
    behind: Tensor
    actions: Tensor


@dataclass
class _Walking(Proposer):
    """Episodes: walk through the groups, and learn from what the plan was worth."""

    options: Haq
    aim: BudgetConstraint
    features: Tensor
    draw: torch.Generator
    agent: Agent
    actions: list[float] = field(default_factory=list)
    judged: dict[Picks, float] = field(default_factory=dict)
    early: list[tuple[Walk, float]] = field(default_factory=list)

    @property
    def choices(self) -> int:
        return len(self.aim.choices)

    @torch.no_grad()
    def propose(self) -> Sequence[Picks]:
        """One plan, group by group; one that was not judged yet, if some tries find any."""
        picks: Picks = ()
        for attempt in range(_TRIES):
            self.actions = self._walked(1 + attempt / 2)
            picks = self._fitted(tuple(choice_of(action, self.choices) for action in self.actions))
            if picks not in self.judged:
                break
        return [picks]

    def _fitted(self, picks: Picks) -> Picks:
        """Repaired; what that leaves of the budget goes to the groups by their actions, the greatest first."""
        order = sorted(range(len(picks)), key=lambda group: -self.actions[group])
        return self.aim.raised(self.aim.repair(picks, self.options.repair), order)

    def _walked(self, more_noise: float) -> list[float]:
        later = len(self.judged) - self.options.warmup
        actions: list[float] = []
        for features in self.features:
            if later < 0:
                actions.append(float(torch.rand((), generator=self.draw)))
                continue
            state = torch.cat([features, torch.tensor(actions[-1:] or [0.0])])
            noise = more_noise * _FIRST_NOISE * _NOISE_LEFT**later
            actions.append(self._drawn(float(self.agent.actor(state)), noise))
        return actions

    def _drawn(self, mean: float, deviation: float) -> float:
        """From a normal distribution cut off at 0 and 1, by its inverse."""
        low, high = (_NORMAL.cdf((edge - mean) / deviation) for edge in (0.0, 1.0))
        share = low + (high - low) * float(torch.rand((), generator=self.draw, dtype=torch.float64))
        standard = _NORMAL.inv_cdf(min(max(share, 1e-12), 1 - 1e-12))
        return min(max(mean + deviation * standard, 0.0), 1.0)

    def learn_(self, scored: Scored) -> None:
        """Remember new walks with their rewards, which the warm-up gives a scale; after it, learn."""
        for picks, score in scored:
            if picks in self.judged:
                continue
            self.judged[picks] = score
            self.early.append((self._walk(picks), score))
            if len(self.judged) < self.options.warmup:
                continue
            for walk, its in self.early:
                self.agent.remember_(walk, self._reward(its))
            self.early.clear()
            for _ in range(self.options.updates):
                self.agent.learn_(self.draw)

    def _reward(self, score: float) -> float:
        """In standard deviations of the warm-up's."""
        seen = torch.tensor(list(self.judged.values())[: self.options.warmup], dtype=torch.float64)
        return float(score - seen.mean()) / (float(seen.std()) or 1.0)

    def _walk(self, picks: Picks) -> Walk:
        """What was done, as it is after a repair: an action that was changed is the middle of what it became."""
        actions = torch.tensor(
            [
                action if choice_of(action, self.choices) == pick else (pick + 0.5) / self.choices
                for action, pick in zip(self.actions, picks, strict=True)
            ]
        )
        before = torch.cat([torch.zeros(1), actions[:-1]])
        states = torch.cat([self.features, before[:, None]], dim=1)
        return Walk(states, torch.cat([states[1:], states[-1:]]), actions)


@dataclass
class Agent:
    """An actor and a critic, their slow copies, and what they remember: a row for each step of the last walks."""

    actor: nn.Module
    critic: nn.Module
    slow_actor: nn.Module
    slow_critic: nn.Module
    states: Tensor  # (M, features)
    behind: Tensor  # (M, features)
    rest: Tensor  # (M, 3): action, what the value behind it counts, reward
    rate: float
    discount: float
    remembered: int = 0
    baseline: float | None = None

    @classmethod
    def of(cls, options: Haq, groups: int, features: int, draw: torch.Generator) -> Agent:
        """With random weights, and room for the walks that are remembered; the state has the action before too."""
        seen, rows = features + 1, _REMEMBERED * groups
        actor = nn.Sequential(*_layers(seen, options.hidden, draw), nn.Sigmoid())
        critic = nn.Sequential(*_layers(seen + 1, options.hidden, draw))
        room = torch.zeros(rows, seen), torch.zeros(rows, seen), torch.zeros(rows, 3)
        return cls(
            actor, critic, copy.deepcopy(actor), copy.deepcopy(critic), *room, options.rate, options.discount
        )  # fmt: skip

    def __post_init__(self) -> None:
        self._rates = [
            torch.optim.Adam(self.actor.parameters(), lr=self.rate, fused=True),
            torch.optim.Adam(self.critic.parameters(), lr=_CRITIC_IS_FASTER * self.rate, fused=True),
        ]

    def remember_(self, walk: Walk, reward: float) -> None:
        """Every step of a walk has its reward; the oldest walk is forgotten."""
        count = len(walk.states)
        rows = slice(first := self.remembered % len(self.states), first + count)
        self.states[rows], self.behind[rows] = walk.states, walk.behind
        goes_on = self.discount * (torch.arange(count) < count - 1)
        self.rest[rows] = torch.stack([walk.actions, goes_on, torch.full((count,), reward)], dim=1)
        self.remembered += count

    def learn_(self, draw: torch.Generator) -> None:
        """One step of both networks, on a batch from memory."""
        rows = torch.randint(min(self.remembered, len(self.states)), (_AT_ONCE,), generator=draw)
        states, behind, (actions, goes_on, rewards) = self.states[rows], self.behind[rows], self.rest[rows].split(1, 1)
        mean = float(rewards.mean())
        self.baseline = mean if self.baseline is None else self.baseline + _BASELINE * (mean - self.baseline)
        with torch.no_grad():
            later = self.slow_critic(torch.cat([behind, self.slow_actor(behind)], dim=1))
            target = rewards - self.baseline + goes_on * later
        actor_rate, critic_rate = self._rates
        critic_rate.zero_grad()
        (self.critic(torch.cat([states, actions], dim=1)) - target).square().mean().backward()
        critic_rate.step()
        actor_rate.zero_grad()
        (-self.critic(torch.cat([states, self.actor(states)], dim=1)).mean()).backward()
        actor_rate.step()
        with torch.no_grad():
            for fast, slow in ((self.actor, self.slow_actor), (self.critic, self.slow_critic)):
                for mine, its in zip(slow.parameters(), fast.parameters(), strict=True):
                    mine.lerp_(its, _FOLLOW)


def _layers(features: int, hidden: int, draw: torch.Generator) -> list[nn.Module]:
    """Two hidden layers and one number, with weights from the generator alone."""
    sizes = [(features, hidden), (hidden, hidden), (hidden, 1)]
    made: list[nn.Module] = []
    for inputs, outputs in sizes:
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
        bound = _LAST_WEIGHTS if outputs == 1 else 1 / math.sqrt(inputs)
        for parameter in layer.parameters():
            parameter.data = (2 * torch.rand(parameter.shape, generator=draw) - 1) * bound
        made += [layer, nn.ReLU()]
    return made[:-1]
