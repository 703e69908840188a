"""Methods on the same windows: paired differences, for whoever kept the losses of each."""

import pytest
from test_compare import full, result, study_of

from bitplan.core.trials import Result
from bitplan.reports.tables import window_sentences
from bitplan.stats.windows import window_pairs

EASY, HARD = (1.0, 2.0, 3.0, 4.0) * 5, (1.2, 2.1, 3.3, 4.1) * 5


def with_losses(study, losses):
    return [
        one.model_copy(update={"losses": losses[one.trial.method], "higher_is_better": False})
        for one in full(study, dict.fromkeys(losses, 50.0), higher=False)
    ]


def test_the_same_windows_are_compared_in_pairs():
    study = study_of(budgets=("70%",))
    found = window_pairs(study, with_losses(study, {"eagl": EASY, "hawq": HARD, "uniform": EASY}))
    assert [(one.first, one.second, one.verdict) for one in found] == [
        ("eagl", "HAWQ-v3", "eagl is better"),
        ("eagl", "uniform", "may be chance"),
        ("HAWQ-v3", "uniform", "uniform is better"),
    ]
    assert found[0].paired.difference == pytest.approx(-0.175)
    assert found[0].paired.low < -0.175 < found[0].paired.high < 0
    assert found[0].paired.windows == 20


def test_one_method_comes_first_where_it_is_asked_for():
    study = study_of(budgets=("70%",))
    results = with_losses(study, {"eagl": EASY, "hawq": HARD, "uniform": EASY})
    found = window_pairs(study, results, "uniform")
    assert [(one.first, one.second) for one in found] == [("uniform", "eagl"), ("uniform", "HAWQ-v3")]
    told = window_sentences(study, results)
    assert told[0].startswith("On the same 20 windows at 70%, eagl against HAWQ-v3: loss -0.1750 (95 % from -0.")
    assert told[0].endswith("; eagl is better.")


def test_without_losses_or_with_other_windows_nothing_is_compared():
    study = study_of(budgets=("70%",))
    assert window_pairs(study, full(study, {"eagl": 1, "hawq": 2})) == ()
    assert window_pairs(study, with_losses(study, {"eagl": EASY, "hawq": HARD[:-1]})) == ()


def test_losses_are_kept_and_change_no_id():
    one = result("eagl", "70%", 0, 12.0, higher=False)
    kept = one.model_copy(update={"losses": EASY})
    assert kept.id == one.id
    assert Result.from_json(kept.to_json()).losses == EASY
    assert Result.from_json(one.to_json()).losses == ()
