"""Losses with one group lowered at a time, and how they are carried over from a short training to a longer one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.gains.alps import Goodness, values_of
from bitplan.gains.margins import Floats

_SLOPE_VARIANCE = 0.25  # of the line from one training to a longer one: its slope is 1 ± 0.5
Chosen = NDArray[np.bool_]
"""(G): which groups."""


@dataclass(frozen=True)
class LossTable:
    """Losses with one group lowered, (G, C − 1), all on one scale, and their standard errors, (G, C − 1)."""

    losses: Floats
    errors: Floats

    @property
    def ends(self) -> Chosen:
        """The groups of the least loss, with which ALPS compares all others, and of the greatest.

        Both are raced: a line from the screen through groups that are nearly equal would be drawn by their noise.
        """
        least, greatest = self.losses.min(axis=1).argmin(), self.losses.max(axis=1).argmax()
        groups = np.arange(len(self.losses))
        ends: Chosen = (groups == least) | (groups == greatest)
        return ends

    def gains(self) -> tuple[Floats, Floats]:
        """As ALPS's: values and standard errors over the lowest choice, (G, C)."""
        values = np.array(values_of(-self.losses[:, :, None]))
        lowest = self.errors[:, :1]  # (G, 1): also of the highest choice, where all are as good as the best
        between = np.hypot(self.errors[:, 1:], lowest)  # (G, C − 2)
        return values, np.concatenate([np.zeros_like(lowest), between, lowest], axis=1)

    def carried(self, measured: LossTable, raced: Chosen, *, alike: bool) -> LossTable:
        """On the scale of a longer training: what was measured there, and the others by a line through those.

        The line is the least-squares one from these losses to the measured ones, never falling. Where both are of
        trainings (`alike`), its slope is expected to be 1 ± 0.5, or else the noise of groups that are nearly equal
        would draw it. What it says is as uncertain as the measured ones lie about it. A measured loss without an error
        of its own has that one too: how far it moved against what was known before.
        """
        before, after = self.losses[raced].ravel(), measured.losses[raced].ravel()  # (raced groups · (C − 1))
        noise = float((self.errors[raced] ** 2).mean()) if alike else None
        slope, residual = _line(before, after, noise)
        losses = after.mean() + slope * (self.losses - before.mean())  # (G, C − 1)
        errors = np.hypot(slope * self.errors, residual or 0.0)
        moved = errors if residual is None else residual
        measured_errors = np.where(np.isfinite(measured.errors), measured.errors, moved)
        here = raced[:, None]
        return LossTable(np.where(here, measured.losses, losses), np.where(here, measured_errors, errors))


def _line(before: Floats, after: Floats, noise: float | None) -> tuple[float, float | None]:
    """The slope from losses to others, and the standard deviation about the line, None where two points make it.

    With `noise`, the variance of the losses before, the slope is the likeliest one that is 1 ± 0.5 to begin with.
    """
    x, y = before - before.mean(), after - after.mean()
    expected = 0.0 if noise is None else noise / _SLOPE_VARIANCE
    spread = float((x**2).sum()) + expected
    slope = 1.0
    if spread:
        slope = max(0.0, (float((x * y).sum()) + expected) / spread)
    if len(x) <= 2:
        return slope, None
    return slope, float(np.sqrt(((y - slope * x) ** 2).sum() / (len(x) - 2)))


def loss_table(good: Goodness) -> LossTable:
    """What `drop` or `drift` measured, (G, C, B), as losses with the standard errors of their rise."""
    low, top = -good[:, :-1], -good[:, -1:]  # (G, C − 1, B), (G, 1, B)
    losses = low.mean(axis=2)
    batches = good.shape[2]
    errors = np.zeros_like(losses)
    if batches > 1:
        errors = (low - top).std(axis=2, ddof=1) / np.sqrt(batches)
    return LossTable(losses, errors)
