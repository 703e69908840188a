"""A recipe of several stages: one training after the other, counted as one, checked before it begins."""

import signal
from pathlib import Path

import pytest
import torch
from halves import Halves, network, quantized
from killed import Slow
from killed import recipe as killed_recipe
from test_resume import run_and_kill

from bitplan.cli.options import read_recipe
from bitplan.core.errors import Damaged, FileError, InputError
from bitplan.core.trials import Recipe, merge_recipes
from bitplan.gains.finetuning import shorten
from bitplan.tune.length import samples_of, steps_of
from bitplan.tune.log import last_step
from bitplan.tune.loop import finetune_, mix_seed
from bitplan.tune.resume import check_training

TASK = Halves()
FIRST = Recipe(steps=6, batch_size=16, lr=0.05)
SECOND = Recipe(steps=4, batch_size=8, optimizer="adamw", lr=0.002, schedule="linear")
STAGED = FIRST.model_copy(update={"then": SECOND})


def same(one, other):
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_it_is_one_training_after_the_other():
    staged, by_hand, once = quantized(), quantized(), quantized()
    log = finetune_(staged, TASK, STAGED)
    first, second = finetune_(by_hand, TASK, FIRST), finetune_(by_hand, TASK, SECOND, seed=mix_seed(0, "stage", 1))
    finetune_(once, TASK, FIRST)
    assert same(staged, by_hand)
    assert not same(staged, once)
    assert [line.loss for line in log.lines] == [line.loss for line in (*first.lines, *second.lines)]
    assert [line.step for line in log.lines] == list(range(1, 11))
    assert [line.lr for line in log.lines][6:] == [line.lr for line in second.lines]
    assert log.seconds >= log.lines[5].seconds
    assert log.complete


def test_a_later_stage_sees_its_samples_in_an_order_of_its_own():
    seeds = []

    class Looking(Halves):
        def batches(self, split, batch_size, seed=None):
            if split == "train" and seed:  # 0 is that of a look whether training does harm
                seeds.append(seed)
            return super().batches(split, batch_size, seed)

    once = FIRST.model_copy(update={"steps": 1})
    finetune_(quantized(), Looking(), once.model_copy(update={"then": once}))
    assert len(seeds) == len(set(seeds)) == 2
    assert seeds[0] == mix_seed(0, "epoch", 0)


def test_its_length_is_that_of_all_stages():
    assert steps_of(TASK, STAGED) == 10
    assert samples_of(TASK, STAGED) == 6 * 16 + 4 * 8
    told = []
    finetune_(quantized(), TASK, STAGED, progress=lambda done, total, what: told.append((done, total)))
    assert told[-1] == (10, 10)
    assert {total for _, total in told} == {10}


def test_killed_in_its_second_stage_it_goes_on_there(tmp_path):
    script = str(Path(__file__).parent / "killed.py")
    arguments = [script, str(tmp_path / "run"), "in two stages", str(tmp_path / "out.safetensors")]
    assert run_and_kill(arguments, 25, 0.01) == (1, -signal.SIGKILL)
    reached = last_step(tmp_path / "run")
    assert 25 <= reached < 40
    assert (tmp_path / "run" / "then" / "resume.safetensors").is_file()
    whole, resumed, steps = quantized(dropout=0.3), quantized(dropout=0.3), []
    finetune_(whole, TASK, killed_recipe("in two stages"))
    finetune_(
        resumed, Slow(), killed_recipe("in two stages"), folder=tmp_path / "run",
        progress=lambda done, total, what: steps.append(done),
    )  # fmt: skip
    assert steps[0] > 21
    assert same(whole, resumed)


