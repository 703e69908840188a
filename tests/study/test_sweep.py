"""A sweep does each trial once, shares what is the same, survives kills and failures, and repeats nothing."""

import json
import multiprocessing
import random
import shutil
import subprocess
import sys
import time

import pytest
from tiny import diary_of, sweep_telling

from bitplan.core.errors import BudgetError, FileError, InputError, UnknownName
from bitplan.core.registry import GAINS
from bitplan.gains.base import Gain
from bitplan.store.files import atomic_file
from bitplan.store.lease import read_lease
from bitplan.store.record_store import RecordStore
from bitplan.store.run_folder import RunFolder
from bitplan.study import scheduling
from bitplan.study.clean import clean_, find_waste
from bitplan.study.forecast import forecast
from bitplan.study.spec import read_study
from bitplan.study.status import status
from bitplan.study.sweep import sweep

PROCESSES = multiprocessing.get_context("forkserver")  # torch is imported once for all of them
PROCESSES.set_forkserver_preload(["bitplan.study.sweep", "tiny"])


def table(run):
    """What a run found, without what differs from one run to the next."""
    return {result.trial.id: (result.score, result.plan, result.training) for result in RunFolder(run).results}


def files(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def start(path, run):
    """A sweep in a process of its own, and what it tells."""
    ours, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=sweep_telling, args=(path, run, theirs))
    process.start()
    theirs.close()
    return process, ours


def heard(wire):
    """Everything that is told until the other side ends."""
    while True:
        try:
            yield wire.recv()
        except EOFError:
            return


def test_everything_is_there(swept):
    run = RunFolder(swept)
    assert len(run.results) == len(run.agenda.trials) == 18
    assert list(run.gains) == ["eagl", "uniform", "from the last"]
    assert run.graph.id == run.costs.graph
    assert not run.failures
    assert {path.name for path in (swept / "starts").iterdir()} == {trial.id for trial in run.agenda.trials[:2]}
    assert not list((swept / "running").iterdir())
    for result in run.results[2:]:
        assert result.plan in run.plans
        assert 0 <= result.score <= 100
        assert len(result.log) == 6
        assert result.metric == "top-1"
        assert result.versions["torch"]


def test_equal_plans_are_trained_once_per_seed(swept):
    run = RunFolder(swept)
    precisions = {result.trial.id: run.plans[result.plan].precisions for result in run.results[2:]}
    distinct = {
        (json.dumps(precisions[one.trial.id], default=str, sort_keys=True), one.trial.seed) for one in run.results[2:]
    }
    trainings = {result.training for result in run.results[2:]}
    assert len(trainings) == len(distinct) == len(list((swept / "trained").glob("*.json"))) < 16
    for result in run.results[2:]:
        assert result.trial.id in run.agenda.trainings[result.training]


def test_a_finished_run_is_only_read(swept, tmp_path):
    run = shutil.copytree(swept, tmp_path / "run")
    before = files(run)
    told = []
    summary = sweep(RunFolder(run).study, run, progress=lambda *what: told.append(what), trust=True)
    assert (summary.done, summary.trained) == (18, 0)
    assert files(run) == before
    assert all(total == 18 for _, total, _ in told)


def test_a_new_recipe_makes_new_trials_from_the_same_start(swept, tmp_path, write):
    run = shutil.copytree(swept, tmp_path / "run")
    other = read_study(
        write(("lr = 0.05", "lr = 0.02"), ("[start.recipe]\nsteps = 6", "[start.recipe]\nsteps = 6\nlr = 0.05"))
    )
    summary = sweep(other, run, only=["w4a4"], trust=True)
    assert summary.trained == 2
    assert summary.done == 2 + 2
    assert {one.trial.recipe.lr for one in RunFolder(run).results[2:]} == {0.02}, (
        "what an earlier study left is not shown"
    )
    waste = find_waste(run, [other])
    assert {path.parent.name for path in waste.paths} == {"trials"}
    clean_(waste)
    assert find_waste(run, [other]).paths == ()
    assert sweep(other, run, only=["w4a4"], trust=True).trained == 0


def test_nothing_that_a_study_needs_is_waste(swept, tmp_path, study):
    run = shutil.copytree(swept, tmp_path / "run")
    assert find_waste(run, [study]).paths == ()
    (run / "jobs").mkdir()
    (run / "jobs/0123456789ab.json").write_text("{}")
    waste = find_waste(run, [study])
    assert [path.name for path in waste.paths] == ["0123456789ab.json"]
    assert waste.bytes == 2


HALF = ("agenda.json", "trained/x.json", "gains/x.json", "starts/x", "leases/trained-x", "running/x/resume.safetensors")


