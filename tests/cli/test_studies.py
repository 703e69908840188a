"""The commands of studies: what they print, in which format, and with which exit code."""

import csv
import io
import json
from pathlib import Path

import pytest

from bitplan.cli.studies import demo_study, findings
from bitplan.core.studies import Agenda, FailedTrial
from bitplan.core.trials import Result
from bitplan.reports.formats import FORMATS, Column, Table, format_table
from bitplan.reports.tables import frontier, versus
from bitplan.store.files import save
from bitplan.store.run_folder import RunFolder
from bitplan.study.spec import read_study
from bitplan.study.trials import trials

HOME = Path(__file__).parents[1] / "study"


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The study of tests/study with few steps, and its network beside it."""
    monkeypatch.syspath_prepend(str(HOME))
    import tiny

    text = tiny.STUDY.replace("steps = 6", "steps = 2").replace("steps = 30", "steps = 10")
    (tmp_path / "tiny_&_100%.toml").write_text(text.replace('name = "tiny"', 'name = "tiny & 100%_#"'))
    return tmp_path / "tiny_&_100%.toml"


@pytest.fixture
def swept(run, tiny):
    """Its run, in the folder `run`."""
    code, out, err = run("sweep", tiny, "--trust", "--run", "run")
    assert code == 0, err
    assert "18 of 18 trials done" in out
    assert "  18/18  from the last" in err
    return tiny


def test_a_dry_run_lists_the_trials_and_writes_nothing(run, tiny, tmp_path):
    code, out, err = run("sweep", tiny, "--trust", "--dry-run")
    assert code == 0, err
    assert out.count("to do") == 18 + 1
    assert "18 of 18 trials to do: at most about" in out
    assert not (tmp_path / "runs").exists()


TABLES = {
    "frontier": ["method", "budget", "seeds", "mean", "sd", "shared"],
    "layers": ["group", "method", "budget", "precision"],
    "agreement": ["method", "other", "rank correlation"],
    "differences": ["method", "other", "differ at 85%", "differ at 70%"],
    "lowered": ["method", "budget", "groups lowered", "layers lowered"],
    "costs": ["method", "seconds", "epochs", "samples", "trainings"],
    "compression": ["method", "budget", "score", "GBOPs", "GBOPs without ends", "MB", "times smaller"],
}


def test_from_a_study_to_its_tables(run, swept, tmp_path):
    code, out, _ = run("compare", "run")
    assert code == 0
    for words in ("w2a2", "w4a4", "float", "±", "nothing can be significant", "eagl against the others"):
        assert words in out, words
    assert "0.3333" not in out, "a p that can mean nothing is not shown"
    assert run("compare", "run", "--against", "all")[1].count("0.3333") >= 3 * 2
    assert "from the last against the others" in run("compare", "run", "--against", "from the last")[1]
    content = json.loads(run("compare", "run", "--json", "--corrected")[1])
    assert len(content["scores"]["rows"]) == 3 + 3 * 2
    assert len(content["tests"]["rows"]) == 3 * 2
    assert "p (Holm)" in content["tests"]["rows"][0]
    code, _, err = run("compare", "run", "--against", "eagel")
    assert code == 2
    assert "did you mean eagl" in err
    for which, columns in TABLES.items():
        rows = list(csv.reader(io.StringIO(run("run", "tables", "run", "--which", which, "--format", "csv")[1])))
        assert rows[0] == columns
        assert {len(row) for row in rows} == {len(columns)}
        listed = json.loads(run("run", "tables", "run", "--which", which, "--format", "json")[1])["rows"]
        assert [list(row) for row in listed] == [columns] * (len(rows) - 1)
        for form in ("latex", "md"):
            assert run("run", "tables", "run", "--which", which, "--format", form, "-o", f"{which}.{form}")[0] == 0
        assert r"tiny \& 100\%\_\#" in (tmp_path / f"{which}.latex").read_text()
        assert run("run", "tables", "run", "--which", which)[0] == 0
    assert run("run", "tables", "run", "--which", "frontiers")[0] == 2


def test_selections_within_any_budget(run, swept):
    """Those of the study are the ones that were trained; others are chosen from the gains."""

    def rows(*more):
        text = run("run", "tables", "run", "--which", "layers", "--format", "csv", *more)[1]
        return {tuple(row) for row in csv.reader(io.StringIO(text)) if row[2] != ""}

    own = {row for row in rows() if row[1] not in ("w2a2", "w4a4")}
    assert rows("--budgets", "85%,70%") == own
    at_all = rows("--budgets", " 100% ")
    assert {row[3] for row in at_all} == {"precision", "w4a4"}
    code, out, _ = run("run", "tables", "run", "--which", "lowered", "--budgets", "100%,50%")
    assert code == 0
    assert "groups (layers) below w4a4, of 3 (3)" in out
    assert "0 (0)" in out
    assert "3 (3)" in out
    code, out, _ = run("run", "tables", "run", "--which", "differences", "--budgets", "100%,50%")
    assert code == 0
    assert "0 0" in out
    code, _, err = run("run", "tables", "run", "--budgets", "70%")
    assert code == 2
    assert "the table frontier is of trained networks" in err


@pytest.mark.parametrize("labels", [("a b", "a-b"), ("a/b", "a_b"), ("x" * 300 + "1", "x" * 300 + "2")])
def test_methods_whose_labels_look_alike_are_told_apart(run, tiny, labels):
    """One ranks the groups in the other's reverse order."""
    text = tiny.read_text().partition("[[methods]]")[0]
    for name, label in zip(("first_to_last", "last_to_first"), labels, strict=True):
        text += f'[[methods]]\nname = "{name}"\nlabel = "{label}"\n'
    tiny.write_text(text.replace("seeds = [0, 1]", "seeds = [0]"))
    assert run("sweep", tiny, "--run", "run", "--trust")[0] == 0
    code, out, err = run("run", "tables", "run", "--which", "agreement", "--format", "csv")
    assert code == 0, err
    assert list(csv.reader(io.StringIO(out)))[1] == [*labels, "-1.0"]


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "..", ".", "a/../../out", "a/b"])
def test_a_study_puts_its_run_where_runs_are_unless_the_user_says_otherwise(run, tiny, tmp_path, name):
    tiny.write_text(tiny.read_text().replace("tiny & 100%_#", name))
    code, _, err = run("sweep", tiny, "--trust")
    assert code == 2
    assert f"the name {name!r} is no name of a folder in runs: say where its run goes by --run FOLDER" in err
    assert [path.name for path in tmp_path.iterdir()] == [tiny.name]
    assert run("sweep", tiny, "--trust", "--run", "here", "--dry-run")[0] == 0


