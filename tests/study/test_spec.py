"""A study is read from TOML; what is wrong with it is said in one line with the file and the section."""

import re
from pathlib import Path

import pytest

from bitplan.core.errors import FileError, InputError
from bitplan.core.registry import ENGINES, MODELS, TASKS
from bitplan.core.studies import Study
from bitplan.study.spec import read_study
from bitplan.study.trials import starts, trials
from bitplan.tasks.base import load_task

STUDIES = sorted((Path(__file__).parents[2] / "studies").glob("*.toml"))
DEMO = Path(__file__).parents[2] / "src/bitplan/study/demo.toml"


def test_recipes_say_only_what_differs(study):
    assert (study.recipe.steps, study.recipe.lr, study.recipe.distill) == (6, 0.05, 0.5)
    assert (study.start.recipe.steps, study.start.recipe.lr, study.start.recipe.distill) == (6, 0.05, 0.5)
    floating = study.start.float_recipe
    assert (floating.steps, floating.batch_size, floating.lr, floating.distill) == (30, 32, 0.1, 0.0)


def test_a_length_replaces_the_other_unit(write):
    read = read_study(write(("[start.recipe]\nsteps = 6", "[start.recipe]\nepochs = 0.5")))
    assert (read.start.recipe.epochs, read.start.recipe.steps) == (0.5, None)


def test_a_study_is_a_record(study):
    assert Study.from_json(study.to_json()) == study
    assert study.methods[2].title == "from the last"