def leave_half_written(run):
    """What a process was writing that is gone by now, one of every kind."""
    (run / "running" / "x").mkdir(parents=True)
    (run / "leases").mkdir(exist_ok=True)
    (run / "leases" / ".trained-x.t.taken").touch()
    write = "import sys; from pathlib import Path; from bitplan.store.files import temporary_name\n"
    write += "for path in map(Path, sys.argv[1:]): getattr(temporary_name(path), 'touch' if path.suffix else 'mkdir')()"
    subprocess.run([sys.executable, "-c", write, *(run / name for name in HALF)], check=True)
    return sorted(run.rglob(".*"))


def test_what_killed_processes_left_half_written_is_waste_and_a_sweep_removes_it(swept, tmp_path, study):
    run = shutil.copytree(swept, tmp_path / "run")
    left = leave_half_written(run)
    assert len(left) == len(HALF) + 1
    with atomic_file(run / "trained" / "y.json") as writing:
        writing.touch()
        assert {*find_waste(run, [study]).paths} == {*left, run / "running" / "x"}, "not what is being written"
        sweep(study, run, trust=True)
        assert list(run.rglob(".*")) == [writing]
    leave_half_written(shutil.copytree(swept, tmp_path / "other"))
    clean_(find_waste(tmp_path / "other", [study]))
    assert not list((tmp_path / "other").rglob(".*"))


