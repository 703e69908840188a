"""Every file of a run is flipped, cut, emptied and exchanged: it is noticed, named, set aside; all else goes on."""

import contextlib
import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_sweep import table
from tiny import STUDY

from bitplan.cli import main
from bitplan.core.errors import FileError, InputError
from bitplan.core.records import Checkpoint
from bitplan.core.studies import FailedTrial
from bitplan.store.files import load, write_text
from bitplan.store.lease import hold_lease
from bitplan.store.run_folder import RunFolder
from bitplan.study import context
from bitplan.study import status as checking
from bitplan.study.additivity import study_pairs
from bitplan.study.networks import trained_network
from bitplan.study.spec import read_study
from bitplan.study.status import check, status
from bitplan.study.sweep import sweep
from bitplan.tune import resume

RICH = STUDY.replace('name = "tiny"', 'name = "tiny"\nkeep_networks = true') + '[[methods]]\nname = "drop"\n'


@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    """A run that has a file of every kind; do not write to it."""
    home = tmp_path_factory.mktemp("rich")
    (home / "study.toml").write_text(RICH)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parent)
        study = read_study(home / "study.toml")
        sweep(study, home / "run", trust=True)
        run = RunFolder(home / "run")
        measured = run.jobs.ids()
        study_pairs(study, home / "run", count=3, samples=256, by="loss", trust=True)
        for name in run.jobs.ids() - measured:  # a sweep does not measure them again
            run.jobs.remove(name)
        leave_a_half_training(run, patch)
    leave_a_failure(run)
    return home / "run"


def leave_a_failure(run):
    """Of a trial that another study had."""
    trial = run.agenda.trials[-1].model_copy(update={"seed": 99})
    run.failed.keep(trial.id, FailedTrial(trial=trial, fault="code", error="it was hot"))


def leave_a_half_training(run, patch):
    """As a kill leaves it: a checkpoint after some steps, and a log that goes on behind it."""
    result = run.results[-1]
    patch.setattr(resume, "SAVE_SECONDS", 0.0)
    patch.setattr(resume, "SAVE_SHARE", 1e9)
    saved = itertools.count()
    save = resume.TrainingFolder.save

    def dies(self, *given):
        if next(saved) == 3:
            raise KeyboardInterrupt
        save(self, *given)

    patch.setattr(resume.TrainingFolder, "save", dies)
    run.networks.clear(result.training)
    with pytest.raises(KeyboardInterrupt):
        trained_network(run, result, trust=True)
    assert (run.running.path(result.training) / "resume.safetensors").is_file()
    patch.undo()
    patch.chdir(Path(__file__).parent)
    copy = shutil.copytree(run.running.path(result.training), run.path / "kept")
    trained_network(run, result, trust=True)
    shutil.copytree(copy, run.running.path(result.training))
    shutil.rmtree(copy)


