"""The networks of a run: kept by a sweep or trained again, equal to what was recorded, cleaned with their trials."""

import json
import shutil

import pytest
import torch

import bitplan
from bitplan.core.errors import FileError, InputError
from bitplan.core.studies import Study, Trained
from bitplan.reports.scores import choose
from bitplan.store.files import load
from bitplan.store.lease import hold_lease
from bitplan.store.run_folder import RunFolder
from bitplan.study import scheduling
from bitplan.study.clean import clean_, find_waste
from bitplan.study.forecast import forecast
from bitplan.study.networks import is_kept, trained_network
from bitplan.study.spec import read_study
from bitplan.study.sweep import sweep
from bitplan.study.trials import estimation, trials

KEPT = ("seeds = [0, 1]", "seeds = [0, 1]\nkeep_networks = true")


@pytest.fixture
def run(swept, tmp_path):
    """A copy of the finished run, which kept no network."""
    return RunFolder(shutil.copytree(swept, tmp_path / "run"))


@pytest.fixture
def untrainable(monkeypatch):
    """From here on, training is an error."""

    def refuse(*_, **__):
        raise AssertionError("something was trained")

    monkeypatch.setattr(scheduling, "finetune_", refuse)


def test_a_network_is_trained_again_once_and_scores_as_recorded(run, study, request):
    result = choose(run, seed=1)
    assert not is_kept(run, result)
    told = []
    found = trained_network(run, result, progress=lambda *what: told.append(what), trust=True)
    assert told[-1][:2] == (6, 6)
    assert is_kept(run, result)
    assert found.as_recorded
    assert found.folder == run.path / "networks" / result.training
    assert bitplan.plan_of(found.model).precisions == run.plans[result.plan].precisions
    assert bitplan.evaluate(found.model, bitplan.load_task("digits")) == result.score
    assert not list((run.path / "running").iterdir())
    assert not list((run.path / "leases").iterdir())
    request.getfixturevalue("untrainable")
    again = trained_network(run, result, trust=True)
    for name, value in found.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    assert find_waste(run.path, [study]).paths == ()


def test_one_network_serves_all_trials_with_the_same_precisions(run, request):
    shared = next(ids for ids in run.agenda.trainings.values() if len(ids) > 1)
    first, *others = [result for result in run.results if result.trial.id in shared]
    trained_network(run, first, trust=True)
    request.getfixturevalue("untrainable")
    for other in others:
        assert trained_network(run, other, trust=True).as_recorded


def test_a_network_that_scores_otherwise_is_not_hidden(run):
    result = choose(run, method="w2a2")
    run.trials.keep(result.trial.id, result.model_copy(update={"score": result.score - 1.5}))
    for _ in range(2):  # just trained, and kept from before
        found = trained_network(run, choose(run, method="w2a2"), trust=True)
        assert not found.as_recorded
        assert (found.score, found.recorded) == (result.score, result.score - 1.5)


def test_a_network_without_its_score_is_trained_again(run):
    result = choose(run)
    found = trained_network(run, result, trust=True)
    found.folder.with_suffix(".json").unlink()  # a kill between the two
    assert not is_kept(run, result)
    assert trained_network(run, result, trust=True).as_recorded
    assert is_kept(run, result)


def test_a_sweep_keeps_its_networks_where_asked(write, swept, tmp_path, request):
    folder, study = tmp_path / "kept", read_study(write(KEPT))
    summary = sweep(study, folder, only=["eagl", "w4a4"], trust=True)
    run = RunFolder(folder)
    kept = {path.name for path in (folder / "networks").iterdir() if path.is_dir()}
    assert len(kept) == summary.trained
    request.getfixturevalue("untrainable")
    before = {result.trial.id: result.score for result in RunFolder(swept).results}
    for result in run.results[2:]:
        found = trained_network(run, result, trust=True)
        assert found.as_recorded
        assert result.score == before[result.trial.id], "keeping changes no score"
        trained = load(folder / f"trained/{result.training}.json", Trained)
        assert load(found.folder.with_suffix(".json"), Trained) == trained


def test_keeping_is_in_no_id(write, study, swept):
    keeping = read_study(write(KEPT))
    assert keeping.keep_networks
    assert not study.keep_networks
    assert keeping.id == study.id
    assert [trial.id for trial in trials(keeping)] == [trial.id for trial in trials(study)]
    for method in study.methods:
        assert estimation(keeping, "graph", method).id == estimation(study, "graph", method).id
    old = json.loads((swept / "study.json").read_text())
    del old["keep_networks"], old["checksum"]  # as it was written before there was such an option
    assert Study.from_json(json.dumps(old)) == study


def test_the_forecast_counts_networks_that_are_kept(write, study, tmp_path):
    keeping = read_study(write(KEPT))
    plain, more = forecast(study, tmp_path / "none", trust=True), forecast(keeping, tmp_path / "none", trust=True)
    network = trained_size(study)
    assert more.bytes_kept - plain.bytes_kept == 16 * network


def trained_size(study):
    model, _ = bitplan.load_model(study.model)
    return sum(value.numel() * value.element_size() for value in model.state_dict().values())


def test_networks_of_trials_that_are_gone_are_waste(run, study, write):
    mine, other = choose(run, seed=0), choose(run, seed=1)
    trained_network(run, mine, trust=True)
    left = trained_network(run, other, trust=True).folder
    fewer = read_study(write(("seeds = [0, 1]", "seeds = [0]")))
    waste = find_waste(run.path, [fewer])
    assert {path for path in waste.paths if path.parent.name == "networks"} == {left, left.with_suffix(".json")}
    assert not [path for path in find_waste(run.path, [study]).paths if path.parent.name == "networks"]
    busy = run.path / "running" / mine.training
    busy.mkdir()
    with hold_lease(run.path / f"leases/trained-{mine.training}"):
        assert busy not in find_waste(run.path, [fewer]).paths, "somebody trains it again right now"
    assert busy in find_waste(run.path, [fewer]).paths
    clean_(waste)
    assert is_kept(run, mine)
    assert not left.exists()


def test_a_start_that_is_not_there_is_made_again_first(run):
    shutil.rmtree(run.path / "starts")
    told = []
    result = choose(run)
    assert trained_network(run, result, progress=lambda *what: told.append(what[2]), trust=True).as_recorded
    assert told[:2] == [f"{name}: making the network that others start from" for name in ("float", "w4a4 start")]
    assert not list((run.path / "running").iterdir())
    shutil.rmtree(run.path / "starts")
    run.networks.clear(result.training)
    high = run.results[1]
    run.trials.keep(high.trial.id, high.model_copy(update={"score": high.score + 1}))
    with pytest.raises(InputError, match=r"w4a4 start was made again, .* scores .* as before"):
        trained_network(run, result, trust=True)


def test_what_cannot_be_had_is_one_line(run, swept):
    start = run.results[0]
    with pytest.raises(InputError, match=rf"was not trained from a plan: its network is in .*starts/{start.trial.id}"):
        trained_network(run, start, trust=True)
    result = choose(run)
    with (
        hold_lease(run.path / f"leases/trained-{result.training}"),
        pytest.raises(FileError, match="another process trains"),
    ):
        trained_network(run, result, trust=True)
    run.trials.keep(result.trial.id, result.model_copy(update={"training": "0123456789ab"}))
    with pytest.raises(FileError, match="training 0123456789ab, which its plan and recipe do not make"):
        trained_network(run, choose(run), trust=True)
    (run.path / f"plans/{result.plan}.json").unlink()
    with pytest.raises(FileError, match="no longer has the plan of"):
        trained_network(run, result, trust=True)
