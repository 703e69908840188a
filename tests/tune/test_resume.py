"""A run that is killed or stopped ends where an unbroken one does; a folder belongs to one run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from halves import Halves, network, quantized
from killed import recipe as killed_recipe
from safetensors.torch import load_file
from torch import nn

from bitplan.core.errors import Damaged, FileError
from bitplan.core.trials import Recipe
from bitplan.tune import resume
from bitplan.tune.log import read_log
from bitplan.tune.loop import finetune_
from bitplan.tune.validation import Judge

TASK = Halves()
RECIPE = Recipe(epochs=5, batch_size=16, lr=0.05)


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run_and_kill(arguments, until, delay):
    """Start the script and kill it some seconds after it told a step; its first step, and the exit code."""
    first = None
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}  # where nets.py is
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, env=environment) as process:
        for line in process.stdout:
            first = first or int(line)
            if int(line) >= until:
                time.sleep(delay)
                os.kill(process.pid, signal.SIGKILL)
                break
    return first, process.returncode


@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
def test_killed_at_random_moments_it_ends_with_the_same_weights(tmp_path, optimizer):
    whole = quantized(dropout=0.3)
    finetune_(whole, TASK, killed_recipe(optimizer))
    script, out = str(Path(__file__).parent / "killed.py"), tmp_path / "out.safetensors"
    chance, codes, firsts = random.Random(), [], []
    for until in (chance.randint(3, 14), chance.randint(18, 28), 99):
        arguments = [script, str(tmp_path / "run"), optimizer, str(out)]
        first, code = run_and_kill(arguments, until, chance.uniform(0, 0.02))
        firsts.append(first)
        codes.append(code)
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert 1 == firsts[0] < firsts[1] < firsts[2], "it went on where it was"
    assert equal(load_file(out), whole.state_dict())
    lines = (tmp_path / "run/log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 41))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb"])
@pytest.mark.parametrize("steps", [1, 4, 7, 19])
def test_stopped_it_goes_on(tmp_path, optimizer, steps):
    options = RECIPE.model_copy(update={"optimizer": optimizer, "momentum": 0.8, "lr": 0.02})
    whole, parts, again = quantized(dropout=0.3), quantized(dropout=0.3), quantized(dropout=0.3)
    expected = finetune_(whole, TASK, options, seed=3)
    asked = iter([False] * steps + [True])
    assert not finetune_(parts, TASK, options, seed=3, folder=tmp_path, stop=lambda: next(asked)).complete
    told = []
    log = finetune_(again, TASK, options, seed=3, folder=tmp_path, progress=lambda *what: told.append(what))
    assert told[0][0] == steps + 1, "it went on where it was"
    assert equal(again.state_dict(), whole.state_dict())
    assert [(line.step, line.epoch, line.loss, line.score, line.lr) for line in log.lines] == [
        (line.step, line.epoch, line.loss, line.score, line.lr) for line in expected.lines
    ]
    seconds = [line.seconds for line in log.lines]
    assert seconds == sorted(seconds)


def test_a_finished_run_is_not_repeated(tmp_path):
    one, other = network(), network()
    log = finetune_(one, TASK, RECIPE, folder=tmp_path)
    assert finetune_(other, TASK, RECIPE, folder=tmp_path) == log
    assert equal(one.state_dict(), other.state_dict())


def test_what_another_process_is_writing_stays_and_what_a_killed_one_left_goes(tmp_path, monkeypatch):
    """One that was frozen wakes up, while the one that took over writes its checkpoint."""
    imports = "import time; from bitplan.store.files import atomic_file"
    write = "half.write_text('half'); print(half, flush=True); time.sleep(99)"
    monkeypatch.setattr(resume, "SAVE_SECONDS", 0.0)
    words = [sys.executable, "-c", f"{imports}\nwith atomic_file('resume.safetensors') as half: {write}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as other:
        half = tmp_path / other.stdout.readline().strip()
        asked = iter([False] * 6 + [True])
        finetune_(network(), TASK, RECIPE, folder=tmp_path, stop=lambda: next(asked))
        assert (tmp_path / "resume.safetensors").exists()
        assert half.read_text() == "half"
        other.kill()
    finetune_(network(), TASK, RECIPE, folder=tmp_path)
    assert not half.exists()


def test_a_log_that_is_no_text_is_damage(tmp_path):
    """So that a sweep sets the training aside and begins it anew; torture found that it failed the trial."""
    asked = iter([False] * 6 + [True])
    finetune_(network(), TASK, RECIPE, folder=tmp_path, stop=lambda: next(asked))
    (tmp_path / "log.jsonl").write_bytes(b"\xdd\x80garbage")
    with pytest.raises(Damaged, match="log.jsonl"):
        finetune_(network(), TASK, RECIPE, folder=tmp_path)


def test_tied_weights_stay_tied(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b, self.head = nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, 2)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.head(self.b(self.a(x.flatten(1)).relu()).relu())

    whole, parts, again = Tied(), Tied(), Tied()
    finetune_(whole, TASK, RECIPE)
    asked = iter([False] * 6 + [True])
    finetune_(parts, TASK, RECIPE, folder=tmp_path, stop=lambda: next(asked))
    finetune_(again, TASK, RECIPE, folder=tmp_path)
    assert equal(again.state_dict(), whole.state_dict())
    assert again.a.weight is again.b.weight


def test_the_log_has_one_line_per_step(tmp_path):
    log = finetune_(network(), TASK, RECIPE, folder=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(rows) == len(log.lines) == 20
    assert set(rows[0]) == {"step", "epoch", "loss", "score", "lr", "samples_per_second", "seconds"}
    assert rows[0]["lr"] == 0.05
    assert [row["epoch"] for row in rows] == [step // 4 for step in range(20)]
    assert all(row["samples_per_second"] > 0 and 0 <= row["score"] <= 100 for row in rows)
    assert log.mean_score == pytest.approx(sum(row["score"] for row in rows) / 20)
    assert log.seconds == rows[-1]["seconds"]


def test_a_log_cut_off_by_a_kill_is_read_up_to_the_checkpoint(tmp_path):
    asked = iter([False] * 5 + [True])
    finetune_(network(), TASK, RECIPE, folder=tmp_path, stop=lambda: next(asked))
    path = tmp_path / "log.jsonl"
    later = path.read_text().splitlines()[-1].replace('"step": 5', '"step": 6')
    path.write_text(path.read_text() + later + "\n" + later[:30])
    assert [line.step for line in read_log(path, up_to=5)] == [1, 2, 3, 4, 5]
    finetune_(network(), TASK, RECIPE, folder=tmp_path)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 21))


def zeroed():
    model = network()
    nn.init.zeros_(model[8].weight)
    return model


# What differs: the model, what else is passed, what is said.
OTHERS = {
    "recipe": (network, {"recipe": RECIPE.model_copy(update={"lr": 0.5})}, "recipe .lr = 0.05, not lr = 0.5"),
    "seed": (network, {"seed": 4}, "seed .0, not 4"),
    "task": (network, {"task": Halves(samples=99)}, "task .*64 samples, not .*99"),
    "plan": (quantized, {}, "model .its layers or its plan"),
    "weights": (zeroed, {}, "model .its first weights"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_folder_of_another_run_is_refused(tmp_path, what):
    finetune_(network(), TASK, RECIPE, folder=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model, options, message = OTHERS[what]
    with pytest.raises(FileError, match=f"belongs to a run with another {message}.*: choose another folder") as caught:
        finetune_(model(), **({"task": TASK, "recipe": RECIPE, "folder": tmp_path} | options))
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_another_teacher_is_another_run(tmp_path):
    recipe = RECIPE.model_copy(update={"distill": 0.5})
    finetune_(network(), TASK, recipe, teacher=network(), folder=tmp_path)
    with pytest.raises(FileError, match="belongs to a run with another teacher"):
        finetune_(network(), TASK, recipe, teacher=zeroed(), folder=tmp_path)


def test_the_same_shapes_with_another_plan_are_another_run(tmp_path):
    finetune_(quantized(), TASK, RECIPE, folder=tmp_path)
    with pytest.raises(FileError, match="its layers or its plan"):
        finetune_(quantized(middle="w2a2"), TASK, RECIPE, folder=tmp_path)


@pytest.mark.parametrize("damage", ["cut", "foreign", "lost"])
def test_a_damaged_folder_is_told_in_one_line(tmp_path, damage):
    finetune_(network(), TASK, RECIPE, folder=tmp_path)
    state = tmp_path / "resume.safetensors"
    if damage == "cut":
        state.write_bytes(state.read_bytes()[:-20])
    elif damage == "foreign":
        state.write_bytes(b"not a checkpoint")
    else:
        (tmp_path / "run.json").unlink()
    with pytest.raises(FileError, match="is no checkpoint of a run|or a log but no run.json") as caught:
        finetune_(network(), TASK, RECIPE, folder=tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lost", [("id",), ("checksum",), ("id", "checksum"), ()])
def test_a_run_without_its_checksum_is_refused(tmp_path, lost):
    finetune_(network(), TASK, RECIPE, folder=tmp_path, stop=stops_after(10))
    content = json.loads((tmp_path / "run.json").read_text())
    changed = {key: value for key, value in content.items() if key not in lost} | ({} if lost else {"seed": 1})
    (tmp_path / "run.json").write_text(json.dumps(changed))
    with pytest.raises(
        FileError, match=r"run.json: the run.*edited by hand.*delete the folder that it lies in"
    ) as told:
        finetune_(network(), TASK, RECIPE, folder=tmp_path)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["resume.safetensors", "log.jsonl"])
def test_a_changed_byte_is_found_before_training_goes_on(tmp_path, name):
    finetune_(network(), TASK, RECIPE, folder=tmp_path, stop=stops_after(10))
    content = bytearray((tmp_path / name).read_bytes())
    place = len(content) - 1 if name == "resume.safetensors" else content.index(b"loss") + 8
    content[place] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FileError, match=f"{name} is damaged: delete .* to begin anew"):
        finetune_(network(), TASK, RECIPE, folder=tmp_path)


def test_a_changed_header_is_found_before_training_goes_on(tmp_path):
    finetune_(network(), TASK, RECIPE, folder=tmp_path, stop=stops_after(10))
    path = tmp_path / "resume.safetensors"
    content = path.read_bytes()
    assert content.count(b'\\"step\\": 10') == 1
    path.write_bytes(content.replace(b'\\"step\\": 10', b'\\"step\\": 12'))
    with pytest.raises(FileError, match="resume.safetensors is damaged"):
        finetune_(network(), TASK, RECIPE, folder=tmp_path)


def stops_after(steps):
    asked = iter(range(steps))
    return lambda: next(asked, None) is None


def test_checkpoints_come_at_intervals_and_leave_no_other_files(tmp_path, monkeypatch):
    saved = []
    plain = resume.TrainingFolder.save
    monkeypatch.setattr(resume.TrainingFolder, "save", lambda *given: (saved.append(given[3].step), plain(*given)))
    finetune_(network(), TASK, RECIPE, folder=tmp_path / "rare")
    assert saved == [20]
    saved.clear()
    monkeypatch.setattr(resume, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(resume, "SAVE_SHARE", 1e9)
    finetune_(network(), TASK, RECIPE, folder=tmp_path / "often")
    assert saved == list(range(1, 21))
    assert {path.name for path in (tmp_path / "often").iterdir()} == {"run.json", "log.jsonl", "resume.safetensors"}


def test_writing_takes_a_small_share_of_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "SAVE_SECONDS", 0.0)
    folder = resume.TrainingFolder(tmp_path, resume.describe_run(network(), TASK, RECIPE, None, 0))
    model = network()
    folder.save(model, torch.optim.SGD(model.parameters()), resume.Mark(1, 1.0), Judge(list, 1, 1))
    assert not folder.due()
    time.sleep(folder._cost / resume.SAVE_SHARE + 0.01)
    assert folder.due()
