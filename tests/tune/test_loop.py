"""The loop: it learns, repeats, accumulates, reports, and says clearly what is wrong."""

import copy
import math

import pytest
import torch
from halves import Halves, network, quantized
from torch import nn

from bitplan.core.errors import Diverged, InputError, RecordError
from bitplan.core.trials import Recipe
from bitplan.tune import loop
from bitplan.tune.loop import evaluate, finetune_, warn_of_slow_products

TASK = Halves()


def recipe(**options):
    return Recipe(**({"epochs": 3, "batch_size": 16, "lr": 0.1} | options))


def watched(seeds):
    """The task, which notes the seeds of the passes that are trained on."""

    class Watched(Halves):
        def batches(self, split, batch_size, seed=None):
            if batch_size == 16:  # a few others are only looked at
                seeds.append(seed)
            return super().batches(split, batch_size, seed)

    return Watched()


def equal(one, other):
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": True, "schedule": "poly", "warmup": 0.1},
        {"optimizer": "adamw", "lr": 0.01, "step_lr": 0.1},
        {"optimizer": "lamb", "lr": 0.05, "step_lr": 0.01, "decay_vectors": False},
        {"precision": "bf16"},
        {"grad_clip": 1.0, "schedule": "linear"},
        {"accumulate": 4, "channels_last": False},
    ],
)
def test_it_learns_and_repeats_bit_for_bit(options):
    model, again = quantized(dropout=0.2), quantized(dropout=0.2)
    log = finetune_(model, TASK, recipe(epochs=12, **options))
    torch.rand(17)  # what others draw does not matter
    assert finetune_(again, TASK, recipe(epochs=12, **options)).mean_loss == log.mean_loss
    assert equal(model, again)
    assert evaluate(model, TASK) > 85
    assert log.complete
    assert log.lines[-1].loss < 0.4 < log.lines[0].loss


@pytest.mark.parametrize(
    ("told", "warns"),
    [
        ({"architecture": "x86_64", "avx512_bf16": False}, True),
        ({"architecture": "x86_64", "avx512_bf16": True}, False),
        ({"architecture": "x86_64", "amx_bf16": True}, False),
        ({"architecture": "aarch64"}, False),  # not known
    ],
)
def test_bf16_is_said_to_be_slow_once_where_the_processor_has_none(told, warns, monkeypatch, caplog):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told)
    warn_of_slow_products.cache_clear()
    for _ in range(2):
        finetune_(network(), TASK, recipe(epochs=1, precision="bf16"))
    finetune_(network(), TASK, recipe(epochs=1))
    warn_of_slow_products.cache_clear()
    assert [record.message.startswith("this processor has no products of bfloat16") for record in caplog.records] == (
        [True] if warns else []
    )


def test_another_seed_gives_other_weights_and_callers_random_numbers_are_left_alone():
    one, other = network(), network()
    state = torch.get_rng_state()
    finetune_(one, TASK, recipe())
    finetune_(other, TASK, recipe(), seed=1)
    assert not equal(one, other)
    assert torch.equal(state, torch.get_rng_state())


def test_it_leaves_mode_layout_and_attributes_as_they_were():
    model = quantized().train()
    model[1].eval()
    attributes, strides = set(model.__dict__), [p.stride() for p in model.parameters()]
    finetune_(model, TASK, recipe())
    assert [module.training for module in model[:2]] == [True, False]
    assert set(model.__dict__) == attributes
    assert [p.stride() for p in model.parameters()] == strides


def test_the_order_of_batches_depends_on_seed_and_epoch_only():
    seen = []
    finetune_(network(), watched(seen), recipe(epochs=2))
    finetune_(network(dropout=0.5), watched(seen), recipe(epochs=2, lr=0.01))
    finetune_(network(), watched(seen), recipe(epochs=2), seed=1)
    assert seen[:2] == seen[2:4]
    assert len(set(seen)) == 4


@pytest.mark.parametrize(("task", "steps"), [(TASK, 12), (Halves(samples=70), 12), (Halves(samples=79), 12)])
def test_an_epoch_is_its_whole_batches(task, steps):
    assert len(finetune_(network(), task, recipe()).lines) == steps


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 2), (0.01, 1), (2.25, 9)])
def test_parts_of_epochs(epochs, steps):
    log = finetune_(network(), TASK, recipe(epochs=epochs))
    assert [line.step for line in log.lines] == list(range(1, steps + 1))
    assert log.lines[-1].epoch == (steps - 1) // 4


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("accumulate", [2, 8])
def test_accumulation_equals_the_larger_batch(accumulate, optimizer):
    whole, pieces = (network(norm=False).double() for _ in range(2))
    options = {"optimizer": optimizer, "lr": 0.01, "grad_clip": 0.5}

    class Double(Halves):
        def data(self, split):
            images, labels = super().data(split)
            return images.double(), labels

    one = finetune_(whole, Double(), recipe(**options))
    other = finetune_(pieces, Double(), recipe(accumulate=accumulate, **options))
    for a, b in zip(whole.parameters(), pieces.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert one.mean_loss == pytest.approx(other.mean_loss)
    assert one.mean_score == pytest.approx(other.mean_score)


def test_it_is_the_plain_loop():
    model, plain = network(), network()
    options = recipe(schedule="constant", momentum=0.0, weight_decay=0.0, channels_last=False)
    seeds = []
    finetune_(model, watched(seeds), options)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in seeds:
        for images, labels in TASK.batches("train", 16, seed):
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(images), labels).backward()
            optimizer.step()
    assert equal(model, plain)