@pytest.fixture
def typed(monkeypatch):
    """Type a command; gives its exit code."""

    def run_verb(*words):
        monkeypatch.setattr(sys, "argv", ["bitplan", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    return run_verb


@pytest.fixture
def run(rich, tmp_path, monkeypatch):
    monkeypatch.setattr(checking, "_AGAIN", 0.0)
    return shutil.copytree(rich, tmp_path / "run")


def files(run):
    return sorted(path for path in run.rglob("*") if path.is_file())


def flip(content, chance):
    place, changed = chance.randrange(len(content)), bytearray(content)
    changed[place] ^= 1 << chance.randrange(8)
    return bytes(changed)


DAMAGE = {
    "flip": flip,
    "cut": lambda content, chance: content[: chance.randrange(len(content))],
    "empty": lambda content, chance: b"",
    "longer": lambda content, chance: content + content[-7:],
}


def same(one, other):
    """Whether two files say the same: a bit can be flipped so that they do (1e-5 and 1E-5)."""
    try:
        return json.loads(one) == json.loads(other)
    except (ValueError, TypeError):
        return False


def unread(path, one, other):
    """Whether two files differ only where nobody looks, in what a killed training left.

    When it goes on, what it said after its last checkpoint is dropped; behind the last tensor nothing is read.
    """
    if path.name == "log.jsonl":
        return one.splitlines(keepends=True)[:3] == other.splitlines(keepends=True)[:3]
    return path.name == "resume.safetensors" and other.startswith(one)


def named(run):
    """The files and folders that a check names."""
    return {str(one.path.relative_to(run)) for one in check(run).wrong}


def test_a_sound_run_is_sound(run):
    found = check(run)
    assert found.wrong == found.unknown == ()
    assert found.files == len(files(run))
    kinds = {path.relative_to(run).parts[0] for path in files(run)}
    assert kinds >= {"additivity", "agenda.json", "estimates", "failures", "gains", "jobs", "networks", "plans",
                     "running", "starts", "study.json", "trained", "trials"}  # fmt: skip
    command = [sys.executable, "-m", "bitplan", "run", "store", "check", run]  # in a process that knows nothing yet
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{found.files} files checked: all sound\n"


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_file_that_is_changed_is_noticed_and_named(run, kind):
    chance = random.Random(kind)
    unchanged = 0
    for path in files(run)[:: 1 if kind == "flip" else 3]:
        before = path.read_bytes()
        path.write_bytes(DAMAGE[kind](before, chance))
        if same(before, path.read_bytes()) or unread(path, before, path.read_bytes()):
            unchanged += 1
        else:
            found = named(run)
            assert len(found) == 1, path
            assert str(path.relative_to(run)).startswith(*found)
        path.write_bytes(before)
    assert unchanged < 5


def exchanged(run):
    """Every two neighbours of one kind: files of a folder, and folders with all that is in them."""
    folders = [run, *(path for path in run.rglob("*") if path.is_dir())]
    for folder in folders:
        for kind in (Path.is_file, Path.is_dir):
            alike = sorted(path for path in folder.iterdir() if kind(path) and folder != run)
            yield from itertools.pairwise(alike)
    for part in ("starts", "networks"):
        for name in ("model.safetensors", "checkpoint.json"):
            alike = sorted((run / part).glob(f"*/{name}"))
            yield from itertools.pairwise(alike)


def swap(one, other):
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def test_two_files_or_folders_that_are_exchanged_are_noticed(run):
    pairs = list(exchanged(run))
    assert len(pairs) > 40
    for one, other in pairs:
        if one.parent.parent.name == "running" or one.parent.name == "additivity":
            continue  # of different kinds
        swap(one, other)
        found = named(run)
        for path in (one, other):
            assert any(str(path.relative_to(run)).startswith(what) for what in found), (one, other, found)
        swap(one, other)
    assert not named(run)


def test_the_verb_names_each_file_on_a_line_of_its_own(run, typed, capsys):
    for path in (run / "agenda.json", next((run / "trained").iterdir())):
        path.write_bytes(b"")
    (run / "notes.txt").write_text("mine")
    assert typed("run", "store", "check", str(run)) == 1
    *lines, unknown, last = capsys.readouterr().out.splitlines()
    assert ["agenda.json" in lines[0], "trained" in lines[1], len(lines)] == [True, True, 2]
    assert unknown.endswith("notes.txt")
    assert last.endswith("2 wrong")
    assert typed("run", "store", "check", str(run), "--json") == 1
    assert len(json.loads(capsys.readouterr().out)["wrong"]) == 2
    assert typed("run", "store", "check", str(run / "trials")) == 2
    (run / "leases" / "trained-x").touch()
    assert "leases/trained-x" in named(run)


MADE_AGAIN = [
    "study.json", "agenda.json", "graph.json", "costs.json", "gains/*.json", "plans/*.json", "estimates/*.json",
    "jobs/*.json", "starts/*/model.safetensors", "starts/*/checkpoint.json",
]  # fmt: skip


@pytest.mark.parametrize("where", MADE_AGAIN)
def test_what_can_be_made_again_is_made_again_and_said(run, rich, where, caplog):
    study = RunFolder(run).study
    context._checkpoint.cache_clear()
    if where.startswith("jobs"):
        for path in (run / "estimates").iterdir():
            path.unlink()
    path = random.Random(where).choice(sorted(run.glob(where)))
    damaged = flip(path.read_bytes(), random.Random(1))
    path.write_bytes(damaged)
    told = []
    summary = sweep(study, run, progress=lambda done, total, what: told.append(what), trust=True)
    assert (summary.done, summary.failed, summary.missing) == (22, (), ())
    assert any(path.name in line for line in (*told, *caplog.messages)), "it is said"
    aside = [file for one in RunFolder(run).set_aside() for file in (one, *one.glob("*")) if file.is_file()]
    assert damaged in [file.read_bytes() for file in aside], "and kept"
    assert table(run) == table(rich)
    assert not named(run)


def become_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def become_a_folder(path):
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("x")


def become_endless(path):
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("become", [become_a_pipe, become_a_folder, become_endless])
def test_what_is_no_file_keeps_nobody_waiting_and_blocks_nothing(run, rich, become, monkeypatch):
    """One of every kind at once: a stranger's archive may hold them, and so may a disk after a repair."""
    study = RunFolder(run).study
    context._checkpoint.cache_clear()
    wheres = [*MADE_AGAIN[1:], "trials/*.json", "networks/*.json", "networks/*/*", "running/*/*", "failures/*.json"]
    for where in wheres:
        become(random.Random(where).choice(sorted(run.glob(where))))
    for look in (check, status):
        with contextlib.suppress(InputError):
            look(run)
    for _ in range(2):
        summary = sweep(study, run, trust=True)
    assert (summary.done, summary.failed, summary.missing) == (22, (), ())
    assert table(run) == table(rich)


@pytest.mark.parametrize("where", ["study.json", "plans/*.json", "trials/*.json", "running/*/log.jsonl"])
def test_a_file_that_is_huge_takes_no_memory(run, where):
    """A hole of 3 GB takes no room on the disk; whether it is a long record cannot be known, so that is asked."""
    study, path = RunFolder(run).study, random.Random(where).choice(sorted(run.glob(where)))
    with path.open("wb") as file:
        file.truncate(3 * 10**9)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert [str(path.relative_to(run)).startswith(name) for name in named(run)] == [True]
    with contextlib.suppress(FileError):
        sweep(study, run, trust=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000, "kB"


def forget(run, result):
    """Take a result away, and those of all that share its training."""
    shared = RunFolder(run).agenda.trainings[result.training]
    for trial in shared:
        (run / "trials" / f"{trial}.json").unlink()
    return shared


def test_a_result_is_taken_again_from_its_training(run, rich):
    result = RunFolder(run).results[-1]
    path = run / "trials" / f"{result.trial.id}.json"
    path.write_bytes(flip(path.read_bytes(), random.Random(0)))
    with pytest.raises(FileError, match=path.name):
        _ = RunFolder(run).results
    found = status(run)
    assert (found.done, found.missing, len(found.damaged)) == (21, 0, 1), "the others are shown"
    summary = sweep(RunFolder(run).study, run, trust=True)
    assert (summary.done, summary.missing, summary.trained) == (22, (), 0)
    assert [one.name for one in summary.set_aside] == [f"{path.name}.damaged"]
    assert table(run) == table(rich)


def test_only_a_trial_whose_result_is_damaged_is_missing_and_done_again_when_asked(run, rich, tmp_path, typed, capsys):
    results = RunFolder(run).results
    lost, open_one = results[-1], next(one for one in results[2:] if one.training != results[-1].training)
    for one in (lost, open_one):
        forget(run, one)
    (run / "trained" / f"{open_one.training}.json").unlink()  # to be trained, as nothing is wrong with it
    path = run / "trained" / f"{lost.training}.json"
    path.write_bytes(damaged := path.read_bytes()[:100])
    (tmp_path / "study.toml").write_text(RICH)
    for _ in range(2):  # however often: not unless asked
        assert typed("sweep", str(tmp_path / "study.toml"), "--run", str(run), "--trust") == 1
        told = capsys.readouterr()
        missing = RunFolder(run).agenda.trainings[lost.training]
        assert told.err.count("missing: ") == len(missing)
        assert f"bitplan sweep {tmp_path / 'study.toml'} --run {run} --redo-damaged" in told.err
        assert f"{len(missing)} missing" in told.out
        assert path.with_name(f"{path.name}.damaged").read_bytes() == damaged
        assert not path.exists()
        assert (run / "trials" / f"{open_one.trial.id}.json").is_file(), "all others go on"
        assert len(named(run)) == len(missing)
    before = {one: one.stat().st_mtime_ns for one in (run / "trained").glob("*.json")}
    assert typed("sweep", tmp_path / "study.toml", "--run", run, "--redo-damaged", "--json", "--trust") == 0
    assert json.loads(capsys.readouterr().out)["missing"] == 0
    after = {one: one.stat().st_mtime_ns for one in (run / "trained").glob("*.json")}
    assert after.keys() - before.keys() == {path}
    assert before.items() <= after.items(), "nothing else is trained again"
    assert table(run) == table(rich)


@pytest.mark.parametrize(
    ("where", "when"),
    [
        ("graph.json", "seed 0 done"),
        ("starts/*/model.safetensors", "seed 0 done"),
        ("trials/*.json", "gains estimated"),  # by then only the starts have one
    ],
)
def test_what_is_damaged_while_trials_run_is_blamed_on_no_trial(run, rich, where, when):
    for result in RunFolder(run).results[2:]:
        (run / "trials" / f"{result.trial.id}.json").unlink()
        (run / "trained" / f"{result.training}.json").unlink(missing_ok=True)
    shutil.rmtree(run / "failures")
    paths, told = sorted(run.glob(where)), []

    def strike(done, total, what):
        told.append(what)
        if when in what and paths:
            paths[-1].write_bytes(flip(paths.pop().read_bytes(), random.Random(0)))
            context._checkpoint.cache_clear()

    summary = sweep(RunFolder(run).study, run, progress=strike, trust=True)
    assert not paths
    assert (summary.done, summary.failed, summary.missing) == (22, (), ())
    assert summary.set_aside
    assert table(run) == table(rich)


def test_what_a_killed_training_left_damaged_is_begun_anew(run, rich, caplog):
    result = RunFolder(run).results[-1]
    forget(run, result)
    (run / "trained" / f"{result.training}.json").unlink()
    path = run / "running" / result.training / "resume.safetensors"
    path.write_bytes(flip(path.read_bytes(), random.Random(0)))
    shutil.rmtree(run / "failures")
    summary = sweep(RunFolder(run).study, run, trust=True)
    assert (summary.done, summary.failed) == (22, ())
    assert "the training begins anew" in caplog.text
    assert (run / "running" / f"{result.training}.damaged").is_dir()
    assert table(run) == table(rich)


def test_a_log_that_lacks_a_step_is_not_gone_on_with(run, rich, monkeypatch):
    """As it comes about where a frozen process wakes up while another goes on with its training."""
    result = RunFolder(run).results[-1]
    forget(run, result)
    (run / "trained" / f"{result.training}.json").unlink()
    shutil.rmtree(run / "running")
    save, saved = resume.TrainingFolder.save, itertools.count()

    def loses_a_line(self, *given):
        if next(saved) == 2:
            write_text(self.log, "".join(self.log.read_text().splitlines(keepends=True)[:-1]))
            save(self, *given)
            raise KeyboardInterrupt
        save(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(resume, "SAVE_SECONDS", 0.0)
        patch.setattr(resume, "SAVE_SHARE", 1e9)
        patch.setattr(resume.TrainingFolder, "save", loses_a_line)
        with pytest.raises(KeyboardInterrupt):
            sweep(RunFolder(run).study, run, trust=True)
    sweep(RunFolder(run).study, run, trust=True)
    logs = [RunFolder(one).trained.read(result.training).log for one in (run, rich)]
    assert [line["step"] for line in logs[0]] == [1, 2, 3, 4, 5, 6]
    assert logs[0] == logs[1]


def test_a_network_that_was_kept_and_is_damaged_or_anothers_is_trained_again(run, caplog):
    folder = RunFolder(run)
    result, other = folder.results[-1], next(one for one in folder.results[2:] if one.score != folder.results[-1].score)
    swap(folder.networks.path(result.training), folder.networks.path(other.training))
    shutil.rmtree(run / "running")
    assert trained_network(folder, result, trust=True).as_recorded
    assert "the network trained again" in caplog.text
    assert (run / "networks" / f"{result.training}.damaged").is_dir()


def test_a_start_that_comes_out_otherwise_is_refused_until_somebody_decides(run, rich):
    folder = RunFolder(run)
    high = folder.agenda.trials[1].id
    other = shutil.copytree(run / "starts" / high, run / "starts" / f"{high}.damaged")
    sweep(folder.study, run, trust=True)  # it is the same
    about = json.loads((other / "checkpoint.json").read_text())
    changed = load(other / "checkpoint.json", Checkpoint).model_copy(update={"sha256": "0" * 64})
    (other / "checkpoint.json").write_text(changed.to_json(of=about["of"]))
    for _ in range(2):
        with pytest.raises(InputError, match=rf"{high} was damaged and made again, and is not the network that it was"):
            sweep(folder.study, run, trust=True)
    shutil.rmtree(other)
    assert sweep(folder.study, run, trust=True).done == 22


def test_a_failure_that_is_damaged_is_set_aside_and_the_trial_tried_again(run, rich):
    folder = RunFolder(run)
    result = folder.results[-1]
    (run / "trials" / f"{result.trial.id}.json").unlink()
    failed = FailedTrial(trial=result.trial, fault="code", error="it was hot")
    folder.failed.keep(result.trial.id, failed)
    assert sweep(folder.study, run, trust=True).failed == (failed,)
    path = folder.failed.path(result.trial.id)
    path.write_bytes(b"")
    assert status(run).damaged[0].startswith(str(path))
    summary = sweep(folder.study, run, trust=True)
    assert (summary.done, summary.failed) == (22, ())
    assert [one.name for one in summary.set_aside] == [f"{path.name}.damaged"]


def test_a_lease_that_cannot_be_read_is_named_where_a_network_is_asked_for(run):
    folder = RunFolder(run)
    result = folder.results[-1]
    folder.networks.clear(result.training)
    lease = folder.trained.lease(result.training)
    with hold_lease(lease), pytest.raises(FileError, match=rf"try again later; if none does, delete .*{lease.name}"):
        trained_network(folder, result, trust=True)


def test_sound_files_that_do_not_fit_together_are_named(run):
    folder = RunFolder(run)
    result = folder.results[-1]
    folder.trials.remove(result.trial.id)
    folder.trials.keep(result.trial.id, result.model_copy(update={"score": result.score + 1}))
    assert "that of its training" in check(run).wrong[0].what
    folder.trials.remove(result.trial.id)
    folder.trials.keep(result.trial.id, result.model_copy(update={"plan": "0" * 12}))
    assert "its plan 000000000000 is not there" in check(run).wrong[0].what
    folder.trials.keep(result.trial.id, result)
    (run / "agenda.json").write_text(folder.agenda.model_copy(update={"study": "0" * 12}).to_json())
    assert named(run) == {"agenda.json"}
    folder.keep(folder.agenda.model_copy(update={"study": folder.study.id}))
    shutil.rmtree(folder.starts.path(folder.agenda.trials[0].id))
    assert "is not there: it is made again where something needs it" in check(run).wrong[0].what
