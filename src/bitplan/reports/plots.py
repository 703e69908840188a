"""What each figure shows, drawn on given axes; nothing here knows how a figure is made or written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from bitplan.core.budget import Budget
from bitplan.core.codes import entropy
from bitplan.reports.contents import axis_label
from bitplan.reports.drawing import COLOURS, LINES, MARKS
from bitplan.reports.scores import Scores
from bitplan.reports.subject import Subject

MOST_TICKS = 9
TONES = ("#E69F00", "#56B4E9", "#0072B2", "#0B3C5D")


def draw_frontier(
    axes: Any, subject: Subject, scores: Scores, titles: Sequence[str], heavy: Sequence[str] = ()
) -> None:
    """Mean ± standard deviation of every method at every budget, side by side, with lines for the references."""
    order = [candidate.title for candidate in subject.candidates]
    unit = Budget.parse(subject.budget).unit
    amount = {cell.budget: float(Budget.parse(cell.budget).place(unit)) for cell in scores.methods}
    amounts = sorted(set(amount.values()))
    gap = min((later - before for before, later in pairwise(amounts)), default=1.0)
    for title in titles:
        cells = [cell for cell in scores.methods if cell.title == title]
        cells.sort(key=lambda cell: amount[cell.budget])
        if not cells:
            continue
        turn, place = divmod(order.index(title), len(COLOURS))
        colour = "black" if title in heavy else COLOURS[place]
        aside = (titles.index(title) - (len(titles) - 1) / 2) * 0.22 * gap / len(titles)  # or spreads hide each other
        across = [amount[cell.budget] + aside for cell in cells]
        axes.errorbar(
            across, [cell.mean for cell in cells], yerr=[cell.sd or 0.0 for cell in cells], label=title, color=colour,
            marker=MARKS[(place + turn) % len(MARKS)], linestyle=LINES[place], capsize=1.8, elinewidth=0.8,
            capthick=0.8, linewidth=1.8 if title in heavy else 1.2, markeredgecolor="white", markeredgewidth=0.4,
        )  # fmt: skip
    _references(axes, scores)
    axes.set_xlabel(axis_label(subject))
    axes.set_ylabel(scores.metric if scores.higher_is_better else f"{scores.metric} (lower is better)")
    axes.set_xticks(amounts[:: -(-len(amounts) // MOST_TICKS)])
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2, columnspacing=1.2)


def _references(axes: Any, scores: Scores) -> None:
    """Float and uniform networks as lines with their names; far ones are named in the corner instead."""
    low, high = axes.get_ylim()
    span = high - low
    far = []
    for cell in scores.references:
        name = cell.title if cell.role == "float" else f"uniform {cell.title}"
        if not low - 1.5 * span < cell.mean < high + 1.5 * span:
            far.append(f"{name}: {cell.mean:.2f}")
            continue
        above = cell.mean > (low + high) / 2  # the curves come near it at the right, so its name stands at the left
        axes.axhline(cell.mean, color="#333333", linewidth=0.8, linestyle="--" if cell.role == "float" else ":")
        axes.annotate(
            name, (0.005 if above else 0.995, cell.mean), xycoords=("axes fraction", "data"),
            ha="left" if above else "right", va="bottom", fontsize=6, color="#333333",
        )  # fmt: skip
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.06 * (high - low))  # room for the name of a line at the top
    if far:
        axes.annotate("; ".join(far), (0.995, 0.02), xycoords="axes fraction", ha="right", fontsize=6, color="#333333")


def draw_histograms(axes: Sequence[Any], counted: Mapping[str, Sequence[int]]) -> None:
    """The layers of least, middle and greatest entropy: how often each code occurs."""
    ranked = sorted(counted, key=lambda name: entropy(counted[name]))
    chosen = [ranked[0], ranked[len(ranked) // 2], ranked[-1]] if len(ranked) > 2 else ranked
    for place, (one, name) in enumerate(zip(axes, chosen, strict=True)):
        counts, whole = counted[name], sum(counted[name]) or 1
        codes = [index - len(counts) // 2 for index in range(len(counts))]
        one.bar(codes, [count / whole for count in counts], width=0.85, color=COLOURS[0])
        one.set_title(f"{_short(name, 17)}\n{entropy(counts):.3f} bits")
        one.set_xlabel("code")
        one.set_xticks([codes[0], 0, codes[-1]])
        if place == 0:
            one.set_ylabel("share of weights")


def draw_scatter(
    axes: Any, points: Sequence[tuple[float, float]], labels: tuple[str, str], title: str, colour: int = 0
) -> None:
    """Predicted against measured, with the line where both are equal."""
    values = [value for point in points for value in point]
    low, high = min(values), max(values)
    air = 0.05 * (high - low or 1)
    bounds = low - air, high + air
    axes.plot(bounds, bounds, color="#777777", linewidth=0.8, linestyle="--", zorder=1)
    axes.scatter(*zip(*points, strict=True), s=11, color=COLOURS[colour], alpha=0.8, linewidths=0.3, edgecolors="white")
    axes.set(xlim=bounds, ylim=bounds, aspect="equal", xlabel=labels[0], ylabel=labels[1], title=title)
    axes.locator_params(nbins=5)
    axes.grid(False)


def draw_selection(axes: Any, subject: Subject) -> None:
    """Which precision each method gives to each group, in order, and how many groups get each."""
    groups, choices = subject.graph.selectable, subject.candidates[0].gains.choices
    last = len(choices) - 1
    tones = [
        TONES[0 if not index else 2 if last == 1 else min(3, 1 + 3 * (index - 1) // last)] for index in range(last + 1)
    ]
    for row, candidate in enumerate(subject.candidates):
        plan = subject.make(candidate, subject.budget)
        picks = [choices.index(plan.precisions[group.name]) for group in groups]
        # A lower precision is also a lower cell, so that the figure reads without colour.
        heights = [0.82 * choices[pick].weight_bits / choices[-1].weight_bits for pick in picks]
        axes.bar(
            range(1, len(groups) + 1), heights, bottom=[row + 0.41 - height for height in heights], width=0.9,
            color=[tones[pick] for pick in picks],
        )  # fmt: skip
        axes.text(len(groups) + 0.9, row, f"{picks.count(0)}", va="center", fontsize=6.5)
    axes.text(len(groups) + 0.9, -0.72, f"at {choices[0]}", va="center", ha="left", fontsize=6)
    axes.set_yticks(range(len(subject.candidates)), [_short(one.title, 16) for one in subject.candidates])
    axes.set(
        xlim=(0.3, len(groups) + 0.7),
        ylim=(len(subject.candidates) - 0.45, -0.55),
        xlabel=f"group, in order of execution, at {subject.budget}",
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(False)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    _key(axes, [str(choice) for choice in choices], tones)


def _key(axes: Any, names: Sequence[str], tones: Sequence[str]) -> None:
    for name, tone in zip(names, tones, strict=True):
        axes.bar([0], [0], color=tone, label=name)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(names), handlelength=0.9, borderaxespad=0.2)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[-most + 1 :]}"