def test_paths_are_relative_to_the_file_and_filled_in(write, tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", "here")
    monkeypatch.delenv("NOWHERE", raising=False)
    task = 'task = { name = "cifar10", data = "$PLACE/${NOWHERE:-c10}" }'
    changes = (
        ('task = "digits"', task),
        ("[start]\n", '[start]\nweights = "w.pth"\n'),
        ('name = "eagl"', 'name = "table"\noptions = { path = "gains.csv" }'),
    )
    read = read_study(write(*changes))
    assert read.task_options == {"data": str(tmp_path / "here/c10")}
    assert read.start.weights == str(tmp_path / "w.pth")
    assert read.methods[0].options == {"path": str(tmp_path / "gains.csv")}


@pytest.mark.parametrize(
    ("written", "cost", "read"),
    [
        (["12ms", "11.0ms"], "latency.csv", ("12ms", "11ms")),
        (["2MB", "1.5MiB"], "bmac", ("memory=2MB", "memory=1.5MiB")),  # the cost that it stands for is priced as well
        (["2MB", "flash=1MB"], "flash.csv", ("2MB", "flash=1MB")),
    ],
)
def test_budgets_may_be_times_and_bytes(write, written, cost, read):
    budgets = ", ".join(f'"{one}"' for one in written)
    path = write(('budgets = ["85%", "70%"]', f'budgets = [{budgets}]\ncost = "{cost}"'))
    assert read_study(path).budgets == read


WRONG = [
    (("seeds = [0, 1]", "seed = [0, 1]"), "unknown key 'seed' in the study; did you mean seeds"),
    (("lr = 0.05\ndistill", "lrr = 0.05\ndistill"), r"unknown key 'lrr' in \[recipe\]; did you mean lr"),
    (
        ("[start.recipe]\nsteps", "[start.recipe]\nstepz"),
        r"unknown key 'stepz' in \[start.recipe\]; did you mean steps",
    ),
    (("[rules]\nnarrow", "[rules]\nnarow"), r"unknown key 'narow' in \[rules\]; did you mean narrow"),
    (('label = "from', 'lable = "from'), r"unknown key 'lable' in \[\[methods\]\] last_to_first; did you mean label"),
    (("[start.float_recipe]\nsteps = 30\nlr = 0.1\n", ""), "says nothing about the float network"),
    (('budgets = ["85%", "70%"]', 'budgets = ["85 percent"]'), "'85 percent' cannot be read"),
    (('budgets = ["85%", "70%"]', "budgets = 70"), "budgets must be a list"),
    (('budgets = ["85%", "70%"]', 'budgets = ["85%", "85%"]'), "budget '85%' is given twice"),
    (('choices = ["w2a2", "w4a4"]', 'choices = ["w4a4", "w2a2"]'), "choices must ascend"),
    (("steps = 30", "steps = -30"), r"\[start.float_recipe\]: steps: .*greater than 0"),
    (('task = "digits"', 'task = { data = "$NOT_SET_AT_ALL" , name = "digits" }'), "NOT_SET_AT_ALL is not set"),
    (('name = "tiny"', "name = "), "not TOML"),
    (('name = "tiny"\n', ""), "does not say its name"),
    (("[[methods]]", "[methods]"), "not TOML|must be a list"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[words[:30] for _, words in WRONG])
def test_bad_studies_are_told_in_one_line(write, change, words):
    path = write(change)
    with pytest.raises(FileError, match=words) as caught:
        read_study(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_every_trial_has_its_own_id_and_depends_on_what_is_before_it(study):
    listed = trials(study)
    assert len({trial.id for trial in listed}) == len(listed) == 2 + 2 * 2 + 3 * 2 * 2
    found = starts(study)
    assert found.high.start == found.floating.id
    assert {trial.start for trial in listed[2:]} == {found.high.id}
    assert [study.title_of(trial) for trial in listed[2:4]] == ["w2a2", "w2a2"]
    assert {trial.selector for trial in listed if trial.method == "last_to_first"} == {"greedy"}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (("steps = 6\nbatch", "steps = 7\nbatch"), 2),  # the starts say their own steps
        (("steps = 30", "steps = 31"), 0),
        (("narrow = 0", "narrow = 1"), 1),
        (("seeds = [0, 1]", "seeds = [0, 2]"), 10),
        (('name = "eagl"', 'name = "random"'), 14),
    ],
)
def test_what_changes_makes_new_trials_and_nothing_else(write, study, change, same):
    other = read_study(write(change, name="other.toml"))
    assert len({trial.id for trial in trials(study)} & {trial.id for trial in trials(other)}) == same


def test_other_weights_are_another_start(write, tmp_path):
    path = write(("[start]\n", '[start]\nweights = "w.pth"\n'))
    ids = []
    for content in (b"one", b"other", b"one"):
        (tmp_path / "w.pth").write_bytes(content)
        ids.append(starts(read_study(path)).floating.id)
    assert ids[0] == ids[2] != ids[1]
    (tmp_path / "w.pth").unlink()
    with pytest.raises(FileError, match="cannot read the start's weights .*w.pth: No such file"):
        starts(read_study(path))


@pytest.mark.parametrize("path", [*STUDIES, DEMO], ids=lambda path: path.stem)
def test_every_study_of_ours_is_read(path):
    study = read_study(path)
    assert study.name == path.stem
    assert len(study.methods or study.quantizers) >= 5
    assert study.task in TASKS
    module, _, factory = study.model.partition(":")
    ours = bool(factory) and f"def {factory}()" in (path.parent / f"{module}.py").read_text()
    assert ours or study.model in MODELS or study.model.startswith("resnet")
    assert study.engine in ENGINES


@pytest.mark.parametrize("label", ["w4a4", "w2a2", "float", "w4a4 start"])
def test_a_label_that_a_reference_has_is_refused(write, label):
    with pytest.raises(FileError, match=f"the label '{label}' is what tables call a reference"):
        read_study(write(('label = "from the last"', f'label = "{label}"')))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_task_of_every_study_can_be_made_where_its_data_is(path, monkeypatch, tmp_path):
    monkeypatch.setenv("BITPLAN_DATA", str(tmp_path))
    study = read_study(path)
    load_task(study.task, **study.task_options)


@pytest.mark.parametrize("choices", ["w2a2", "w2a16"])
def test_rules_mean_the_same_when_a_study_is_read_again(write, choices):
    high = choices.replace("w2", "w4").replace("a2", "a4")
    study = read_study(write(('choices = ["w2a2", "w4a4"]', f'choices = ["{choices}", "{high}"]')))
    again = type(study).from_json(study.to_json())
    assert again == study
    assert again.rules.model_fields_set == study.rules.model_fields_set
    assert str(study.rules.first) == ("w8a8" if choices == "w2a2" else "w8a16")


SAME = '[[methods]]\nname = "eagl"\n'


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ('label = "again"', "'eagl' and 'again' differ only by their label: leave one out"),
        ('label = "again"\noptions = {}', "'eagl' and 'again' differ only by their label: leave one out"),
        ('label = "EAGL "\nselector = "greedy"', "the labels 'eagl' and 'EAGL ' look alike: choose another"),
    ],
)
def test_methods_that_cannot_be_told_apart_are_refused(write, second, said):
    with pytest.raises(FileError, match=re.escape(said)):
        read_study(write((SAME, f"{SAME}{SAME}{second}\n")))


def test_a_method_that_says_what_goes_without_saying_is_the_same(write):
    study = read_study(write((SAME, f'{SAME}{SAME}label = "again"\nselector = "exact"\n')))
    said = "'eagl' and 'again' are the same method, since eagl selects by exact unless said: leave one out"
    with pytest.raises(InputError, match=said):
        trials(study)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("", 'selector = "greedy"'),
        ("options = { key = 1 }", "options = { key = true }"),
        ("options = { key = 1 }", "options = { key = 1.0 }"),
        ("", "recipe = { steps = 7 }"),
    ],
)
def test_every_trial_has_the_title_of_its_own_method(write, first, second, monkeypatch):
    monkeypatch.setattr("bitplan.study.trials.selector_of", lambda method: method.selector or "exact")
    methods = (f'{SAME}label = "one"\n{first}', f'{SAME}label = "two"\n{second}')
    for both in (methods, methods[::-1]):
        study = read_study(write((SAME, "\n".join((*both, "")))))
        listed = [trial for trial in trials(study) if trial.method == "eagl"]
        titles = [study.title_of(trial) for trial in listed]
        wanted = [method.title for method in study.methods if method.name == "eagl"]
        assert titles == [title for title in wanted for _ in range(4)]
