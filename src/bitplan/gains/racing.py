"""ALPS for less: screen all groups by how far answers drift, then fine-tune only where the selection is in doubt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bitplan.core.budget import Budget
from bitplan.core.defaults import COST
from bitplan.core.errors import InputError, UnknownName
from bitplan.core.jobs import Lowered, Tuned
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.gains.alps import errors_over_seeds, values_of
from bitplan.gains.base import Context, LayerGains
from bitplan.gains.drift import Drift
from bitplan.gains.drop import Drop
from bitplan.gains.finetuned import Expected, Tuner, check_length, counts_of, recipe_for, seconds_of, shortened
from bitplan.gains.lowering import by_first_layer
from bitplan.gains.margins import Floats, Scales, Weighed
from bitplan.tune.loop import steps_of

_SCREENS: dict[str, type[Drift] | type[Drop]] = {"drift": Drift, "drop": Drop}
_FEWEST = 3  # groups in a first round: two ends of the screen, and one in doubt
_LEAST = 4  # groups that are raced in any case, to see how far the screen can be trusted
_SLOPE_VARIANCE = 0.25
Chosen = NDArray[np.bool_]
"""(G): which groups."""


@dataclass(frozen=True)
class LossTable:
    """Losses with one group lowered, (G, C − 1), all on one scale, and their standard errors, (G, C − 1)."""

    losses: Floats
    errors: Floats

    def gains(self) -> tuple[Floats, Floats]:
        """As ALPS's: values and standard errors over the lowest choice, (G, C)."""
        values = np.array(values_of(-self.losses[:, :, None]))
        lowest = self.errors[:, :1]
        middle = np.hypot(self.errors[:, 1:], lowest)
        return values, np.concatenate([np.zeros_like(lowest), middle, lowest], axis=1)

    def carried(self, measured: LossTable, raced: Chosen, *, alike: bool) -> LossTable:
        """On the scale of a longer training: what was measured there, and the others by a line through those.

        The line is the least-squares one from these losses to the measured ones, never falling. Where both are of
        trainings (`alike`), its slope is expected to be 1 ± 0.5, or else the noise of groups that are nearly equal
        would draw it. What it says is as uncertain as the measured ones lie about it. A measured loss without an error
        of its own has that one too: how far it moved against what was known before.
        """
        before, after = self.losses[raced].ravel(), measured.losses[raced].ravel()  # (raced groups · choices below top)
        from_mean, to_mean = before - before.mean(), after - after.mean()
        # A prior on the slope counts as if so much spread had been seen along a line of slope 1.
        prior = float((self.errors[raced] ** 2).mean()) / _SLOPE_VARIANCE if alike else 0.0
        spread = float((from_mean**2).sum()) + prior
        slope = max(0.0, (float((from_mean * to_mean).sum()) + prior) / spread) if spread else 1.0
        off_line = to_mean - slope * from_mean
        degrees = len(before) - 2  # two points lie on their line, whatever their noise
        residual = float(np.sqrt((off_line**2).sum() / degrees)) if degrees > 0 else 0.0
        losses = after.mean() + slope * (self.losses - before.mean())
        errors = np.hypot(slope * self.errors, residual)
        moved = residual if degrees > 0 else errors
        own_errors = np.where(np.isfinite(measured.errors), measured.errors, moved)
        is_raced = raced[:, None]
        return LossTable(np.where(is_raced, measured.losses, losses), np.where(is_raced, own_errors, errors))