def test_what_else_a_run_can_be_asked(run, swept, tmp_path):
    assert json.loads(run("sweep", swept, "--trust", "--run", "run", "--json")[1])["trained"] == 0
    told = json.loads(run("run", "status", "run", "--json")[1])
    assert (told["done"], told["waiting"], told["failed"]) == (18, 0, [])
    known = ["study", "total", "done", "shared", "running", "failed", "waiting", "seconds_left"]
    assert list(told) == [*known, "missing", "damaged"]
    lines = [line.split() for line in run("run", "status", "run")[1].splitlines()]
    assert ["eagl", "█" * 24, "4/4"] in lines
    assert ["w4a4", "start", "█" * 24, "1/1"] in lines
    code, out, _ = run("run", "store", "clean", "run", swept)
    assert (code, out) == (0, "0 files and folders, 0.0 MB, that none of these studies needs\n")
    code, out, _ = run("run", "store", "clean", "run")
    assert (code, out) == (0, "0 files and folders, 0.0 MB, that the run's own study, tiny & 100%_#, does not need\n")
    code, out, err = run("run", "additivity", "run", "--trust", "--pairs", 3, "--samples", 64, "--by", "loss")
    assert code == 0, err
    assert "3 pairs of groups, by training loss: predicted against measured drop R = " in out

    failing = RunFolder(tmp_path / "run").results[2].trial
    RunFolder(tmp_path / "run").failed.keep(failing.id, FailedTrial(trial=failing, fault="code", error="no luck"))
    (tmp_path / f"run/trials/{failing.id}.json").unlink()
    code, out, _ = run("sweep", swept, "--trust", "--run", "run")
    assert code == 1
    assert "failed: w2a2 seed 0: no luck" in out
    assert ["w2a2", "█" * 12 + "░" * 12, "1/2", "1"] in [line.split() for line in out.splitlines()]
    assert "1 trials failed" in out
    assert run("sweep", swept, "--trust", "--run", "run", "--retry")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sweep", "no.toml"), "cannot read no.toml"),
        (("run", "status", "nowhere"), "nowhere is not the folder of a run"),
        (("compare", "nowhere"), "nowhere is not the folder of a run"),
        (("run", "tables", "nowhere"), "nowhere is not the folder of a run"),
        (("run", "additivity", "nowhere"), "nowhere is not the folder of a run"),
        (("run", "store", "clean", "nowhere", "no.toml"), "nowhere is not the folder of a run"),
    ],
)
def test_bad_input_is_one_line(run, words, said):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_run_that_has_just_begun_has_no_table_yet(run, tmp_path):
    study = demo_study()
    save(study, tmp_path / "run/study.json")
    save(Agenda(study=study.id, trials=()), tmp_path / "run/agenda.json")
    assert run("run", "status", "run")[0] == 0
    code, _, err = run("compare", "run")
    assert code == 2
    assert "has no finished trial yet" in err


AWKWARD = Table(
    "a_b & c|d",
    (Column("na|me_%"), Column("value", 2, number=True)),
    (('x, "y"\n{z}$', 1.005), ("−5 ± 1 ~^\\<", None), ("=1", 12345)),
    ("100% #1",),
)


