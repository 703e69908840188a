"""The figures of a run: the paper's (frontier, weights, additivity, regression, oracle, selections), and spend."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bitplan.core.budget import Budget
from bitplan.core.codes import entropy
from bitplan.core.errors import MissingExtra
from bitplan.core.precision import Precision
from bitplan.reports.contents import axis_label, fit_points
from bitplan.reports.kept_results import open_run
from bitplan.reports.scores import Scores, gather
from bitplan.reports.subject import Subject, run_subject
from bitplan.stats.compare import Cell
from bitplan.stats.spending import MethodSpend
from bitplan.store.files import write_bytes
from bitplan.store.run_folder import RunFolder

# Each figure, drawn on given axes.

MOST_TICKS = 9
TONES = ("#E69F00", "#56B4E9", "#0072B2", "#0B3C5D")


def draw_frontier(
    axes: Any, subject: Subject, scores: Scores, titles: Sequence[str], heavy: Sequence[str] = ()
) -> None:
    """Draw mean ± standard deviation of every method at every budget, side by side, with lines for the references."""
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
    """Draw a line with spreads; if colours are used up they come again, with other marks."""
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
    """Draw float and one-precision networks as lines with their names; far ones are named in the corner instead."""
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
    """Draw how often each code occurs in the layers of least, middle and greatest entropy."""
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
        panel.set_title(f"{_abbreviate(name, 17)}\n{entropy(counts):.3f} bits")
        panel.set_xlabel("code")
        panel.set_xticks([codes[0], 0, codes[-1]])


def draw_scatter(
    axes: Any, points: Sequence[tuple[float, float]], labels: tuple[str, str], title: str, colour: int = 0
) -> None:
    """Draw predicted against measured, with the line where both are equal."""
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
    """Draw the precision that each method gives to each group, in order, and how many groups get each."""
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
    axes.set_yticks(range(len(subject.candidates)), [_abbreviate(one.title, 16) for one in subject.candidates])
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
    """Return orange for the lowest choice, blue for the others: the higher the darker."""
    if choices == 2:
        return [TONES[0], TONES[2]]
    above = [min(3, 1 + 3 * (index - 1) // (choices - 1)) for index in range(1, choices)]
    return [TONES[0], *(TONES[tone] for tone in above)]


def _key(axes: Any, choices: Sequence[Precision], tones: Sequence[str]) -> None:
    for choice, tone in zip(choices, tones, strict=True):
        axes.bar([0], [0], color=tone, label=str(choice))  # an empty bar, for its entry in the legend
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(choices), handlelength=0.9, borderaxespad=0.2)


def _abbreviate(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[-most + 1 :]}"


# Score against spend: a point per method at one budget, filled if it looked at labels to choose.

FEW = 9
"""Methods whose names fit above the figure; those of more stand beside it."""


def draw_spend(axes: Any, subject: Subject, scores: Scores, spends: Sequence[MethodSpend]) -> None:
    """Draw mean ± standard deviation over seeds against epochs of training; methods without cost stand at 0."""
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
    """Return the place of each method; those that would hide each other stand side by side."""
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
    """Return the least spend above 0."""
    return min((one.epochs for one in spends if one.epochs), default=1.0)


def _scale(axes: Any, spends: Sequence[MethodSpend], limit: float | None) -> None:
    """Set a logarithmic axis with a place at the left for no spend, and a line at the study's limit."""
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


# Figures for print, through matplotlib: one style, one column wide, the same bytes every time.

COLUMN = 3.4  # inches, a column of a two-column page
FORMATS = ("svg", "pdf", "png")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B87A00", "#56B4E9", "#6B6B6B", "#7B4FB5")  # Okabe and Ito
MARKS = ("o", "s", "^", "D", "v", "P", "h", "*")
LINES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)), "--", "-", ":", "-.")
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 7, "axes.titlesize": 7.5, "axes.labelsize": 7, "legend.fontsize": 6.5,
    "xtick.labelsize": 6.5, "ytick.labelsize": 6.5, "axes.linewidth": 0.6, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
    "grid.color": "#dddddd", "grid.linewidth": 0.5, "lines.linewidth": 1.2, "lines.markersize": 3.5,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.major.size": 2.5, "ytick.major.size": 2.5,
    "legend.frameon": False, "figure.dpi": 100, "savefig.dpi": 300, "svg.fonttype": "path", "svg.hashsalt": "bitplan",
    "pdf.fonttype": 42,
}  # fmt: skip
_METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}

Draw = Callable[[Any], None]
"""Draws on an array of axes of shape (columns,)."""


