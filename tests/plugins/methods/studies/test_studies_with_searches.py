"""Searches in a study: an estimate for each budget, and everything that reads a run takes them."""

import pytest
from small_study import BESIDE_THE_NETWORK
from tiny import STUDY
from typer.testing import CliRunner

import bitplan
from bitplan.cli.app import app
from bitplan.core.errors import InputError
from bitplan.reports.tables import make as table
from bitplan.store.run_folder import RunFolder
from bitplan.study.clean import find_waste
from bitplan.study.forecast import forecast
from bitplan.study.spec import read_study
from bitplan.study.status import check
from bitplan.study.sweep import sweep
from bitplan.study.trials import trials

SEARCH = """
[[methods]]
name = "random_search"
options = { judge = "drift:samples=32", spend = 128 }
label = "lots"
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    home = tmp_path_factory.mktemp("searched")
    (home / "study.toml").write_text(STUDY.split('[[methods]]\nname = "uniform"')[0] + SEARCH)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(BESIDE_THE_NETWORK)
        study = read_study(home / "study.toml")
        told = forecast(study, home / "run", trust=True)
        summary = sweep(study, home / "run", trust=True)
    assert (summary.failed, summary.done) == ((), summary.total)
    return study, RunFolder(home / "run"), told


@pytest.mark.parametrize(("judge", "takes"), [("drift:samples=32", 64), ("drop:samples=32", 32)])
def test_a_spend_that_does_not_do_for_one_evaluation_is_refused_before_anything_is_trained(
    tmp_path, monkeypatch, judge, takes
):
    told = SEARCH.replace("spend = 128", f"spend = {takes - 1}").replace("drift:samples=32", judge)
    (tmp_path / "study.toml").write_text(STUDY.split('[[methods]]\nname = "uniform"')[0] + told)
    monkeypatch.chdir(BESIDE_THE_NETWORK)
    study = read_study(tmp_path / "study.toml")
    for act in (sweep, forecast):
        with pytest.raises(InputError, match=rf"^[^\n]*spend={takes - 1} is too little for one evaluation[^\n]*$"):
            act(study, tmp_path / "run", trust=True)
    assert not [path for path in (tmp_path / "run").rglob("*.json") if path.parent.name in ("kept", "trials", "failed")]


def test_a_method_that_is_estimated_once_for_all_budgets_says_which_before_anything_is_trained(tmp_path, monkeypatch):
    (tmp_path / "study.toml").write_text(STUDY + '[[methods]]\nname = "alps_racing"\n')
    monkeypatch.chdir(BESIDE_THE_NETWORK)
    with pytest.raises(InputError, match=r'^method alps_racing: say .* options = { budgets = \["85%", "70%"\] }$'):
        sweep(read_study(tmp_path / "study.toml"), tmp_path / "run", trust=True)
    assert not list((tmp_path / "run").rglob("trials/*.json"))


def test_it_is_estimated_for_each_budget(swept):
    study, run, told = swept
    assert list(run.gains) == ["eagl"]
    found = run.bound_gains
    assert {title: (gains.budgets, gains.seed) for title, gains in found.items()} == {
        f"lots at {budget}, seed {seed}": ((budget,), seed) for budget in ("85%", "70%") for seed in (0, 1)
    }
    assert {gains.counts["spend"] for gains in found.values()} == {128}
    assert told.methods == {}
    plans = run.plans
    for result in run.results:
        if study.title_of(result.trial) == "lots":
            plan = plans[result.plan]
            title = f"lots at {result.trial.budgets[0]}, seed {result.trial.seed}"
            assert plan.sources["gains"] == found[title].id
            assert all(limit.cost <= limit.capacity for limit in plan.limits)


def test_what_reads_a_run_takes_it(swept, tmp_path):
    study, run, _ = swept
    assert check(run.path).wrong == ()
    kept = [path for path in find_waste(run.path, [study]).paths if path.parent.name == "estimates"]
    assert kept == []
    rows = {row[0]: row for row in table("costs", run, plain=False).rows}
    assert set(rows) == {"eagl", *run.bound_gains}
    assert "lots" in {row[0] for row in table("frontier", run, plain=False).rows}
    for words in (["compare", str(run.path)], ["report", str(run.path), "-o", str(tmp_path / "page.html")]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    assert "lots" in (tmp_path / "page.html").read_text()


def test_a_sweep_again_does_nothing(swept):
    study, run, _ = swept
    assert sweep(study, run.path, trust=True).trained == 0


def test_a_study_says_once_what_searches_may_spend(write, tmp_path):
    """In epochs of training, of three passes of each of the 1,437 samples; options of a method count instead."""
    more = 'spend = 0.05\nseeds = [0]\nbudgets = ["70%"]'
    changes = [("seeds = [0, 1]", more), ('budgets = ["85%", "70%"]\n', "")]
    search = SEARCH + '[[methods]]\nname = "evolution"\noptions = { judge = "drift:samples=32" }\n'
    path = write(*changes, ('[[methods]]\nname = "uniform"\n', search))
    study = read_study(path)
    assert study.spend == 0.05
    sweep(study, tmp_path / "run", trust=True, only=["lots", "evolution"])
    spent = {title: gains.counts["spend"] for title, gains in RunFolder(tmp_path / "run").bound_gains.items()}
    size = bitplan.load_task("digits").size("train")
    room = int(0.05 * 3 * size / 64)
    assert spent["lots at 70%, seed 0"] == 128
    assert 0 < spent["evolution at 70%, seed 0"] <= 64 * room
    unsaid = read_study(write(*[(old, new.replace("spend = 0.05\n", "")) for old, new in changes],
                              ('[[methods]]\nname = "uniform"\n', search), name="unsaid.toml"))  # fmt: skip
    with_it, without = ({trial.id: trial.method for trial in trials(one)} for one in (study, unsaid))
    assert {with_it.get(name, without.get(name)) for name in with_it.keys() ^ without.keys()} == {"evolution"}


def test_what_plans_that_race_take_is_foretold_for_each_budget(write, tmp_path):
    racing = '[[methods]]\nname = "plan_racing"\noptions = { plans = "eagl,uniform", spend = 0.5 }\n'
    study = read_study(write(("seeds = [0, 1]", "seeds = [0]"), ('[[methods]]\nname = "uniform"\n', racing)))
    assert forecast(study, tmp_path / "run", trust=True).methods["plan_racing"] > 0
    summary = sweep(study, tmp_path / "run", trust=True, only=["plan_racing"])
    assert summary.failed == ()
    titles = {f"plan_racing at {budget}, seed 0" for budget in ("85%", "70%")}
    assert set(RunFolder(tmp_path / "run").bound_gains) == titles
