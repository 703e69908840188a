"""Figures for print, through matplotlib: one style, one column wide, the same bytes every time."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bitplan.core.errors import MissingExtra
from bitplan.core.store import write_bytes

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