@pytest.mark.parametrize("until", [0, 3, 6, 8])
def test_stopped_anywhere_it_goes_on_to_the_same_weights(tmp_path, until):
    whole, stopped, again = quantized(), quantized(), quantized()
    finetune_(whole, TASK, STAGED)
    steps = iter(range(until))
    log = finetune_(stopped, TASK, STAGED, folder=tmp_path, stop=lambda: next(steps, None) is None)
    assert (len(log.lines), log.complete) == (until, False)
    assert last_step(tmp_path) == until
    log = finetune_(again, TASK, STAGED, folder=tmp_path)
    assert (len(log.lines), last_step(tmp_path)) == (10, 10)
    assert same(whole, again)
    check_training(tmp_path)


def test_a_stage_belongs_to_its_recipe_and_damage_in_it_is_seen(tmp_path):
    finetune_(quantized(), TASK, STAGED, folder=tmp_path)
    other = STAGED.model_copy(update={"then": SECOND.model_copy(update={"lr": 0.001})})
    with pytest.raises(FileError, match=r"then belongs to a run with another recipe .*lr = 0.002, not lr = 0.001"):
        finetune_(quantized(), TASK, other, folder=tmp_path)
    log = tmp_path / "then" / "log.jsonl"
    log.write_text(log.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(Damaged, match="then/log.jsonl is damaged"):
        check_training(tmp_path)


def test_only_the_stage_that_distills_has_a_teacher():
    teacher = network()
    taught = STAGED.model_copy(update={"then": SECOND.model_copy(update={"distill": 0.5})})
    assert taught.distills
    assert not taught.for_floats().distills
    with pytest.raises(InputError, match=r"the recipe distills .distill = 0.5. but there is no teacher"):
        finetune_(quantized(), TASK, taught)
    one, other = quantized(), quantized()
    log = finetune_(one, TASK, taught, teacher=teacher)
    plain = finetune_(other, TASK, STAGED)
    assert [line.loss for line in log.lines[:6]] == [line.loss for line in plain.lines[:6]]
    assert log.lines[6].loss != plain.lines[6].loss


def test_what_a_later_stage_cannot_do_is_said_before_the_first_begins(tmp_path):
    large = STAGED.model_copy(update={"then": SECOND.model_copy(update={"batch_size": 1000})})
    with pytest.raises(InputError, match="batch_size 1000 is more than"):
        finetune_(quantized(), TASK, large, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_recipes_of_stages_come_back():
    assert Recipe.from_json(STAGED.to_json()) == STAGED
    assert STAGED.id != FIRST.id
    held = Recipe(steps=6, lr=0.1, held_out=0.2, then=Recipe(steps=1, lr=0.1))
    assert Recipe.from_json(held.to_json()).then.held_out == 0.0, "a file says all: nothing is inherited from it"


def test_people_write_what_differs(tmp_path):
    (tmp_path / "recipe.toml").write_text(
        "[recipe]\nsteps = 80\nlr = 0.015\nbatch_size = 4\n[recipe.then]\nsteps = 10\nlr = 0.001\n"
    )
    read = read_recipe([str(tmp_path / "recipe.toml")])[0]
    assert (read.steps, read.lr, read.then.steps, read.then.lr, read.then.batch_size) == (80, 0.015, 10, 0.001, 4)
    assert read_recipe([str(tmp_path / "recipe.toml"), "epochs=1"])[0].then is None, (
        "another length is another training"
    )
    assert merge_recipes({"lr": 0.1}, {"steps": 5, "then": {"epochs": 1}})["then"] == {"lr": 0.1, "epochs": 1}
    (tmp_path / "endless.toml").write_text("steps = 80\n[then]\nlr = 0.001\n")
    with pytest.raises(InputError, match="give the length of training once"):
        read_recipe([str(tmp_path / "endless.toml")])


def test_a_shortened_recipe_has_one_stage_even_where_its_length_is_its_own():
    assert shorten(STAGED, epochs=1.0).then is None
    own = shorten(STAGED, steps=6, lr_factor=0.5)
    assert (own.steps, own.lr, own.then) == (6, 0.025, None)
