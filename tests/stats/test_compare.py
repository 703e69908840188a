"""Comparison of methods from a study and its results, complete or not."""

import pytest

from bitplan.core.errors import InputError
from bitplan.core.records import Gains, Plan
from bitplan.core.studies import Method, Start, Study
from bitplan.core.trials import Recipe, Result, Trial
from bitplan.stats.compare import areas, cells, compare, warning
from bitplan.stats.ranksum import rank_correlation

RECIPE = Recipe(steps=10)


def study_of(seeds=(0, 1, 2, 3, 4), budgets=("90%", "70%")):
    return Study(
        name="s", task="digits", model="digits_resnet", choices=("w2a2", "w4a4"), budgets=budgets, seeds=seeds,
        methods=(Method(name="eagl"), Method(name="hawq", label="HAWQ-v3"), Method(name="uniform")),
        start=Start(), recipe=RECIPE,
    )  # fmt: skip


def result(method, budget, seed, score, *, plan="", higher=True, recipe=RECIPE, **changes):
    role = "choice" if budget else "float" if method == "float" else "reference"
    trial = Trial(
        **{
            "role": role, "precision": method if role == "reference" else None,
            "task": "digits", "model": "digits_resnet", "start": "x", "method": method, "seed": seed,
            "choices": ("w2a2", "w4a4"), "recipe": recipe, "budgets": (budget,) if budget else (),
        }
        | changes
    )  # fmt: skip
    return Result(trial=trial, plan=plan or f"{method}-{budget}", score=score, higher_is_better=higher)


def full(study, levels, higher=True):
    return [
        result(method, budget, seed, level + seed, higher=higher)
        for method, level in levels.items()
        for budget in study.budgets
        for seed in study.seeds
    ]


def test_every_pair_at_every_budget_with_holm_over_budgets():
    study = study_of()
    found = compare(study, full(study, {"eagl": 60, "hawq": 50, "uniform": 50}))
    assert [(one.first, one.second, one.budget) for one in found][:3] == [
        ("eagl", "HAWQ-v3", "90%"),
        ("eagl", "HAWQ-v3", "70%"),
        ("eagl", "uniform", "90%"),
    ]
    assert len(found) == 6
    best, same = found[0], found[-1]
    assert best.difference == 10
    assert best.p == best.floor == 2 / 252
    assert best.corrected == best.corrected_floor == 4 / 252
    assert best.verdict() == "eagl is better"
    assert (best.better(), best.better(corrected=True)) == ("eagl", "eagl")
    assert same.p == 1
    assert same.difference == 0
    assert same.verdict() == "not significant"
    assert same.better() is None
    assert warning(found) is None


@pytest.mark.parametrize(("seeds", "exact"), [(30, True), (31, False)])
def test_a_comparison_says_whether_its_test_is_exact(seeds, exact):
    study = study_of(seeds=tuple(range(seeds)))
    found = compare(study, full(study, {"eagl": 60, "hawq": 50}))
    assert {one.exact for one in found} == {exact}


@pytest.mark.parametrize(("higher", "sign"), [(True, 1), (False, -1)])
def test_a_positive_difference_means_that_the_first_is_better(higher, sign):
    study = study_of()
    found = compare(study, full(study, {"eagl": 60, "hawq": 50}, higher=higher))
    assert {one.difference for one in found} == {10 * sign}
    assert found[0].verdict() == ("eagl is better" if higher else "HAWQ-v3 is better")
    assert found[0].better() == ("eagl" if higher else "HAWQ-v3")


def test_three_seeds_are_said_to_be_too_few():
    study = study_of(seeds=(0, 1, 2))
    found = compare(study, full(study, {"eagl": 60, "hawq": 50}))
    assert {one.p for one in found} == {0.1}
    assert "cannot be significant: p ≥ 0.1 with 3 and 3 seeds" in found[0].verdict()
    assert "p cannot be below 0.1" in warning(found)


def test_eight_budgets_at_five_seeds_do_not_survive_holm():
    study = study_of(budgets=tuple(f"{share}%" for share in range(60, 100, 5)))
    found = compare(study, full(study, {"eagl": 60, "hawq": 50}))
    assert found[0].verdict() == "eagl is better, not after Holm's correction"
    assert (found[0].better(), found[0].better(corrected=True)) == ("eagl", None)
    assert "0.063 after Holm's correction" in warning(found)


