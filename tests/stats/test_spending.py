"""What methods spent, and who is compared as equals."""

import pytest
from test_compare import full, study_of

from bitplan.core.records import Gains
from bitplan.core.spend import Spend
from bitplan.core.studies import Method
from bitplan.stats.compare import compare, warning
from bitplan.stats.spending import MethodSpend, spends_by_title, why_unequal
from bitplan.store.run_folder import title_of_gains


def gains_of(method, spend, per_epoch=100, seconds=1.0):
    row = {"a": (0.0, 1.0)}
    return Gains(method=method, choices=("w2a2", "w4a4"), rows=row, graph="g", spend=spend, samples_per_epoch=per_epoch,
                 seconds=seconds)  # fmt: skip


def spend_of(title, passes, labels=False, tested=False, epochs=None):
    told = epochs if epochs is not None else None if passes is None else passes / 300
    return MethodSpend(title, passes, told, 1, labels, tested, 0, 1.0)


def test_a_method_is_paid_once_and_a_search_for_every_budget():
    study = study_of(seeds=(0, 1)).model_copy(update={"methods": (Method(name="drift"), Method(name="evolution"))})
    bound = {
        title_of_gains("evolution", (budget,), seed): gains_of("evolution", Spend(forwards=200 + seed, evaluations=2))
        for budget in study.budgets
        for seed in study.seeds
    }
    found = spends_by_title(study, {"drift": gains_of("drift", Spend(60, 60, labels=True)), **bound})
    once, each = found["drift"], found["evolution"]
    assert (once.passes, once.epochs, once.times, once.paid) == (180, 0.6, 1, "once")
    assert (each.passes, each.times, each.paid) == (201, 2, "for each of 2 budgets")
    assert (once.saw, each.saw) == ("labels", "no labels")


def test_what_is_not_said_is_not_guessed_at():
    study = study_of(seeds=(0,))
    found = spends_by_title(study, {
        "eagl": gains_of("eagl", None),
        "HAWQ-v3": gains_of("hawq", Spend(3, labels=None)),
        "uniform": gains_of("uniform", Spend(), per_epoch=None),
    })  # fmt: skip
    assert (found["eagl"].passes, found["eagl"].epochs, found["eagl"].saw) == (None, None, "not said")
    assert (found["HAWQ-v3"].passes, found["HAWQ-v3"].saw) == (3, "not said")
    assert found["uniform"].epochs == 0
    bound = {title_of_gains("eagl", (study.budgets[0],), 0): gains_of("eagl", Spend(3)),
             title_of_gains("eagl", (study.budgets[1],), 0): gains_of("eagl", None)}  # fmt: skip
    assert spends_by_title(study, bound)["eagl"].passes is None


CASES = [
    (spend_of("a", 0), spend_of("b", 150), ""),  # both within half an epoch
    (spend_of("a", 900), spend_of("b", 1100), ""),  # both above it, and near each other
    (spend_of("a", 100), spend_of("b", 1100), "b spent 11 × as much"),
    (spend_of("a", 1100), spend_of("b", 0), "a spent 3.7 epochs"),
    (spend_of("a", None), spend_of("b", 10), "a does not say what it spent"),
    (spend_of("a", 10, labels=True, tested=True), spend_of("b", 10), "a saw test scores"),
    (spend_of("a", 10), None, "what they spent is not known"),
]


@pytest.mark.parametrize(("one", "other", "said"), CASES)
def test_equals_keep_within_the_spend_or_near_each_other(one, other, said):
    study = study_of().model_copy(update={"spend": 0.5})
    assert why_unequal(study, one, other) == why_unequal(study, other, one) == said
    assert why_unequal(study_of(), one, other) == "", "a study that sets no spend compares as before"


def test_unequal_pairs_have_no_winner_and_the_others_stay_as_they_were():
    study = study_of().model_copy(update={"spend": 0.5})
    results = full(study, {"eagl": 50.0, "hawq": 80.0, "uniform": 90.0})
    spends = {"eagl": spend_of("eagl", 0), "HAWQ-v3": spend_of("HAWQ-v3", 3000), "uniform": spend_of("uniform", 0)}
    plain = {(one.first, one.second): one for one in compare(study, results)}
    found = {(one.first, one.second): one for one in compare(study, results, spends=spends)}
    assert found["eagl", "uniform"] == plain["eagl", "uniform"]
    assert found["eagl", "uniform"].better() == "uniform"
    dear = found["eagl", "HAWQ-v3"]
    assert plain["eagl", "HAWQ-v3"].better() == "HAWQ-v3"
    assert dear.better() is None
    assert dear.verdict() == "unequal: HAWQ-v3 spent 10 epochs"
    assert warning([dear]) is None