@dataclass(frozen=True)
class AlpsRacing:
    """ALPS by loss, with fine-tuning only where a selection within one of `budgets` depends on it.

    All groups are screened on `samples` by `drift`, or by `drop`. Those that some budgets choose differently, or whose
    choice is less than `margin` standard errors from another (the nearest four in any case), are fine-tuned for
    steps/2^(rounds − 1) steps; as this tells how far the screen can be trusted, others may join. The share `keep` that
    is nearest to another choice, as far as it is still in doubt, goes on for twice the steps, up to `steps`; 1 keeps
    all that is in doubt. `spend`, a share of what ALPS takes with an epoch per group, is divided evenly among rounds
    (successive halving): each races the nearest to another choice, as many as its part allows. Losses of groups that
    stay behind are carried over to the longer training by a line (`LossTable.carried`), so that all gains are on the
    scale of the last one. They are meant for these budgets, of `cost` unless they name another. `lr_factor` is that of
    `alps`; more than one of `seeds` gives better errors.
    """

    budgets: str | float | Sequence[str | float] = ()
    cost: str = COST
    steps: int = 80
    rounds: int = 3
    lr_factor: float = 0.25
    margin: float = 2.0
    keep: float = 0.5
    samples: int = 512
    batch_size: int = 64
    seeds: int = 1
    screen: Literal["drift", "drop"] = "drift"
    spend: float | None = None

    def __post_init__(self) -> None:
        check_length("alps_racing", None, self.steps, self.lr_factor)
        if not self._budgets:
            raise InputError(
                "alps_racing fine-tunes what the budgets hang on: say which you will ask for, budgets=60%,70%"
            )
        if self.rounds < 1 or self.steps < 2 ** (self.rounds - 1):
            raise InputError(
                f"alps_racing: {self.rounds} rounds that double up to {self.steps} steps are not possible: "
                "at least one round, and at least one step in the first"
            )
        if self.seeds < 1 or not 0 <= self.margin < math.inf or not 0 < self.keep <= 1:
            raise InputError(
                f"alps_racing needs at least one seed, a margin of 0 or more and a share to keep of up to 1, not "
                f"{self.seeds}, {self.margin} and {self.keep}"
            )
        if self.screen not in _SCREENS:
            raise UnknownName("screen of alps_racing", self.screen, _SCREENS)
        if self.spend is not None and not 0 < self.spend < math.inf:
            raise InputError(f"alps_racing: spend is a share of what ALPS takes, above 0, not {self.spend}")
        _SCREENS[self.screen](samples=self.samples, batch_size=self.batch_size)

    @property
    def _budgets(self) -> list[Budget]:
        """As Python gives them, or as the command line writes them: with commas."""
        if isinstance(self.budgets, str):
            parts: Sequence[str | float] = self.budgets.split(",")
        else:
            parts = self.budgets if isinstance(self.budgets, Sequence) else [self.budgets]
        return [Budget.parse(part) for part in parts if part != ""]

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """Screen, race, and put all on one scale."""
        scales = Scales.of(graph, choices, self._budgets, self.cost)
        tuner = self._tuner(model, graph, choices, context)
        names = [group.name for group in graph.selectable]
        steps_of_alps = _steps_of_alps(tuner, choices)
        race = _Race(self, tuner, choices, scales, self._most(steps_of_alps, len(names), len(choices)))
        screened = _SCREENS[self.screen](self.samples, self.batch_size).measure(model, graph, choices, context)
        values, errors = race.run(_screen(screened.good)).gains()
        jobs, outcomes = zip(*race.trained.values(), strict=True)
        return LayerGains(
            values=by_first_layer(graph, dict(zip(names, values.tolist(), strict=True))),
            errors=by_first_layer(graph, dict(zip(names, errors.tolist(), strict=True))),
            counts=counts_of(outcomes, tuner.work.task)
            | {
                "screened_samples": screened.samples,
                "raced_groups": len({job.groups for job in jobs}),
                "groups": len(names),
                "steps_of_alps": steps_of_alps,
            },
            work=screened.seconds + seconds_of(outcomes),
        )

    def expected(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Expected:
        """At most this much: as if all groups were raced, and the share to keep of them in every further round."""
        Scales.of(graph, choices, self._budgets, self.cost)
        tuner = self._tuner(model, graph, choices, context)
        groups = len(graph.selectable)
        allowed = self._most(_steps_of_alps(tuner, choices), groups, len(choices))
        left, every = groups, []
        for steps, most in zip(self.lengths, allowed, strict=True):
            left = min(left, most)
            every += _jobs(tuner, choices, np.arange(groups) < left, steps, self.seeds)
            left = math.ceil(self.keep * left)
        return tuner.expected(every)

    def _most(self, steps_of_alps: int, groups: int, choices: int) -> list[int]:
        """How many groups each round may race: all, or as many as its even part of what may be spent allows."""
        if self.spend is None:
            return [groups] * self.rounds
        per_round = self.spend * steps_of_alps / self.rounds
        per_group = [steps * (choices - 1) * self.seeds for steps in self.lengths]  # steps, in each round
        most = [int(per_round / steps) for steps in per_group]
        if most[0] < _FEWEST:
            raise InputError(
                f"alps_racing: spend={self.spend:g} of ALPS's {steps_of_alps:,} steps is too little to race {_FEWEST} "
                f"groups for {self.lengths[0]} steps: spend more, or take fewer steps"
            )
        return [min(groups, count) for count in most]

    @property
    def lengths(self) -> list[int]:
        """The steps of each round."""
        return [self.steps >> back for back in reversed(range(self.rounds))]

    def _tuner(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Tuner:
        recipe = recipe_for("alps_racing", context, epochs=None, steps=self.steps, lr_factor=self.lr_factor)
        return Tuner.of("alps_racing", model, graph, choices, context, recipe)


@dataclass(frozen=True)
class _Race:
    """The rounds, and what was trained in them."""

    options: AlpsRacing
    tuner: Tuner
    choices: tuple[Precision, ...]
    scales: Scales
    most: Sequence[int]
    trained: dict[str, tuple[Lowered, Tuned]] = field(default_factory=dict)

    def run(self, screen: LossTable) -> LossTable:
        """From the losses of the screen to those on the scale of the last training that was needed."""
        first, *later = self.options.lengths
        by_screen = self.scales.weigh(*screen.gains())
        table, raced = self._joined(screen, by_screen, self._starters(screen, by_screen), first)
        for steps, allowed in zip(later, self.most[1:], strict=True):
            margins = np.where(raced, self.scales.weigh(*table.gains()).margins, np.inf)
            most = min(allowed, math.ceil(self.options.keep * int(raced.sum())))
            raced = _nearest(margins, most) & (margins <= self.options.margin)
            if not raced.any():
                break
            table = table.carried(self._measured(raced, steps), raced, alike=True)
        return table

    def _starters(self, screen: LossTable, by_screen: Weighed) -> Chosen:
        """Who is raced first: both ends of the screen, then those in doubt, nearest to another choice first."""
        in_doubt = by_screen.moving | (by_screen.margins <= self.options.margin)
        in_doubt |= _nearest(by_screen.margins, _LEAST)
        ends = _ends(screen)
        room = max(0, self.most[0] - int(ends.sum()))
        margins = np.where(in_doubt & ~ends, by_screen.margins, np.inf)
        return ends | (in_doubt & _nearest(margins, room))

    def _joined(self, screen: LossTable, by_screen: Weighed, raced: Chosen, steps: int) -> tuple[LossTable, Chosen]:
        """The first round: who is in doubt, or chosen otherwise, once it shows how far the screen is right, joins."""
        while True:
            table = screen.carried(self._measured(raced, steps), raced, alike=False)
            now = self.scales.weigh(*table.gains())
            chosen_otherwise = (now.picks != by_screen.picks).any(axis=0)  # (K, G) → (G): within some budget
            joining = ~raced & ((now.margins <= self.options.margin) | chosen_otherwise)
            room = self.most[0] - int(raced.sum())
            joining &= _nearest(np.where(joining, now.margins, np.inf), room)
            if not joining.any():
                return table, raced
            raced = raced | joining

    def _measured(self, raced: Chosen, steps: int) -> LossTable:
        """Fine-tune what is not yet, for so many steps; NaN for the groups that are not raced and unknown errors."""
        jobs = _jobs(self.tuner, self.choices, raced, steps, self.options.seeds)
        new = [job for job in jobs if job.id not in self.trained]
        self.trained.update({job.id: (job, tuned) for job, tuned in zip(new, self.tuner.run(new), strict=True)})
        shape = (len(raced), len(self.choices) - 1)  # (G, C − 1)
        losses, errors = np.full(shape, np.nan), np.full(shape, np.nan)
        mean_losses = np.array([self.trained[job.id][1].mean_loss for job in jobs])
        measured = mean_losses.reshape(-1, shape[1], self.options.seeds)  # (raced groups, C − 1, seeds)
        losses[raced] = measured.mean(axis=2)
        if self.options.seeds > 1:
            errors[raced] = errors_over_seeds(measured)
        return LossTable(losses, errors)


def _steps_of_alps(tuner: Tuner, choices: Sequence[Precision]) -> int:
    """What ALPS itself would take: an epoch for every group at every choice below the highest."""
    an_epoch = steps_of(tuner.work.task, shortened(tuner.run_of_all.recipe, epochs=1.0))
    return len(tuner.graph.selectable) * (len(choices) - 1) * an_epoch


def _screen(good: Floats) -> LossTable:
    """What `drop` measured, (G, C, B), as losses with the standard errors of their rise."""
    low, top = -good[:, :-1], -good[:, -1:]
    batches = good.shape[2]
    errors = (low - top).std(axis=2, ddof=1) / np.sqrt(batches) if batches > 1 else np.zeros(low.shape[:2])
    return LossTable(low.mean(axis=2), errors)


def _jobs(tuner: Tuner, choices: Sequence[Precision], raced: Chosen, steps: int, seeds: int) -> list[Lowered]:
    """In the order of groups, choices, seeds."""
    return [
        tuner.job({group.name: choice}, seed=seed, steps=steps)
        for group, runs in zip(tuner.graph.selectable, raced, strict=True)
        if runs
        for choice in choices[:-1]
        for seed in range(seeds)
    ]


def _ends(table: LossTable) -> Chosen:
    """The groups of the least loss, with which ALPS compares all others, and of the greatest.

    Both are raced: a line from the screen through groups that are nearly equal would be drawn by their noise.
    """
    losses, groups = table.losses, np.arange(len(table.losses))
    ends: Chosen = (groups == losses.min(axis=1).argmin()) | (groups == losses.max(axis=1).argmax())
    return ends


def _nearest(margins: Floats, count: int) -> Chosen:
    """So many groups with the least margins; of equals the first."""
    chosen = np.zeros(len(margins), dtype=np.bool_)
    chosen[np.argsort(margins, kind="stable")[:count]] = True
    return chosen