def draw_figure(
    folder: Path, name: str, draw: Draw, *, height: float, width: float = COLUMN, columns: int = 1, same_y: bool = False
) -> list[Path]:
    """Draw on so many axes beside each other and write NAME.svg, NAME.pdf and NAME.png."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "report", "drawing figures")
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False, sharey=same_y)[0]
        draw(axes)
        return [write_bytes(folder / f"{name}.{kind}", _bytes(figure, kind)) for kind in FORMATS]


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a matplotlibrc in the current folder, which may be anybody's, has no say
        matplotlib.rcParams.update(_STYLE)
        yield


def _bytes(figure: Any, kind: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=_METADATA[kind])
    return buffer.getvalue()


ORACLE = "regression"


@dataclass(frozen=True)
class Figures:
    """The files that were written, and why some figures were not: {name: reason}."""

    paths: tuple[Path, ...]
    left_out: dict[str, str]


@dataclass(frozen=True)
class Sheet:
    """A figure ready to be drawn, in inches."""

    draw: Draw
    height: float
    width: float = COLUMN
    columns: int = 1
    same_y: bool = False


def write_figures(run: str | Path | RunFolder, folder: str | Path, *, budget: str | None = None) -> Figures:
    """Write every figure that the run has data for, as SVG, PDF and PNG; `budget` is that of the selections."""
    source = run if isinstance(run, RunFolder) else open_run(run)
    subject = run_subject(source, budget)
    scores = gather(subject, source.plans)
    paths: list[Path] = []
    left_out: dict[str, str] = {}
    for name, prepare in _FIGURES.items():
        sheet = prepare(subject, scores)
        if isinstance(sheet, str):
            left_out[name] = sheet
        else:
            size = {"height": sheet.height, "width": sheet.width}
            paths += draw_figure(Path(folder), name, sheet.draw, **size, columns=sheet.columns, same_y=sheet.same_y)
    return Figures(tuple(paths), left_out)


def _frontier(subject: Subject, scores: Scores | None) -> Sheet | str:
    if scores is None or not scores.methods:
        return "no trial is done yet"
    titles = [one.title for one in subject.candidates if one.gains.method != ORACLE]
    return Sheet(lambda axes: draw_frontier(axes[0], subject, scores, titles), height=2.5)


def _spend(subject: Subject, scores: Scores | None) -> Sheet | str:
    done = {} if scores is None else {cell.title: cell for cell in scores.at(subject.budget)}
    known = [one for one in subject.spends.values() if one.epochs is not None and one.title in done]
    if scores is None or not known:
        return f"no method that says what it spent has scores at {subject.budget}"
    height, width = (2.7, COLUMN) if len(known) <= FEW else (max(2.7, 0.15 * len(known)), 2 * COLUMN)
    return Sheet(lambda axes: draw_spend(axes[0], subject, scores, known), height, width)


def _oracle(subject: Subject, scores: Scores | None) -> Sheet | str:
    lacking = f"no method {ORACLE} of this study has scores"
    if scores is None:
        return lacking
    done = {cell.title for cell in scores.methods}
    oracle = [title for title in _by_methods(subject, ORACLE) if title in done]
    if not oracle:
        return lacking
    titles = [*_by_methods(subject, "eagl", "alps"), *oracle]
    return Sheet(lambda axes: draw_frontier(axes[0], subject, scores, titles, heavy=oracle), height=2.5)


def _by_methods(subject: Subject, *names: str) -> list[str]:
    """Return the titles of the candidates that these methods estimated."""
    return [candidate.title for candidate in subject.candidates if candidate.gains.method in names]


def _weights(subject: Subject, _: Scores | None) -> Sheet | str:
    counted = next((one.gains for one in subject.candidates if one.gains.histograms), None)
    if counted is None or counted.histograms is None:
        return "no method counted the weights; eagl does"
    shown = counted.histograms
    return Sheet(lambda axes: draw_histograms(axes, shown), height=1.45, columns=min(3, len(shown)), same_y=True)


def _additivity(subject: Subject, _: Scores | None) -> Sheet | str:
    pairs = subject.pairs
    if pairs is None:
        return "the experiment on pairs was not run"
    points = [(pair.predicted, pair.measured) for pair in pairs.pairs]
    labels = f"sum of single drops ({pairs.metric})", f"measured drop ({pairs.metric})"
    return Sheet(lambda axes: draw_scatter(axes[0], points, labels, f"R = {pairs.correlation:.2f}"), height=2.9)


def _regression(subject: Subject, _: Scores | None) -> Sheet | str:
    fit = subject.fit
    if fit is None:
        return "the regression was not run"
    fitted = [(predicted, measured) for predicted, measured, _ in fit_points(fit, held_out=False)]
    held_out = [(predicted, measured) for predicted, measured, _ in fit_points(fit, held_out=True)]
    labels = f"predicted {fit.metric}", f"measured {fit.metric}"
    held_out_title = "held out"
    if fit.correlation_held_out is not None:
        held_out_title += f", R = {fit.correlation_held_out:.4f}"

    def draw(axes: list[object]) -> None:
        draw_scatter(axes[0], fitted, labels, f"fitted, R = {fit.correlation:.4f}")
        if held_out:
            draw_scatter(axes[1], held_out, labels, held_out_title, colour=1)

    return Sheet(draw, height=1.95, columns=2 if held_out else 1)


def _selections(subject: Subject, _: Scores | None) -> Sheet | str:
    rows = len(subject.candidates)
    return Sheet(lambda axes: draw_selection(axes[0], subject), height=0.75 + 0.2 * rows)


_FIGURES: dict[str, Callable[[Subject, Scores | None], Sheet | str]] = {
    "frontier": _frontier,
    "spend": _spend,
    "histograms": _weights,
    "additivity": _additivity,
    "regression": _regression,
    "oracle": _oracle,
    "selections": _selections,
}
