"""The figures of a run: the paper's (frontier, weights, additivity, regression, oracle, selections), and spend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bitplan.core.runs import RunFolder
from bitplan.reports.drawing import COLUMN, Draw, draw_figure
from bitplan.reports.evidence import fit_points
from bitplan.reports.kept import look_at
from bitplan.reports.plots import draw_frontier, draw_histograms, draw_scatter, draw_selection
from bitplan.reports.scores import Scores, gather
from bitplan.reports.spend_plot import FEW, draw_spend
from bitplan.reports.subject import Subject, run_subject

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
    source = run if isinstance(run, RunFolder) else look_at(run)
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
    """The titles of the candidates that these methods estimated."""
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
