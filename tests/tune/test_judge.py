"""A training that does harm says so, and with a part held out the best weights are what is left of it."""

import copy
import logging

import pytest
import torch
from halves import Halves
from torch import nn

from bitplan.core.errors import InputError
from bitplan.core.records import Plan
from bitplan.core.trials import Recipe
from bitplan.graph.trace import trace
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.convert import quantize
from bitplan.tasks.base import draw, load_task, measure_, scores_apart_
from bitplan.tune.loop import finetune_, steps_of
from bitplan.tune.validation import Judge, Look, judge_of

DIGITS = load_task("digits")
GOOD, BAD = 0.05, 5.0
HELD = DIGITS.hold_out(0.2)[1]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


@pytest.fixture(scope="module")
def trained():
    model = network()
    finetune_(model, DIGITS, Recipe(epochs=8, batch_size=32, lr=GOOD))
    return model


def recipe(lr, **options):
    return Recipe(steps=20, batch_size=32, lr=lr, schedule="constant", **options)


@pytest.mark.parametrize(("lr", "told"), [(GOOD, False), (BAD, True)])
def test_an_end_below_the_beginning_is_told(lr, told, trained, caplog):
    model = copy.deepcopy(trained)
    finetune_(model, DIGITS, recipe(lr))
    assert (DIGITS.score(model) < DIGITS.score(trained) - 20) is told
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == told
    for line in lines:
        assert "on the same training samples; lower lr (5), or let held_out keep the best weights" in line


@pytest.mark.parametrize("steps", [6, 400])
def test_a_look_takes_few_samples_and_where_it_can_one_pass(steps, trained):
    seen = []
    judge = judge_of(DIGITS, None, Recipe(steps=steps, batch_size=64, lr=GOOD), steps, 22)
    model = copy.deepcopy(trained)
    model.register_forward_hook(lambda _, given, out: seen.append(len(out)))
    scores = judge.scores(model)
    assert len(scores) == 8
    assert sum(seen) <= max(8, steps * 64 / 48)
    assert len(seen) == (1 if steps == 6 else 8)
    size = sum(seen) // 8
    expected = measure_(trained, DIGITS, draw(trained, DIGITS, 8, size, 0))[1]
    assert list(scores) == expected


def test_what_cannot_be_parted_is_scored_batch_by_batch(trained):
    batch = next(iter(DIGITS.batches("train", 8, 0)))
    assert len(scores_apart_(trained, DIGITS, batch, 4)) == 4
    assert scores_apart_(trained, DIGITS, batch, 3) is None

    class Told(type(DIGITS)):
        def forward(self, model, batch):
            return {"scores": super().forward(model, batch), "of": "digits"}

    assert scores_apart_(trained, Told(), batch, 4) is None


def test_a_training_from_scratch_has_nothing_to_tell(caplog):
    finetune_(network(), DIGITS, recipe(GOOD))
    assert not caplog.records


def test_it_begins_where_calibration_ended_or_nowhere(trained, caplog):
    model = quantize(trained, Plan.uniform(trace(trained, DIGITS.example()), "w4a4"))
    calibrated = copy.deepcopy(model)
    calibrate_(calibrated, [next(iter(DIGITS.batches("train", 64)))[0]])
    finetune_(model, DIGITS, recipe(BAD))
    assert not caplog.records  # nobody knows what it would have scored
    finetune_(calibrated, DIGITS, recipe(BAD))
    assert "it began with" in caplog.text


def test_the_best_weights_on_what_is_held_out_are_kept(trained, caplog):
    first = HELD.score(trained)
    model = copy.deepcopy(trained)
    finetune_(model, DIGITS, recipe(BAD, held_out=0.2))
    assert HELD.score(model) == first
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained.parameters(), strict=True))
    assert "never scored better on what is held out than at first" in caplog.text
    learned = network()
    finetune_(learned, DIGITS, recipe(GOOD, held_out=0.2))
    assert HELD.score(learned) > first / 2


def test_what_is_held_out_is_not_trained_on():
    held, whole = HELD.size("test"), DIGITS.size("train")
    assert held == round(0.2 * whole)
    assert steps_of(DIGITS, Recipe(epochs=1, batch_size=1, held_out=0.2)) == whole - held
    with pytest.raises(InputError, match="batch_size 1400 is more than the 1150 training samples"):
        finetune_(network(), DIGITS, Recipe(epochs=1, batch_size=1400, held_out=0.2))


@pytest.mark.parametrize("lr", [GOOD, BAD])
def test_a_stopped_training_goes_on_with_the_best_weights_it_had(lr, trained, tmp_path):
    unbroken, broken = copy.deepcopy(trained), copy.deepcopy(trained)
    finetune_(unbroken, DIGITS, recipe(lr, held_out=0.2), folder=tmp_path / "unbroken")
    left = iter(range(11))
    log = finetune_(
        broken, DIGITS, recipe(lr, held_out=0.2), folder=tmp_path / "broken", stop=lambda: next(left, None) is None
    )
    assert not log.complete
    resumed = copy.deepcopy(trained)
    finetune_(resumed, DIGITS, recipe(lr, held_out=0.2), folder=tmp_path / "broken")
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), unbroken.parameters(), strict=True))
    finetune_(again := copy.deepcopy(trained), DIGITS, recipe(lr, held_out=0.2), folder=tmp_path / "broken")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), unbroken.parameters(), strict=True))


def test_a_task_that_cannot_hold_out_says_so():
    with pytest.raises(InputError, match="task halves cannot hold out a part of its training samples: train without"):
        finetune_(network(), Halves(), recipe(GOOD, held_out=0.2))
    with pytest.raises(InputError, match=r"of 1437 training samples 1437 cannot be held out \(held_out = 0.9999\)"):
        DIGITS.hold_out(0.9999)


@pytest.mark.parametrize(("sign", "best"), [(1, 2.0), (-1, 1.0)])
def test_less_may_be_better(sign, best):
    model = nn.Linear(1, 1, bias=False)
    judge = Judge(lambda one: (one.weight.item(),), sign, 1, keeps=True)
    for step, weight in enumerate((1.5, 2.0, 1.0)):
        nn.init.constant_(model.weight, weight)
        judge.note(model, step, judge.scores(model))
    assert judge.conclude_(model) == ""
    assert model.weight.item() == best


def test_a_fall_within_the_noise_is_not_told():
    judge = Judge(list, 1, 1)
    judge.looks = [Look(0, (50.0, 60.0, 70.0)), Look(9, (40.0, 62.0, 71.0))]
    assert judge.conclude_(nn.Identity()) == ""
    judge.looks[1] = Look(9, (45.0, 54.0, 65.0))
    assert judge.conclude_(nn.Identity()) == "ended at 54.67, below the 60 it began with, on the same training samples"
