"""What was kept of a run is taken as done: a study goes on from one file, without the folder that it came from."""

import shutil
import sys

import pytest
from tiny import STUDY, diary_of

from bitplan.cli import main
from bitplan.core.errors import FileError, InputError
from bitplan.core.results import RunResults
from bitplan.core.studies import FailedTrial
from bitplan.reports.kept_results import keep_results, open_run
from bitplan.store.files import load, write_text
from bitplan.store.run_folder import RunFolder
from bitplan.study.restore import restore
from bitplan.study.spec import read_study
from bitplan.study.sweep import sweep
from bitplan.study.trials import agenda, all_starts, starts

SEEDS = ("[start]\n", "[start]\nseeds = [0, 7]\n")


@pytest.fixture
def kept(swept, tmp_path):
    return write_text(tmp_path / "kept.json", keep_results(swept).to_json())


@pytest.fixture
def scored_otherwise(kept, tmp_path):
    """The file of results with another score of its start."""
    found = load(kept, RunResults)
    own = [dict(one) for one in found.results.own]
    changed = next(one for one in own if one.get("trial/role") == "start")
    changed["score"] += 1
    results = found.results.model_copy(update={"own": tuple(own)})
    return write_text(tmp_path / "otherwise.json", found.model_copy(update={"results": results}).to_json())


@pytest.fixture
def begun(kept, tmp_path):
    """Restore into a folder whose trainings are written down, and sweep it; gives the run and what was trained."""

    def make(path):
        study, run = read_study(path), tmp_path / "run"
        told = restore(study, run, open_run(kept))
        diary_of(run).touch()
        summary = sweep(study, run, trust=True)
        assert summary.failed == ()
        return RunFolder(run), told, set(diary_of(run).read_text().split())

    return make


def test_a_finished_study_is_finished_elsewhere_without_any_network(begun, write, swept):
    run, told, trained = begun(write())
    assert told == (18, 3, len(RunFolder(swept).trained.ids()))
    assert not trained
    assert not list(run.starts.folder.glob("*"))
    before = {result.trial.id: result.score for result in RunFolder(swept).results}
    assert {result.trial.id: result.score for result in run.results} == before


def test_a_second_start_trains_only_what_starts_from_it(begun, write, swept):
    run, _, trained = begun(write(SEEDS))
    of_first = [one for one in run.results if one.trial.start_seed == 0]
    of_second = [one for one in run.results if one.trial.start_seed == 7]
    assert len(of_first) == len(of_second) == 16
    before = {result.training: result.score for result in RunFolder(swept).results if result.training}
    assert {result.training: result.score for result in of_first} == before
    assert trained.isdisjoint(before)
    assert {one.training for one in of_second} <= trained
    assert run.gains_of("eagl") == RunFolder(swept).gains_of("eagl") != run.gains_of("eagl, start 7")


def test_results_of_two_starts_are_finished_elsewhere_though_the_second_has_no_gains(write, tmp_path):
    study = read_study(write(SEEDS, ('budgets = ["85%", "70%"]', 'budgets = ["70%"]')))
    sweep(study, tmp_path / "first", trust=True)
    kept = write_text(tmp_path / "two.json", keep_results(tmp_path / "first").to_json())
    run = tmp_path / "run"
    assert restore(study, run, open_run(kept)).trials == 24
    summary = sweep(study, run, trust=True)
    assert (summary.done, summary.failed, summary.trained) == (24, (), 0)
    assert not list(RunFolder(run).starts.folder.glob("*"))


def test_a_start_that_is_not_needed_stays_unmade_beside_one_that_shares_its_float_network(write, swept, tmp_path):
    weights = RunFolder(swept).starts.path(RunFolder(swept).results[0].trial.id)
    given = ("[start.float_recipe]\nsteps = 30\nlr = 0.1\n", "")
    one, two = f'[start]\nweights = "{weights}"\n', f'[start]\nweights = "{weights}"\nseeds = [0, 7]\n'
    sweep(read_study(write(given, ("[start]\n", one))), tmp_path / "first", trust=True)
    study, run = read_study(write(given, ("[start]\n", two))), RunFolder(tmp_path / "run")
    restore(study, run.path, open_run(tmp_path / "first"))
    first, second = all_starts(study)
    for _ in range(2):
        assert sweep(study, run.path, trust=True).done == 35
        assert {path.name for path in run.starts.folder.iterdir()} == {second.floating.id, second.high.id}
    assert first.floating == second.floating


def test_quantizers_are_finished_elsewhere_without_their_float_network(tmp_path):
    head = STUDY.split("[[methods]]")[0].replace('budgets = ["85%", "70%"]\n', "")
    (tmp_path / "study.toml").write_text(head + '[[quantizers]]\nname = "lsq"\n')
    study, run = read_study(tmp_path / "study.toml"), RunFolder(tmp_path / "run")
    sweep(study, tmp_path / "first", trust=True)
    restore(study, run.path, open_run(tmp_path / "first"))
    assert sweep(study, run.path, trust=True).done == 5
    assert not list(run.starts.folder.glob("*"))


def test_a_damaged_estimate_that_nothing_needs_is_set_aside(begun, write):
    run, _, _ = begun(write())
    path = run.estimates.path(sorted(run.estimates.ids())[0])
    path.write_bytes(path.read_bytes()[:50])
    found = [sweep(run.study, run.path, trust=True) for _ in range(2)]
    assert [(one.done, one.failed) for one in found] == [(18, ())] * 2
    assert [[aside.name for aside in one.set_aside] for one in found] == [[f"{path.name}.damaged"], []]


