"""Fair comparison in a study: controls beside searches, samples held out of choosing, spends in every table."""

import dataclasses
import json

import pytest
from small_study import BESIDE_THE_NETWORK
from tiny import STUDY
from typer.testing import CliRunner

from bitplan.cli.app import app
from bitplan.core.errors import InputError
from bitplan.core.registry import GAINS
from bitplan.core.studies import Method
from bitplan.gains.base import Gain, LayerGains
from bitplan.reports.figures import write_figures
from bitplan.reports.tables import make
from bitplan.store.run_folder import RunFolder
from bitplan.study.clean import find_waste
from bitplan.study.context import RunContext
from bitplan.study.forecast import forecast
from bitplan.study.spec import read_study
from bitplan.study.sweep import sweep
from bitplan.study.trials import estimation, trials, with_controls
from bitplan.tasks.base import ChoosingTask

LIMIT = ("seeds = [0, 1]", "seeds = [0, 1]\nspend = 0.05")
SEARCH = '[[methods]]\nname = "evolution"\noptions = { judge = "drift:samples=32" }\n'
METHODS = '[[methods]]\nname = "eagl"\n[[methods]]\nname = "uniform"\n'


class TestControls:
    def test_both_are_added_where_a_study_limits_a_search(self, write):
        study = with_controls(read_study(write(LIMIT, (METHODS, SEARCH))))
        added = study.methods[2:]
        assert [one.title for one in added] == ["uniform (control)", "random_search (control)"]
        assert added[1].options == {"judge": "drift:samples=32"}
        assert with_controls(study) == study
        listed = [study.words(trial) for trial in trials(study)]
        assert "random_search (control) 85% seed 1" in listed
        ids = {trial.id for trial in trials(study)}
        assert {trial.id for trial in trials(read_study(write(LIMIT, (METHODS, SEARCH))))} < ids

    def test_without_spend_or_without_a_search_all_is_as_before(self, write):
        for changes in ([], [LIMIT], [(METHODS, SEARCH)]):
            study = read_study(write(*changes))
            assert with_controls(study) is study

    def test_what_the_study_names_is_not_doubled(self, write):
        own = '[[methods]]\nname = "random_search"\nlabel = "lots"\noptions = { judge = "drift:samples=32" }\n'
        study = read_study(write(LIMIT, ('[[methods]]\nname = "eagl"\n', SEARCH + own)))
        assert with_controls(study) is study

    def test_every_judge_and_spend_has_its_own(self, write):
        more = '[[methods]]\nname = "haq"\noptions = { judge = "drop:samples=32", spend = 500 }\n'
        study = with_controls(read_study(write(LIMIT, (METHODS, SEARCH + more))))
        assert [one.title for one in study.methods[3:]] == [
            "uniform (control)",
            "random_search (control, drift:samples=32)",
            "random_search (control, drop:samples=32, 500)",
        ]

    def test_whatever_chooses_within_a_budget_asks_for_them(self, write):
        """Also a kind that has no judge: it is asked whether it is bound, not what it is called."""

        class Relaxed(Gain):
            bound = True

            def layer_gains(self, model, graph, choices, context):
                return LayerGains({})

        with GAINS.registered("relaxed", dataclasses.dataclass(frozen=True)(Relaxed)):
            study = read_study(write(LIMIT)).model_copy(update={"methods": (Method(name="relaxed"),)})
            names = [(one.name, one.options) for one in with_controls(study).methods]
        assert names == [("relaxed", {}), ("uniform", {}), ("random_search", {})]