def test_channels_last_changes_rounding_only():
    one, other = network(), network()
    finetune_(one, TASK, recipe())
    finetune_(other, TASK, recipe(channels_last=False))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_progress_shows_loss_score_speed_and_time_left(monkeypatch):
    monkeypatch.setattr(loop, "_PAUSE", 0.0)
    told = []
    finetune_(network(), TASK, recipe(), progress=lambda *what: told.append(what))
    assert [(done, total) for done, total, _ in told] == [(step, 12) for step in range(1, 13)]
    for part in ("loss ", "score ", "samples/s"):
        assert part in told[-1][2]
    monkeypatch.setattr(loop, "_PAUSE", 60.0)
    told.clear()
    finetune_(network(), TASK, recipe(), progress=lambda *what: told.append(what))
    assert [done for done, _, _ in told] == [1, 12]


def test_stop_ends_early():
    asked = iter([False] * 5 + [True])
    log = finetune_(network(), TASK, recipe(), stop=lambda: next(asked))
    assert (len(log.lines), log.complete) == (5, False)


class Root(nn.Module):
    """A layer whose output is NaN where its input is negative."""

    def forward(self, x):
        return x.sqrt()


class Block(nn.Module):
    """Makes NaN itself, between its layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(36, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(self.first(x.flatten(1)).log())


@pytest.mark.parametrize("quantize", [False, True])
def test_nan_names_the_layer(quantize):
    model = quantized() if quantize else network()
    if quantize:
        finetune_(model, TASK, recipe(steps=1, epochs=None))  # sets the input steps
    with torch.no_grad():
        model[3].weight[0, 0, 0, 0] = math.nan
    with pytest.raises(
        Diverged, match=r"the loss of step 1 is nan: the first layer .* is 3 \(its weight is not finite\)"
    ):
        finetune_(model, TASK, recipe())


def test_nan_names_what_made_it_and_leaves_the_weights_alone():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), Root(), nn.Linear(4, 2))
    before = copy.deepcopy(model)
    with pytest.raises(
        Diverged, match=r"infinite output is 2; if the data is right, lower lr \(0.1\) or set grad_clip$"
    ):
        finetune_(model, TASK, recipe())
    assert equal(model, before)
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(Diverged, match="output is inner;"):
        finetune_(Named(), TASK, recipe())


class Named(nn.Module):
    """A block inside a model."""

    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize(
    ("where", "message"), [("data", "the batch itself has NaN"), ("loss", "the loss itself makes it")]
)
def test_nan_from_elsewhere(where, message):
    class Broken(Halves):
        def data(self, split):
            images, labels = super().data(split)
            return (images.fill_(math.inf), labels) if where == "data" else (images, labels)

        def loss(self, outputs, batch):
            return super().loss(outputs, batch) / (0.0 if where == "loss" else 1.0)

    with pytest.raises(Diverged, match=message):
        finetune_(network(), Broken(), recipe())


def test_too_high_a_rate_is_told():
    with pytest.raises(Diverged, match=r"the loss of step \d+ is (nan|inf): .*lower lr \(1e\+20\)"):
        finetune_(network(norm=False), TASK, recipe(lr=1e20, epochs=9))


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (Halves(samples=0), {}, "the training split of task halves is empty"),
        (Halves(samples=10), {}, "batch_size 16 is more than the 10 training samples of task halves: lower it to 10"),
        (Halves(promised=200), {}, "task halves ran out of batches in epoch 0, before its 200 samples"),
    ],
)
def test_bad_input(task, options, message):
    with pytest.raises(InputError, match=message) as caught:
        finetune_(network(), task, recipe(**options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batchsize": 3}, "unknown key; did you mean batch_size"),
        ({"accumulate": 3}, "batch_size 16 cannot be cut into 3 equal pieces"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs the optimizer sgd with a momentum above 0"),
        ({"optimizer": "lion"}, "Input should be 'sgd', 'adamw' or 'lamb', got 'lion'"),
        ({"lr": math.nan}, "finite number"),
    ],
)
def test_bad_recipes(options, message):
    with pytest.raises(RecordError, match=message):
        recipe(**options)


def test_there_is_nothing_to_score():
    with pytest.raises(InputError, match="the test split of task halves is empty"):
        evaluate(network(), Halves(tests=0))