@pytest.mark.parametrize("part", ["gains", "leases", "trials", "running"])
def test_nothing_is_written_behind_a_link(tmp_path, study, part, write):
    """In a stranger's run `gains` may lead to where settings are kept, and the label of a method name one of them."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "eagl.json").write_text("my settings")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / part).symlink_to(tmp_path / "mine")
    with pytest.raises(FileError, match=f"{part} is a link to what may not be the run's"):
        sweep(study, tmp_path / "run", trust=True)
    assert (tmp_path / "mine" / "eagl.json").read_text() == "my settings"
    assert len(list((tmp_path / "mine").iterdir())) == 1


def test_nothing_behind_a_link_is_waste(swept, tmp_path, study):
    """A stranger's run may have a part that points anywhere."""
    run = shutil.copytree(swept, tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (run / "jobs").symlink_to(tmp_path / "mine")
    with pytest.raises(FileError, match="jobs is a link to what may not be the run's"):
        find_waste(run, [study])


def test_killed_at_random_moments_it_ends_with_the_same_table(swept, tmp_path, write):
    path, run = write(), tmp_path / "run"
    chance = random.Random(6)
    trained = {}
    for until in (1, chance.randint(2, 9), chance.randint(10, 16)):
        process, wire = start(path, run)
        next(done for _, done in heard(wire) if done >= until)
        time.sleep(chance.uniform(0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -9
        now = {one.name: one.stat().st_mtime_ns for one in (run / "trained").glob("[!.]*.json")}
        assert trained.items() <= now.items(), "what was finished stays, and none is run twice"
        trained = now
    process, wire = start(path, run)
    *_, last = heard(wire)
    process.join()
    assert process.exitcode == 0
    assert last == ("trained", len(list((swept / "trained").glob("*.json"))) - len(trained))
    assert all((run / "trained" / name).stat().st_mtime_ns == when for name, when in trained.items())
    assert table(run) == table(swept)


def test_two_sweeps_at_once_train_each_network_once(swept, tmp_path, write):
    path, run = write(), tmp_path / "run"
    diary_of(run).touch()
    command = [sys.executable, "-m", "bitplan", "sweep", str(path), "--run", str(run), "--trust"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(2)]
    told = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    trainings = [trial.id for trial in RunFolder(swept).agenda.trials[:2]] + list(RunFolder(swept).agenda.trainings)
    assert sorted(diary_of(run).read_text().split()) == sorted(trainings)
    assert table(run) == table(swept)
    shown = [text.split("tiny: 18 of 18 trials done")[0] for text in told]
    assert shown[0] == shown[1] != told[0]
    assert not [path for path in (run / "leases").iterdir() if read_lease(path)]


def test_a_failure_is_written_down_and_retried_on_request(swept, tmp_path, study, monkeypatch):
    run = shutil.copytree(swept, tmp_path / "run")
    failing = next(result for result in RunFolder(run).results if result.trial.method == "eagl" and result.trial.seed)
    for trial in RunFolder(run).agenda.trainings[failing.training]:
        (run / "trials" / f"{trial}.json").unlink()
    (run / "trained" / f"{failing.training}.json").unlink()
    (run / "trials" / f"{RunFolder(run).results[-1].trial.id}.json").unlink()
    real, calls = scheduling.finetune_, []

    def broken(*given, **options):
        calls.append(options["seed"])
        raise InputError("the disk of the GPU is on fire")

    monkeypatch.setattr(scheduling, "finetune_", broken)
    summary = sweep(study, run, trust=True)
    assert len(calls) == 1
    assert [one.trial.id for one in summary.failed] == list(RunFolder(run).agenda.trainings[failing.training])
    assert summary.done + len(summary.failed) == 18, "the one whose training was kept is done again from it"
    assert "the disk of the GPU is on fire" in summary.failed[0].error
    assert "in broken" in summary.failed[0].traceback
    assert len(sweep(study, run, trust=True).failed) == len(summary.failed)
    assert len(calls) == 1, "not tried again unless asked"
    assert status(run).failed == summary.failed
    monkeypatch.setattr(scheduling, "finetune_", real)
    again = sweep(study, run, retry_failed=True, trust=True)
    assert (again.done, again.failed, again.trained) == (18, (), 1)
    assert table(run) == table(swept)


def test_a_method_that_fails_stops_no_other(swept, tmp_path, write):
    class Broken(Gain):
        """Fails."""

        def layer_gains(self, *given):
            raise ZeroDivisionError("no such luck")

    if "broken" not in GAINS:
        import dataclasses

        GAINS.register("broken")(dataclasses.dataclass(frozen=True)(Broken))
    run = shutil.copytree(swept, tmp_path / "run")
    changed = read_study(write(('name = "eagl"', 'name = "broken"')))
    summary = sweep(changed, run, trust=True)
    assert {one.trial.method for one in summary.failed} == {"broken"}
    assert len(summary.failed) == 4
    assert summary.done == 14
    assert "no such luck" in summary.failed[0].error


def test_a_start_that_fails_is_told(tmp_path, write):
    summary = sweep(read_study(write(("lr = 0.1", "lr = 1e30"))), tmp_path / "run", trust=True)
    assert [one.trial.method for one in summary.failed] == ["float"]
    assert "Diverged" in summary.failed[0].error
    assert summary.done == 0


def test_a_store_that_cannot_be_written_is_one_line(swept, tmp_path, study):
    run = shutil.copytree(swept, tmp_path / "run")
    shutil.rmtree(run / "trained")
    (run / "trained").write_text("a file where a folder should be")
    for result in RunFolder(run).results[2:]:
        (run / "trials" / f"{result.trial.id}.json").unlink()
    with pytest.raises(FileError, match="cannot write .*trained") as caught:
        sweep(study, run, trust=True)
    assert "\n" not in str(caught.value)
    assert not list((run / "failures").glob("*")), "the trial is not to blame"
    assert not [path for path in run.rglob(".*") if path.is_file()]
    with pytest.raises(FileError, match="cannot write"):
        sweep(study, run / "study.json" / "below a file", trust=True)


def test_a_damaged_start_is_blamed_on_the_start(tmp_path, swept, study):
    run = shutil.copytree(swept, tmp_path / "run")
    start = RunFolder(run).agenda.trials[1]
    path = run / "starts" / start.id / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    told = []
    summary = sweep(study, run, trust=True, progress=lambda done, total, what: told.append(what))
    assert [what for what in told if f"{start.id}/model.safetensors is damaged" in what and "made again" in what]
    assert (summary.done, summary.failed, summary.missing, summary.trained) == (18, (), (), 0)
    assert not list((run / "failures").glob("*.json")), "no trial is to blame"
    names = [f"starts/{start.id}.damaged", f"trials/{start.id}.json.damaged"]
    assert sorted(str(one.relative_to(run)) for one in summary.set_aside) == names
    assert (run / names[0] / "model.safetensors").read_bytes() == content, "what is damaged is kept"
    assert table(run) == table(swept)


def test_two_studies_in_one_folder_each_count_their_own(tmp_path, swept, study, write):
    run = shutil.copytree(swept, tmp_path / "run")
    other = read_study(write(("seeds = [0, 1]", "seeds = [0]")))
    assert (sweep(other, run, trust=True).done, sweep(other, run, trust=True).total) == (10, 10)
    summary = sweep(study, run, trust=True)
    assert (summary.done, summary.total, summary.trained) == (18, 18, 0)


def test_no_folder_is_listed_once_per_event(tmp_path, swept, study, monkeypatch):
    run = shutil.copytree(swept, tmp_path / "run")
    listed, plain = [], RecordStore.ids
    monkeypatch.setattr(RecordStore, "ids", lambda shelf: (listed.append(shelf.folder.name), plain(shelf))[1])
    counts = []
    for only in (["uniform"], None):
        for result in RunFolder(run).results[2:]:
            (run / "trials" / f"{result.trial.id}.json").unlink()
        listed.clear()
        told = []
        sweep(study, run, only=only, progress=lambda *what, told=told: told.append(what), trust=True)
        counts.append((len(told), sorted(listed)))
    (few, once), (many, again) = counts
    assert many > few + 8
    assert once == again, "as many looks for sixteen trials as for four"
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1][:2] == (18, 18)


def test_only_some_methods_may_be_asked_for(tmp_path, swept, study):
    run = shutil.copytree(swept, tmp_path / "run")
    for result in RunFolder(run).results[2:]:
        (run / "trials" / f"{result.trial.id}.json").unlink()
    assert sweep(study, run, only=["uniform"], trust=True).done == 2 + 4
    with pytest.raises(UnknownName, match="did you mean uniform"):
        sweep(study, run, only=["unifrom"], trust=True)


def test_bad_input_is_told_before_anything_is_trained(tmp_path, write):
    with pytest.raises(BudgetError, match="budget 40% cannot be met"):
        sweep(read_study(write(('"70%"', '"40%"'))), tmp_path / "run", trust=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UnknownName, match="unknown gain 'eagle'; did you mean eagl"):
        sweep(read_study(write(('name = "eagl"', 'name = "eagle"'))), tmp_path / "run", trust=True)
    ready = ("[start.float_recipe]\nsteps = 30\nlr = 0.1\n", ""), ("[start]\n", '[start]\ncheckpoint = "high"\n')
    with pytest.raises(InputError, match="no float network to teach"):
        sweep(read_study(write(*ready)), tmp_path / "run", trust=True)


def test_a_checkpoint_that_is_ready_starts_the_trials(swept, tmp_path, write):
    high = next(trial for trial in RunFolder(swept).agenda.trials if trial.method == "w4a4 start")
    changes = (
        ("[start]\n", f'[start]\ncheckpoint = "{swept / "starts" / high.id}"\n'),
        ("[start.float_recipe]\nsteps = 30\nlr = 0.1\n[start.recipe]\nsteps = 6\n", ""),
        ("distill = 0.5", "distill = 0.0"),
    )
    summary = sweep(read_study(write(*changes)), tmp_path / "run", only=["w4a4"], trust=True)
    assert (summary.done, summary.failed) == (3, ())
    start, *_ = RunFolder(tmp_path / "run").results
    assert start.score == next(one for one in RunFolder(swept).results if one.trial.id == high.id).score
    other = read_study(write(*changes, ('choices = ["w2a2", "w4a4"]', 'choices = ["w2a2", "w8a8"]')))
    with pytest.raises(InputError, match="has 4 at w4a4, this study at w8a8"):
        sweep(other, tmp_path / "other", trust=True)
    assert not RunFolder(tmp_path / "other").failed.ids(), "no trial is to blame"


def test_the_forecast_lists_every_trial_and_writes_nothing(swept, tmp_path, write):
    alps = 'name = "alps"\noptions = { steps = 4 }'
    longer = ("[start.recipe]\nsteps = 6", "[start.recipe]\nsteps = 600")
    found = forecast(read_study(write(('name = "eagl"', alps), longer)), tmp_path / "run", trust=True)
    assert not (tmp_path / "run").exists()
    assert len(found.lines) == 18
    assert not any(line.done for line in found.lines)
    assert found.lines[1].seconds > 2 * found.lines[2].seconds > 0, "600 steps take longer than 6"
    assert found.seconds >= sum(line.seconds for line in found.lines) > 0
    assert list(found.methods) == ["alps"]
    assert found.bytes_kept > 2 * 4 * 32 * 32 * 3
    assert all(line.done for line in forecast(RunFolder(swept).study, swept, trust=True).lines)


def test_the_status_tells_done_running_failed_and_waiting(swept, tmp_path, study):
    from bitplan.store.lease import hold_lease

    found = status(swept)
    shared = 16 - len(list((swept / "trained").glob("*.json")))
    assert (found.total, found.done, found.shared, found.waiting, found.running) == (18, 18, shared, 0, ())
    assert found.seconds_left == 0
    run = shutil.copytree(swept, tmp_path / "run")
    job, trials = next((job, trials) for job, trials in RunFolder(run).agenda.trainings.items() if len(trials) > 1)
    for trial in trials:
        (run / "trials" / f"{trial}.json").unlink()
    (run / "trained" / f"{job}.json").unlink()
    assert status(run).waiting == len(trials)
    (run / "running" / job).mkdir(parents=True)
    (run / "running" / job / "log.jsonl").write_text('{"step": 3}\n{"step": 4}\n{"st')
    with hold_lease(run / "leases" / f"trained-{job}") as mine:
        assert mine
        found = status(run)
    assert (found.done, found.waiting) == (18 - len(trials), 0)
    assert [(one.what.count("seed"), one.step) for one in found.running] == [(len(trials), 4)]
    assert found.seconds_left > 0
    with pytest.raises(FileError, match="not the folder of a run"):
        status(tmp_path)
