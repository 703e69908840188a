"""Recipes in studies that say more than one length: second stages, and the reference at the lowest choice."""

import pytest

from bitplan.core.errors import FileError
from bitplan.core.studies import Study
from bitplan.core.trials import Result
from bitplan.stats.compare import cells
from bitplan.study.spec import read_study
from bitplan.study.trials import trials

LONGER = ("[start]\n", "[lowest_recipe]\nsteps = 12\n[start]\n")
TWO_STAGES = ("[start]\n", "[recipe.then]\nsteps = 3\nlr = 0.001\n[start]\n")


def test_the_reference_at_the_lowest_choice_may_be_trained_longer(write):
    study = read_study(write(LONGER))
    steps = {(trial.role, str(trial.precision)): trial.recipe.steps for trial in trials(study) if trial.recipe}
    assert steps["reference", "w2a2"] == 12
    assert steps["reference", "w4a4"] == steps["choice", "None"] == 6
    assert study.lowest_recipe.lr == study.recipe.lr, "it says what differs"
    assert Study.from_json(study.to_json()) == study
    results = [Result(trial=trial, plan="", score=1.0, higher_is_better=True) for trial in trials(study)]
    assert {"w2a2", "w4a4"} <= {cell.title for cell in cells(study, results)}
    others = [Result(trial=trial, plan="", score=1.0, higher_is_better=True) for trial in trials(read_study(write()))]
    assert "w2a2" not in {cell.title for cell in cells(study, others)}, "those that were trained otherwise are not it"


def test_a_second_stage_says_what_differs_from_the_first(write):
    study = read_study(write(TWO_STAGES))
    first, second = study.recipe.stages
    assert (first.steps, first.lr, second.steps, second.lr) == (6, 0.05, 3, 0.001)
    assert (second.batch_size, second.distill) == (32, 0.5)
    assert study.start.recipe.then is None, "it says a length of its own"
    assert study.start.float_recipe.then is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((TWO_STAGES[0], TWO_STAGES[1].replace("lr =", "rl =")), r"unknown key 'rl' in then of \[recipe\]"),
        ((TWO_STAGES[0], TWO_STAGES[1].replace("steps = 3\n", "")), "give the length of training once"),
        ((LONGER[0], LONGER[1].replace("steps", "stpes")), r"unknown key 'stpes' in \[lowest_recipe\]"),
    ],
)
def test_mistakes_in_them_are_one_line(write, change, message):
    with pytest.raises(FileError, match=message):
        read_study(write(change))
