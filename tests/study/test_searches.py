"""Searches in a study: an estimate for each budget, and everything that reads a run takes them."""

from pathlib import Path

import pytest
from tiny import STUDY
from typer.testing import CliRunner

from bitplan.cli.app import app
from bitplan.core.runs import RunFolder
from bitplan.reports.tables import make as table
from bitplan.study.check import check
from bitplan.study.clean import find_waste
from bitplan.study.forecast import forecast
from bitplan.study.spec import read_study
from bitplan.study.sweep import sweep

SEARCH = """
[[methods]]
name = "random_search"
options = { judge = "drift:samples=32", spend = 192 }
label = "lots"
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    home = tmp_path_factory.mktemp("searched")
    (home / "study.toml").write_text(STUDY.split('[[methods]]\nname = "uniform"')[0] + SEARCH)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parent)
        study = read_study(home / "study.toml")
        told = forecast(study, home / "run", trust=True)
        summary = sweep(study, home / "run", trust=True)
    assert (summary.failed, summary.done) == ((), summary.total)
    return study, RunFolder(home / "run"), told


def test_it_is_estimated_for_each_budget(swept):
    study, run, told = swept
    assert list(run.gains) == ["eagl"]
    found = run.bound_gains["lots"]
    assert {budget: gains.budgets for budget, gains in found.items()} == {"85%": ("85%",), "70%": ("70%",)}
    assert {gains.counts["spend"] for gains in found.values()} == {192}
    assert told.methods == {}
    plans = run.plans
    for result in run.results:
        if study.title_of(result.trial) == "lots":
            plan = plans[result.plan]
            assert plan.sources["gains"] == found[result.trial.budgets[0]].id
            assert all(limit.cost <= limit.capacity for limit in plan.limits)


def test_what_reads_a_run_takes_it(swept, tmp_path):
    study, run, _ = swept
    assert check(run.path).wrong == ()
    kept = [path for path in find_waste(run.path, [study]).paths if path.parent.name == "estimates"]
    assert kept == []
    rows = {row[0]: row for row in table("costs", run, plain=False).rows}
    assert set(rows) == {"eagl", "lots at 85%", "lots at 70%"}
    assert "lots" in {row[0] for row in table("frontier", run, plain=False).rows}
    for words in (["compare", str(run.path)], ["report", str(run.path), "-o", str(tmp_path / "page.html")]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    assert "lots" in (tmp_path / "page.html").read_text()


def test_a_sweep_again_does_nothing(swept):
    study, run, _ = swept
    assert sweep(study, run.path, trust=True).trained == 0
