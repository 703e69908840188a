"""Spends on the page and in figures, of runs whose scores are made up."""

from itertools import pairwise

import pytest
from report_runs import digits_run

from bitplan.core.spend import Spend
from bitplan.reports.contents import contents
from bitplan.reports.figures import _across, write_figures
from bitplan.reports.subject import run_subject
from bitplan.stats.spending import MethodSpend
from bitplan.store.run_folder import RunFolder, gains_file


@pytest.fixture
def spent(tmp_path):
    """A run whose methods spent what is told."""

    def make(spends):
        run = RunFolder(digits_run(tmp_path / "run"))
        for title, spend in spends.items():
            gains = run.gains[title].model_copy(update={"spend": spend, "samples_per_epoch": 100})
            (run.path / gains_file(title)).unlink()
            run.keep_gains(title, gains)
        return run

    return make


def page_of(run):
    return contents(run_subject(run), run.plans)


def test_the_answer_is_never_who_saw_test_scores(spent, tmp_path):
    plain = page_of(RunFolder(digits_run(tmp_path / "plain")))
    assert plain["answer"]["method"] == "eagl"
    page = page_of(spent({"eagl": Spend(300, labels=True, tested=True)}))
    assert page["answer"]["method"] == "uniform"
    assert page["answer"]["sentences"][0] == "Without eagl, which saw test scores."
    assert not any("eagl (p" in sentence for sentence in page["answer"]["sentences"])


def test_the_table_is_sorted_by_what_was_spent(spent):
    page = page_of(spent({"eagl": Spend(300, 150), "uniform": None, "first_to_last": Spend(30, labels=True)}))
    rows = page["spend"]["rows"]
    assert [row[:5] for row in rows] == [
        ["first_to_last", "0.10", "0.10", "once", "labels"],
        ["eagl", "2.0", "2.0", "once", "no labels"],
        ["uniform", "not said", "not said", "once", "not said"],
    ]
    assert page["spend"]["columns"][:3] == ["method", ">epochs", ">over all budgets"]


def test_a_figure_needs_somebody_who_says_it(spent, tmp_path):
    run = spent({"eagl": None, "uniform": None, "first_to_last": None})
    assert write_figures(run, tmp_path / "figures").left_out["spend"].startswith("no method that says what it spent")


@pytest.mark.parametrize("count", [5, 20])
def test_methods_that_spent_the_same_stand_side_by_side(count):
    """None is hidden by another, and none seems to exceed what it spent."""
    spends = [MethodSpend(f"method {number}", 12000.0, 0.2, 1, False, False, None, 1.0) for number in range(count)]
    places = sorted(_across(spends).values())
    assert max(places) == 0.2
    assert min(one / other for other, one in pairwise(places)) > 1.05