def test_awkward_texts_are_escaped():
    rows = list(csv.reader(io.StringIO(format_table(AWKWARD, "csv"))))
    assert rows == [["na|me_%", "value"], ['x, "y"\n{z}$', "1.005"], ["−5 ± 1 ~^\\<", ""], ["=1", "12345"]]
    assert json.loads(format_table(AWKWARD, "json"))["rows"][1] == {"na|me_%": "−5 ± 1 ~^\\<", "value": None}
    markdown = format_table(AWKWARD, "md").splitlines()
    assert markdown[2] == r"| na\|me\_% | value |"
    assert markdown[4] == r'| x, "y" {z}$ | 1.00 |'
    assert [line.count("|") - line.count(r"\|") for line in markdown[2:7]] == [3] * 5
    latex = format_table(AWKWARD, "latex")
    assert r"x, \"y\" \{z\}\$ & 1.00 \\".replace(r"\"", '"') in latex
    assert r"$-$5 $\pm$ 1 \textasciitilde{}\textasciicircum{}\textbackslash{}\textless{} & -- \\" in latex
    assert latex.isascii()
    assert set(FORMATS) == {"csv", "md", "latex", "json"}


def constructed(folder, worth):
    """The demo's study, every trial done: a method is worth its number, or 90, and a tenth more with every seed."""
    study = demo_study()
    RunFolder(folder).keep(study, Agenda(study=study.id, trials=tuple(trials(study))))
    for trial in trials(study):
        score = worth.get(study.title_of(trial), 90.0) + trial.seed / 10
        made = Result(trial=trial, plan=trial.id, score=score, metric="top-1", higher_is_better=True)
        RunFolder(folder).trials.keep(trial.id, made)
    return RunFolder(folder)


def test_a_method_is_compared_with_the_others_at_a_glance(tmp_path):
    run = constructed(tmp_path, {"eagl": 93.0, "alps": 95.0, "uniform": 93.2})
    table = versus(run, "eagl")
    found = dict(zip((row[0] for row in table.rows), (row[1:] for row in table.rows), strict=True))
    assert list(found) == ["drift", "racing", "alps", "hawq_v3", "uniform", "first_to_last"]
    assert set(found["alps"]) == {"-2.00 ▽▽ 0.0079"}
    assert set(found["hawq_v3"]) == {"+3.00 ★★ 0.0079"}
    (cell,) = set(found["uniform"])
    assert cell.startswith("-0.20    0.")
    assert "in points of top-1" in table.title
    assert set(versus(run, "alps", corrected=True).rows[0][1:]) == {"+2.00 ★★ 0.0238"}
    rows = frontier(run).rows
    assert {rows[row][0] for row, _ in frontier(run).best} == {"alps"}
    assert {column for _, column in frontier(run).best} == {2, 3, 4, 5}


def test_the_demo_says_what_the_results_say(tmp_path):
    """Scores made by hand: the sentences follow them, whichever way they go."""
    worth = {"w2a2": 80.0, "w4a4": 95.0, "first_to_last": 85.0, "drift": 93.0}

    def fill(change):
        return findings(constructed(tmp_path / "run", worth | change))

    first, second = fill({})
    assert first.startswith(
        "All layers at w2a2 score 80.20, all at w4a4 95.20 (+15.00, p = 0.0079): there is something"
    )
    assert second.startswith("Over the budgets drift reaches the best mean score (93.20), first_to_last the worst")
    assert "at 3 of 3 budgets" in second
    first, second = fill({"w2a2": 95.0, "first_to_last": 97.0})
    assert "(+0.00, p = 1): there may not be something to lose" in first
    assert second.startswith("Over the budgets first_to_last reaches the best mean score (97.20), ")


def test_the_demo_is_the_study_that_was_asked_for():
    study = demo_study()
    names = [method.name for method in study.methods]
    assert names == ["eagl", "drift", "alps_racing", "alps", "hawq", "uniform", "first_to_last"]
    assert study.methods[2].options["budgets"] == list(study.budgets), "the race is for the budgets that are asked for"
    assert len(study.seeds) == 5
    assert study.references


def test_the_demo_is_the_candidate_that_the_search_found(monkeypatch):
    """Task, network, precisions, rules and recipes: all but the methods and further budgets."""
    monkeypatch.syspath_prepend(str(HOME.parents[1] / "studies"))
    from demo_candidates import CANDIDATES

    study, found = demo_study(), CANDIDATES["necks_whole"]
    assert set(found.budgets) < set(study.budgets)
    same = ("task", "task_options", "choices", "rules", "cost", "seeds", "start", "recipe")
    assert {name: getattr(study, name) for name in same} == {name: getattr(found, name) for name in same}


def test_the_old_demo_stays_as_a_study():
    """With the oracle beside its methods; its network's layers are alike, and choosing means little."""
    study = read_study(HOME.parents[1] / "studies/digits.toml")
    names = [method.name for method in study.methods]
    assert names == ["eagl", "alps", "hawq", "uniform", "first_to_last", "last_to_first", "regression"]
    assert (study.model, study.budgets, study.recipe.steps) == ("digits_resnet", ("85%", "70%", "60%"), 20)


def test_a_run_is_not_planned_again_and_nothing_is_trained_for_it(run, swept, tmp_path):
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    code, out, err = run("plan", "run", "--budget", "70%")
    assert (code, out) == (2, "")
    assert "is the folder of a run: its graph is in run/graph.json" in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
