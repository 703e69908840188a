"""The paper's figures as files."""

import re
import struct

import matplotlib
import pytest
from report_runs import digits_run, result_of, study_of, trial_of, write_run

from bitplan.core.errors import MissingExtra
from bitplan.core.records import Gains
from bitplan.core.studies import Method
from bitplan.reports.figures import write_figures
from bitplan.store.run_folder import RunFolder

NAMES = {"frontier", "spend", "histograms", "additivity", "regression", "selections"}


@pytest.fixture(scope="module")
def made(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    return write_figures(run, folder)


def test_every_figure_is_there_as_svg_pdf_and_png(made):
    assert {path.name for path in made.paths} == {f"{name}.{kind}" for name in NAMES for kind in ("svg", "pdf", "png")}
    assert list(made.left_out) == ["oracle"]
    starts = {".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG"}
    for path in made.paths:
        assert path.read_bytes().startswith(starts[path.suffix])


def test_settings_of_the_current_folder_have_no_say(made, run, tmp_path, monkeypatch):
    """matplotlib reads a matplotlibrc that lies there; such settings may run LaTeX, with a preamble of anybody's."""
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)
    monkeypatch.setitem(matplotlib.rcParams, "lines.color", "red")
    again = write_figures(run, tmp_path)
    assert [path.read_bytes() for path in again.paths] == [path.read_bytes() for path in made.paths]


def test_figures_are_one_column_wide(made):
    for path in made.paths:
        if path.suffix == ".svg":
            assert float(re.search(r'width="([\d.]+)pt"', path.read_text())[1]) == pytest.approx(3.4 * 72)
        if path.suffix == ".png":
            assert struct.unpack(">I", path.read_bytes()[16:20])[0] == pytest.approx(3.4 * 300, abs=1)


def test_fonts_are_inside_and_nothing_is_dated(made):
    for path in made.paths:
        content = path.read_bytes()
        assert b"Date" not in content
        if path.suffix == ".svg":
            assert b"<text" not in content  # letters are outlines
        if path.suffix == ".pdf":
            assert b"/FontFile2" in content


def test_figures_are_the_same_every_time_and_change_nothing_for_others(run, made, tmp_path):
    before = dict(matplotlib.rcParams)
    again = write_figures(run, tmp_path)
    assert dict(matplotlib.rcParams) == before
    assert [path.read_bytes() for path in again.paths] == [path.read_bytes() for path in made.paths]


def test_what_cannot_be_drawn_is_left_out_with_a_reason(tmp_path):
    found = write_figures(digits_run(tmp_path / "run", results=False, methods=("uniform",)), tmp_path / "figures")
    assert {path.stem for path in found.paths} == {"selections"}
    assert set(found.left_out) == {"frontier", "spend", "histograms", "additivity", "regression", "oracle"}
    assert "eagl does" in found.left_out["histograms"]


def test_the_oracle_has_its_own_frontier(run, tmp_path):
    names = [group.name for group in run.graph.selectable]
    rows = {name: (0.0, 1.0 + place % 3) for place, name in enumerate(names)}
    oracle = Gains(method="regression", choices=run.costs.choices, rows=rows, graph=run.graph.id)
    planners = (Method(name="uniform"), Method(name="regression", label="oracle"))
    study = study_of(planners=planners)
    write_run(tmp_path, study, run.graph, {"uniform": run.gains["uniform"], "oracle": oracle}, run.costs)
    for method in ("uniform", "regression"):
        for budget in study.budgets:
            for seed in study.seeds:
                trial = trial_of(study, method, budget, seed)
                score = 90 + len(method) + seed / 10 + float(budget.rstrip("%")) / 50
                RunFolder(tmp_path).trials.keep(trial.id, result_of(trial, score))
    found = write_figures(tmp_path, tmp_path / "figures")
    assert {"oracle", "frontier"} <= {path.stem for path in found.paths}
    assert "oracle" not in found.left_out


def test_the_selections_are_those_of_the_budget_asked_for(run, made, tmp_path):
    other = write_figures(run, tmp_path, budget="60%").paths
    first, second = (
        next(path for path in paths if path.name == "selections.png").read_bytes() for paths in (made.paths, other)
    )
    assert first != second


def test_without_matplotlib_one_line_says_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'bitplan\[report\]'"):
        write_figures(run, tmp_path)
