"""What each figure shows, drawn on given axes; nothing here knows how a figure is made or written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from bitplan.core.budget import Budget
from bitplan.core.codes import entropy
from bitplan.core.precision import Precision
from bitplan.reports.contents import axis_label
from bitplan.reports.drawing import COLOURS, LINES, MARKS
from bitplan.reports.scores import Scores
from bitplan.reports.subject import Subject
from bitplan.stats.compare import Cell

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
    for place, title in enumerate(titles):
        cells = sorted((cell for cell in scores.methods if cell.title == title), key=lambda cell: amount[cell.budget])
        if not cells:
            continue
        from_middle = place - (len(titles) - 1) / 2
        aside = from_middle * 0.22 * gap / len(titles)  # or the spreads of methods hide each other
        across = [amount[cell.budget] + aside for cell in cells]
        _draw_method(axes, cells, across, order.index(title), heavy=title in heavy)
    _references(axes, scores)
    axes.set_xlabel(axis_label(subject))
    axes.set_ylabel(scores.metric if scores.higher_is_better else f"{scores.metric} (lower is better)")
    every = -(-len(amounts) // MOST_TICKS)
    axes.set_xticks(amounts[::every])
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2, columnspacing=1.2)


def _draw_method(axes: Any, cells: Sequence[Cell], across: Sequence[float], number: int, *, heavy: bool) -> None:
    """A line with spreads; where colours are used up they come again, with other marks."""
    turn, place = divmod(number, len(COLOURS))
    means = [cell.mean for cell in cells]
    spreads = [cell.sd or 0.0 for cell in cells]
    colour, width = ("black", 1.8) if heavy else (COLOURS[place], 1.2)
    axes.errorbar(
        across, means, yerr=spreads, label=cells[0].title, color=colour, linewidth=width, linestyle=LINES[place],
        marker=MARKS[(place + turn) % len(MARKS)], markeredgecolor="white", markeredgewidth=0.4,
        capsize=1.8, elinewidth=0.8, capthick=0.8,
    )  # fmt: skip


def _references(axes: Any, scores: Scores) -> None:
    """Float and one-precision networks as lines with their names; far ones are named in the corner instead."""
    low, high = axes.get_ylim()
    span = high - low
    far = []
    for cell in scores.references:
        name, dashes = cell.name, "--" if cell.role == "float" else ":"
        near = low - 1.5 * span < cell.mean < high + 1.5 * span
        if not near:
            far.append(f"{name}: {cell.mean:.2f}")
            continue
        axes.axhline(cell.mean, color="#333333", linewidth=0.8, linestyle=dashes)
        # The curves come near a line at the top at the right, so its name stands at the left.
        above = cell.mean > (low + high) / 2
        side, along = ("left", 0.005) if above else ("right", 0.995)
        axes.annotate(
            name, (along, cell.mean), xycoords=("axes fraction", "data"), ha=side, va="bottom", fontsize=6,
            color="#333333",
        )  # fmt: skip
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.06 * (high - low))  # room for the name of a line at the top
    if far:
        axes.annotate("; ".join(far), (0.995, 0.02), xycoords="axes fraction", ha="right", fontsize=6, color="#333333")


def draw_histograms(axes: Sequence[Any], counted: Mapping[str, Sequence[int]]) -> None:
    """The layers of least, middle and greatest entropy: how often each code occurs."""
    ranked = sorted(counted, key=lambda name: entropy(counted[name]))
    chosen = ranked
    if len(ranked) > 3:
        chosen = [ranked[0], ranked[len(ranked) // 2], ranked[-1]]
    axes[0].set_ylabel("share of weights")
    for panel, name in zip(axes, chosen, strict=True):
        counts = counted[name]
        total = sum(counts) or 1
        lowest = -(len(counts) // 2)
        codes = range(lowest, lowest + len(counts))
        panel.bar(codes, [count / total for count in counts], width=0.85, color=COLOURS[0])
        panel.set_title(f"{_short(name, 17)}\n{entropy(counts):.3f} bits")
        panel.set_xlabel("code")
        panel.set_xticks([codes[0], 0, codes[-1]])


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
    places = range(1, len(groups) + 1)
    tones = _tones(len(choices))
    for row, candidate in enumerate(subject.candidates):
        plan = subject.make(candidate, subject.budget)
        picks = [choices.index(plan.precisions[group.name]) for group in groups]
        # A lower precision is also a lower cell, so that the figure reads without colour.
        heights = [0.82 * choices[pick].weight_bits / choices[-1].weight_bits for pick in picks]
        bottoms = [row + 0.41 - height for height in heights]  # rows are counted downwards
        axes.bar(places, heights, bottom=bottoms, width=0.9, color=[tones[pick] for pick in picks])
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
    _key(axes, choices, tones)


def _tones(choices: int) -> list[str]:
    """Orange for the lowest choice, blue for the others: the higher the darker."""
    if choices == 2:
        return [TONES[0], TONES[2]]
    above = [min(3, 1 + 3 * (index - 1) // (choices - 1)) for index in range(1, choices)]
    return [TONES[0], *(TONES[tone] for tone in above)]


def _key(axes: Any, choices: Sequence[Precision], tones: Sequence[str]) -> None:
    for choice, tone in zip(choices, tones, strict=True):
        axes.bar([0], [0], color=tone, label=str(choice))  # an empty bar, for its entry in the legend
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(choices), handlelength=0.9, borderaxespad=0.2)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[-most + 1 :]}"
