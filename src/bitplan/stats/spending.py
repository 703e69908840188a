"""The spend of each method of a study to choose, and which two may be compared as equals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bitplan.core.records import Gains
from bitplan.core.studies import Study
from bitplan.store.run_folder import title_of_gains

FACTOR = 1.25
"""Two spends are equal where the greater is at most so many times the less."""
NOT_SAID = "not said"


@dataclass(frozen=True)
class MethodSpend:
    """The passes of one estimate of a method, and the same in epochs of training; None if unknown.

    If there are several estimates it is the most expensive. `times` is how often that is paid in the study at a seed:
    once, or for every budget. `labels` is None if nobody knows whether labels were used; `tested`: test scores were.
    """

    title: str
    passes: float | None
    epochs: float | None
    times: int
    labels: bool | None
    tested: bool
    trainings: int | None
    seconds: float

    @property
    def paid(self) -> str:
        """Return how often the estimate is paid, in words."""
        return "once" if self.times == 1 else f"for each of {self.times} budgets"

    @property
    def saw(self) -> str:
        """Return in words which labels and scores were used."""
        if self.tested:
            return "labels, test scores"
        return NOT_SAID if self.labels is None else "labels" if self.labels else "no labels"


def spends_by_title(study: Study, gains: Mapping[str, Gains]) -> dict[str, MethodSpend]:
    """Return title → spend of the methods that have estimates; `gains` are those of a run, bound ones included."""
    found: dict[str, MethodSpend] = {}
    for method in study.methods:
        once = gains.get(method.title)
        titles = [
            title_of_gains(method.title, (budget,), study.gain_seed + seed)
            for budget in study.budgets
            for seed in study.seeds
        ]  # fmt: skip
        own = [once] if once is not None else [gains[title] for title in titles if title in gains]
        if own:
            found[method.title] = _spending(method.title, own, 1 if once is not None else len(study.budgets))
    return found


def _spending(title: str, own: list[Gains], times: int) -> MethodSpend:
    seconds = max(one.seconds for one in own)
    spends = [one.spend for one in own if one.spend is not None]
    if len(spends) < len(own):
        return MethodSpend(title, None, None, times, None, False, None, seconds)
    epochs = [one.epochs for one in own]
    known = [epoch for epoch in epochs if epoch is not None]
    return MethodSpend(
        title,
        max(spend.passes for spend in spends),
        max(known) if len(known) == len(own) else None,
        times,
        True if any(spend.labels for spend in spends) else None if any(one.labels is None for one in spends) else False,
        any(spend.tested for spend in spends),
        max(spend.trainings for spend in spends),
        seconds,
    )


def why_unequal(study: Study, first: MethodSpend | None, second: MethodSpend | None) -> str:
    """Return why two methods are not compared as equals; nothing if they are, or if the study sets no `spend`.

    Two methods are equal if both kept within the study's `spend`, or if their spends are within a factor of 1.25. A
    method that saw test scores, or whose spend is unknown, equals none.
    """
    if study.spend is None:
        return ""
    pair = [one for one in (first, second) if one is not None]
    oracles = [one.title for one in pair if one.tested]
    if oracles:
        return f"{' and '.join(oracles)} saw test scores"
    silent = [one.title for one in pair if one.passes is None]
    if silent or len(pair) < 2:
        return f"{silent[0]} does not say what it spent" if silent else "what they spent is not known"
    if all(one.epochs is not None and one.epochs <= study.spend for one in pair):
        return ""
    less, more = sorted(pair, key=lambda one: one.passes or 0.0)
    if (more.passes or 0.0) <= FACTOR * (less.passes or 0.0):
        return ""
    return f"{more.title} spent {times_more(more, less)}"


def times_more(more: MethodSpend, less: MethodSpend) -> str:
    """Return how much more one spent than another, in words."""
    if not less.passes:
        return f"{more.epochs:.2g} epochs" if more.epochs is not None else f"{more.passes:,.0f} passes"
    return f"{(more.passes or 0.0) / less.passes:.2g} × as much"