def test_missing_trials_leave_fewer_seeds_and_what_has_none_is_not_compared():
    study = study_of()
    some = [result("eagl", "90%", 0, 60.0), result("hawq", "90%", 1, 50.0), result("hawq", "90%", 0, 51.0)]
    found = cells(study, some)
    assert [(cell.title, cell.budget, cell.seeds, cell.mean) for cell in found] == [
        ("eagl", "90%", (0,), 60.0),
        ("HAWQ-v3", "90%", (0, 1), 50.5),
    ]
    assert found[0].sd is None
    (one,) = compare(study, some)
    assert one.seeds == (1, 2)
    assert one.floor == pytest.approx(2 / 3)
    assert compare(study, []) == ()
    assert cells(study, []) == ()
    assert warning([]) is None


def test_what_is_left_over_from_other_settings_is_not_counted():
    study = study_of()
    kept = result("eagl", "90%", 0, 60.0)
    others = [
        result("eagl", "90%", 0, 1.0, recipe=Recipe(steps=99)),
        result("eagl", "50%", 0, 1.0),
        result("eagl", "90%", 77, 1.0),
        result("alps", "90%", 0, 1.0),
        result("eagl", "90%", 0, 1.0, task="cifar10"),
        result("eagl", "90%", 0, 1.0, options={"steps": "mse"}),
    ]
    (cell,) = cells(study, [kept, *others])
    assert cell.scores == (60.0,)


def test_two_trials_for_one_seed_are_refused():
    with pytest.raises(InputError, match="two trials claim seed 0 of eagl at 90%"):
        cells(study_of(), [result("eagl", "90%", 0, 60.0), result("eagl", "90%", 0, 61.0, start="y")])


def test_references_come_first_and_are_not_compared():
    study = study_of()
    some = [
        *full(study, {"eagl": 60}),
        result("w4a4", None, 0, 90.0),
        result("w2a2", None, 0, 40.0),
        result("float", None, 0, 95.0, recipe=Recipe(epochs=3)),
        result("w4a4", None, 0, 89.0, recipe=Recipe(epochs=3)),  # the start itself, not trained on
    ]
    assert [cell.title for cell in cells(study, some)] == ["w2a2", "w4a4", "float", "eagl", "eagl"]
    assert compare(study, some) == ()


def test_methods_with_the_same_plan_say_so(graph):
    study = study_of()
    same = [result("eagl", "90%", 0, 60.0, plan="p"), result("hawq", "90%", 0, 60.0, plan="p")]
    assert [cell.shared_with for cell in cells(study, same)] == [("HAWQ-v3",), ("eagl",)]
    assert compare(study, same)[0].verdict() == "the same plan"
    made = [Plan.uniform(graph, "w2a2").model_copy(update={"method": method}) for method in ("eagl", "hawq", "uniform")]
    made[2] = Plan.uniform(graph, "w4a4")
    several = [
        result(method, "90%", 0, 60.0, plan=plan.id)
        for method, plan in zip(("eagl", "hawq", "uniform"), made, strict=True)
    ]
    assert [one.shared for one in compare(study, several)] == [False] * 3
    by_id = {plan.id: plan for plan in made}
    assert [one.shared for one in compare(study, several, by_id)] == [True, False, False]


def test_areas_of_the_methods_that_have_every_budget():
    study = study_of()
    some = full(study, {"eagl": 60, "hawq": 50})[:-5]  # hawq lacks the last budget
    found = areas(study, cells(study, some))
    assert list(found) == ["eagl"]
    assert found["eagl"].value == pytest.approx(62)
    assert found["eagl"].low < 62 < found["eagl"].high


def test_results_of_two_directions_are_refused():
    with pytest.raises(InputError, match="not one task"):
        compare(study_of(), [result("eagl", "90%", 0, 1.0), result("hawq", "90%", 0, 1.0, higher=False)])


def gains_of(**values):
    rows = {name: (0.0, float(value)) for name, value in values.items()}
    return Gains(method="m", choices=("w2a2", "w4a4"), rows=rows, graph="g")


def test_rank_correlation_of_gains():
    one = gains_of(a=1, b=2, c=3)
    assert rank_correlation(one, gains_of(c=30, b=20, a=10)) == pytest.approx(1)
    assert rank_correlation(one, gains_of(a=9, b=8, c=7)) == pytest.approx(-1)
    assert rank_correlation(one, gains_of(a=1, b=3, c=2)) == pytest.approx(0.5)
    assert rank_correlation(one, gains_of(a=1, b=1, c=1)) is None
    with pytest.raises(InputError, match="same groups"):
        rank_correlation(one, gains_of(a=1, b=2))