@pytest.fixture(scope="module")
def fair(tmp_path_factory):
    """A run with a search, labels, an oracle that samples were held out for, and a method that says nothing."""
    home = tmp_path_factory.mktemp("fair")
    more = (
        '[[methods]]\nname = "drop"\noptions = { samples = 64 }\n'
        '[[methods]]\nname = "alps"\noptions = { steps = 4 }\n'
        f'[[methods]]\nname = "{home}/numbers.csv"\nlabel = "mine"\n'
    )
    text = STUDY.replace(*LIMIT).replace(METHODS, SEARCH + more)
    text = text.split('[[methods]]\nname = "last_to_first"')[0]
    (home / "study.toml").write_text(text.replace("[rules]", "[choosing]\nhold_out = 0.1\n[rules]"))
    (home / "numbers.csv").write_text("layer,w2a2,w4a4\n" + "".join(f"{place},0,1\n" for place in (4, 7, 10)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(BESIDE_THE_NETWORK)
        study = read_study(home / "study.toml")
        told = forecast(study, home / "run", trust=True)
        summary = sweep(study, home / "run", trust=True)
    assert (summary.failed, summary.done) == ((), summary.total)
    assert len(told.lines) == summary.total
    return study, RunFolder(home / "run")


def test_the_run_has_the_controls(fair):
    study, run = fair
    assert len(study.methods) == 4
    titles = [method.title for method in run.study.methods]
    assert titles == ["evolution", "drop", "alps", "mine", "uniform (control)", "random_search (control)"]
    assert find_waste(run.path, [study]).paths == find_waste(run.path, [run.study]).paths
    said = CliRunner().invoke(app, ["run", "status", str(run.path)]).output
    assert "random_search (control)" in said


def test_the_table_shows_score_against_spend(fair):
    _, run = fair
    rows = {row[0]: row[1:] for row in make("spend", run, plain=False).rows}
    assert next(iter(rows)) == "uniform (control)", "the cheapest first"
    assert list(rows)[-1] == "mine", "what is not said last"
    assert rows["mine"][:4] == ("not said", "not said", "once", "not said")
    assert rows["uniform (control)"][:4] == ("0", "0", "once", "no labels")
    assert rows["drop"][2:4] == ("once", "labels")
    assert rows["evolution"][2:4] == ("for each of 2 budgets", "no labels")
    assert all("±" in row[-1] for row in rows.values())
    plain = {(row[0], row[1]): row for row in make("spend", run, plain=True).rows}
    size = 1437
    assert plain["drop", "70%"][4:6] == (64 * 4, 64 * 4 / (3 * size))
    assert plain["evolution", "70%"][4] <= 0.05 * 3 * size
    steps, teacher = 4 * 32, 2
    held = 144
    assert plain["alps", "70%"][4] == 3 * (steps * teacher + 2 * steps + held)


def test_compare_gives_no_p_where_spends_are_unequal(fair):
    _, run = fair
    said = CliRunner().invoke(app, ["compare", str(run.path), "--json"])
    assert said.exit_code == 0, said.output
    content = json.loads(said.output)
    assert set(content) == {"scores", "spend", "tests"}
    tests = {(row["method"], row["against"]): row for row in content["tests"]["rows"]}
    assert tests["evolution", "uniform (control)"]["p"] is not None
    unequal = tests["alps", "uniform (control)"]
    if unequal["so"] != "the same plan":
        assert unequal["so"].startswith("unequal: alps spent ")
    assert unequal["p"] is None
    assert tests["mine", "uniform (control)"]["p"] is None
    shown = CliRunner().invoke(app, ["compare", str(run.path)], env={"COLUMNS": "200"}).output
    for words in ("looked at labels to choose: drop, alps", "what it spent is not said: mine", "not said", "equals: "):
        assert words in shown, words


def test_figures_and_the_page_have_it(fair, tmp_path):
    _, run = fair
    made = write_figures(run, tmp_path)
    assert tmp_path / "spend.svg" in made.paths
    done = CliRunner().invoke(app, ["report", str(run.path), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text()
    assert "Score against spend" in page
    assert "for each of 2 budgets" in page


def test_methods_saw_the_part_that_is_theirs(fair):
    study, run = fair
    task = RunContext(study, run).choosing_task
    assert isinstance(task, ChoosingTask)
    assert (task.size("train"), task.size("test")) == (1437 - 144, 144)
    assert not any(gains.spend.tested for gains in (run.gains | run.bound_gains).values() if gains.spend)


def test_holding_out_makes_new_choices_and_nothing_else(write):
    plain = read_study(write())
    held = read_study(write(("[rules]", "[choosing]\nhold_out = 0.1\n[rules]"), name="held.toml"))
    none = read_study(write(("[rules]", "[choosing]\nhold_out = 0.0\n[rules]"), name="none.toml"))
    assert none.id == plain.id != held.id
    common = {trial.id for trial in trials(plain)} & {trial.id for trial in trials(held)}
    assert common == {trial.id for trial in trials(plain) if trial.role != "choice"}
    method = plain.methods[0]
    assert estimation(plain, "g", method).id == estimation(none, "g", method).id != estimation(held, "g", method).id


def test_a_spend_that_does_not_do_for_one_evaluation_is_one_line(write, tmp_path):
    limit = (LIMIT[0], LIMIT[1].replace("0.05", "0.001"))
    with pytest.raises(InputError) as told:
        sweep(read_study(write(limit, (METHODS, SEARCH))), tmp_path / "run", trust=True, only=["evolution"])
    assert str(told.value) == (
        "method evolution: spend = 0.001 epochs is too little for one evaluation by drift:samples=32, which takes 64 "
        "passes, 0.015 epochs: spend at least that, or judge by fewer samples (judge=drift:samples=64)"
    )
