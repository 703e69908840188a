"""Score against spend: a point per method at one budget, filled where it looked at labels to choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitplan.reports.drawing import COLOURS, MARKS
from bitplan.reports.scores import Scores
from bitplan.reports.subject import Subject
from bitplan.stats.spending import MethodSpend

FEW = 9
"""Methods whose names fit above the figure; those of more stand beside it."""


def draw_spend(axes: Any, subject: Subject, scores: Scores, spends: Sequence[MethodSpend]) -> None:
    """Mean ± standard deviation over seeds against epochs of training; what cost nothing stands at 0, at the left."""
    assert subject.study is not None
    order = [method.title for method in subject.study.methods]
    cells = {cell.title: cell for cell in scores.at(subject.budget)}
    across = _across(spends)
    for one in spends:
        turn, place = divmod(order.index(one.title), len(COLOURS))
        cell, colour = cells[one.title], COLOURS[place]
        axes.errorbar(
            [across[one.title]], [cell.mean], yerr=[cell.sd or 0.0], color=colour, linestyle="none",
            marker=MARKS[(place + turn) % len(MARKS)], markerfacecolor=colour if one.labels else "white",
            markersize=4.5, markeredgecolor=colour, capsize=1.8, elinewidth=0.8, capthick=0.8,
            label=f"{one.title}{' (test scores)' if one.tested else ''}",
        )  # fmt: skip
    _scale(axes, spends, subject.study.spend)
    axes.set_ylabel(f"{scores.metric} at {subject.budget}{'' if scores.higher_is_better else ' (lower is better)'}")
    if len(spends) <= FEW:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2, columnspacing=1.0)
    else:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _across(spends: Sequence[MethodSpend]) -> dict[str, float]:
    """Where each stands; those that would hide each other stand side by side."""
    free = [one.title for one in spends if not one.epochs]
    apart = 1.12 if len(spends) <= FEW else 1.07
    places: dict[str, float] = {}
    for one in spends:
        if one.epochs:
            place = one.epochs
            while any(1 / apart < other / place < apart for other in places.values()):
                place /= apart  # to the left: nobody may seem to exceed the line
            places[one.title] = place
        else:
            places[one.title] = 0.16 * (free.index(one.title) - (len(free) - 1) / 2) * _least(spends)
    return places


def _least(spends: Sequence[MethodSpend]) -> float:
    """The least that was spent by who spent anything."""
    return min((one.epochs for one in spends if one.epochs), default=1.0)


def _scale(axes: Any, spends: Sequence[MethodSpend], limit: float | None) -> None:
    """Logarithmic, but for a place at the left where nothing was spent; a line at what the study allows."""
    least = _least(spends)
    most = max([one.epochs for one in spends if one.epochs] + [limit or 0.0, least])
    axes.set_xscale("symlog", linthresh=least / 2, linscale=0.6)
    axes.set_xlim(-0.3 * least, 2.2 * most)
    axes.set_xlabel("epochs of training that choosing took (filled: looked at labels)")
    powers = [10.0**power for power in range(-6, 7) if least / 2 <= 10.0**power <= 2.2 * most]
    axes.set_xticks([0.0, *powers], ["0", *(f"{power:g}" for power in powers)])
    axes.minorticks_off()
    if limit is not None:
        axes.axvline(limit, color="#333333", linewidth=0.8, linestyle=":")
        axes.annotate("spend", (limit, 0.02), xycoords=("data", "axes fraction"), fontsize=6, ha="right", rotation=90,
                      va="bottom", color="#333333")  # fmt: skip