def test_another_seed_makes_the_lost_start_again_as_it_was(begun, write, swept):
    run, _, trained = begun(write(("seeds = [0, 1]", "seeds = [0, 1, 2]")))
    before = {result.training: result.score for result in RunFolder(swept).results if result.training}
    assert trained.isdisjoint(before)
    start = next(one.trial for one in run.results if one.trial.role == "start")
    assert run.trials.read(start.id).score == RunFolder(swept).trials.read(start.id).score
    assert {one.trial.seed for one in run.results if one.trial.role == "choice"} == {0, 1, 2}


def test_a_start_that_scores_otherwise_when_made_again_is_refused_each_time(scored_otherwise, write, tmp_path):
    study, run = read_study(write(("seeds = [0, 1]", "seeds = [0, 1, 2]"))), tmp_path / "run"
    restore(study, run, open_run(scored_otherwise))
    for _ in range(2):
        with pytest.raises(InputError, match=r"made again, since its network was not kept, and scores .* as before"):
            sweep(study, run, trust=True)


def test_results_of_a_start_that_scored_otherwise_are_refused(kept, scored_otherwise, study, tmp_path):
    run = tmp_path / "run"
    restore(study, run, open_run(kept))
    before = {path: path.read_bytes() for path in run.rglob("*.json")}
    with pytest.raises(FileError, match=r"w4a4 start scores .* in .*otherwise\.json and .* in .*run: "):
        restore(study, run, open_run(scored_otherwise))
    assert {path: path.read_bytes() for path in run.rglob("*.json")} == before


def test_a_trial_that_failed_here_and_is_known_from_elsewhere_has_not_failed(kept, swept, study, tmp_path):
    run = RunFolder(tmp_path / "run")
    for result in RunFolder(swept).results[-2:]:
        failed = FailedTrial(trial=result.trial, fault="worker", error="killed by SIGKILL")
        run.failed.keep(result.trial.id, failed)
    restore(study, run.path, open_run(kept))
    assert sweep(study, run.path, trust=True).failed == ()
    assert not run.failed.ids()


def test_a_damaged_training_is_done_again_from_a_start_that_is_made_again(begun, write):
    run, _, _ = begun(write())
    result = run.results[-1]
    for path in (run.trials.path(result.trial.id), run.trained.path(result.training)):
        path.write_bytes(path.read_bytes()[:50])
    summary = sweep(run.study, run.path, redo_damaged=True, trust=True)
    assert (summary.done, summary.failed, summary.trained) == (18, (), 1)
    assert run.trials.read(result.trial.id).score == result.score


def test_results_of_another_study_are_refused(kept, write, tmp_path):
    study = read_study(write(("lr = 0.05", "lr = 0.06"), ("lr = 0.1", "lr = 0.2")))
    with pytest.raises(FileError, match="has no trial of the study tiny"):
        restore(study, tmp_path / "run", open_run(kept))
    assert not (tmp_path / "run").exists()


def test_what_is_no_run_is_refused(write, tmp_path):
    with pytest.raises(FileError, match=r"nothing\.json is not the folder of a run"):
        restore(read_study(write()), tmp_path / "run", open_run(tmp_path / "nothing.json"))


def test_a_training_under_another_plan_is_refused(kept, write, tmp_path):
    found = load(kept, RunResults)
    own = [dict(one) for one in found.results.own]
    first, last = [one for one in own if one.get("trial/role", found.results.usual.get("trial/role")) == "choice"][::5][
        :2
    ]
    first["training"] = last["training"] if last["training"] != first["training"] else "0" * 12
    results = found.results.model_copy(update={"own": tuple(own)})
    write_text(kept, found.model_copy(update={"results": results}).to_json())
    with pytest.raises(FileError, match="another network's: make it again"):
        restore(read_study(write()), tmp_path / "run", open_run(kept))


def test_what_lacks_a_plan_is_refused(swept, study, tmp_path):
    other = RunFolder(shutil.copytree(swept, tmp_path / "other"))
    (other.path / "plans" / f"{other.results[-1].plan}.json").unlink()
    with pytest.raises(FileError, match="other lacks the plan that from the last .* was trained by: make it again"):
        restore(study, tmp_path / "run", open_run(other.path))
    assert not (tmp_path / "run").exists()


def test_a_training_of_what_has_no_recipe_is_refused(swept, write, tmp_path):
    study = read_study(write(("[start.recipe]\nsteps = 6\n", "")))
    other = RunFolder(shutil.copytree(swept, tmp_path / "other"))
    other.keep(study, agenda(study))
    said = {"trial": starts(study).high, "training": "0" * 12}
    other.trials.keep(said["trial"].id, RunFolder(swept).results[1].model_copy(update=said))
    with pytest.raises(FileError, match="other lacks the recipe that w4a4 start seed 0 was trained by: make it again"):
        restore(study, tmp_path / "run", open_run(other.path))


@pytest.mark.parametrize(
    ("more", "code", "says"), [((), 0, "18 trials, 3 estimates and"), (("--dry-run",), 2, "leave one of them out")]
)
def test_the_command_line_says_what_is_known(more, code, says, kept, write, tmp_path, monkeypatch, capsys):
    told = ["sweep", str(write()), "--run", str(tmp_path / "run"), "--known", str(kept), "--trust", *more]
    monkeypatch.setattr(sys, "argv", ["bitplan", *told])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    assert says in capsys.readouterr().err
