"""Tasks made of what users have: loaders, datasets and batches, a loss, a score."""

import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import bitplan
from bitplan.core.errors import InputError
from bitplan.store.engines import Local
from bitplan.tasks.loaded import answers_of, samples_of
from bitplan.testing import check_task


def percent_right(outputs, labels):
    return 100 * (outputs.argmax(1) == labels).float().mean()


def pairs(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 3, 4, 4, generator=generator), torch.arange(count) % 5)


class Jittered(Dataset):
    """Images with noise drawn from all three sources of random numbers."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        image, label = self.images[number]
        return image + 0.01 * (torch.randn(()) + random.random() + np.random.rand()), label


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(pairs(40))


TRAIN, TEST = pairs(40), pairs(20, seed=1)
GIVEN = {
    "datasets": lambda: (TRAIN, TEST),
    "loaders": lambda: (DataLoader(TRAIN, 8, shuffle=True), DataLoader(TEST, 8)),
    "parts of one dataset": lambda: random_split(pairs(60), [40, 20], generator=torch.Generator().manual_seed(0)),
    "lists of batches": lambda: (list(DataLoader(TRAIN, 7)), list(DataLoader(TEST, 7))),
    "a generator": lambda: ((batch for batch in DataLoader(TRAIN, 7)), DataLoader(TEST, 8)),
    "a stream": lambda: (DataLoader(Streamed(), 7), DataLoader(TEST, 8)),
    "what is drawn anew": lambda: (Jittered(TRAIN), Jittered(TEST)),
}


def made(name="datasets", **options):
    train, test = GIVEN[name]()
    return bitplan.task(train=train, test=test, **({"loss": F.cross_entropy, "score": percent_right} | options))


@pytest.mark.parametrize("name", GIVEN)
def test_a_task_of_what_users_have_keeps_the_contract(name):
    check_task(made(name))


def compare_with_and_without_workers():
    drawn_anew = Jittered(TRAIN)
    with_workers, without = (bitplan.task(train=DataLoader(drawn_anew, num_workers=count)) for count in (1, 0))
    for one, other in zip(with_workers.batches("train", 16, 3), without.batches("train", 16, 3), strict=True):
        assert all(map(torch.equal, one, other))


def test_workers_change_nothing():
    """In a process of its own: the handler of SIGCHLD that torch sets for workers has crashed one that had run Ray."""
    code = "import test_loaded; test_loaded.compare_with_and_without_workers(); print('compared')"
    child = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert child.stdout == "compared\n", child.stderr


def test_random_numbers_outside_are_not_touched():
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(1), random.random()
    torch.manual_seed(5)
    random.seed(5)
    list(made("what is drawn anew").batches("train", 8, seed=1))
    assert (torch.rand(1), random.random()) == expected


def test_data_is_told_from_other_data_and_is_the_same_in_another_process():
    task = made("loaders")
    assert task == made("datasets")
    assert repr(pickle.loads(pickle.dumps(task))) == repr(task)
    other = bitplan.task(train=pairs(40, seed=2), test=TEST, loss=F.cross_entropy, score=percent_right)
    assert other != task
    assert made(loss=F.nll_loss) != made()


def net():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))


def test_a_training_stopped_half_way_ends_with_the_same_weights(tmp_path):
    recipe, steps = bitplan.Recipe(steps=6, batch_size=8, lr=0.05), iter(range(4))
    whole, halved = net(), net()
    bitplan.finetune_(whole, made("what is drawn anew"), recipe)
    bitplan.finetune_(halved, made("what is drawn anew"), recipe, folder=tmp_path, stop=lambda: not next(steps, 0))
    halved = net()
    log = bitplan.finetune_(halved, made("what is drawn anew"), recipe, folder=tmp_path)
    assert log.complete
    for one, other in zip(whole.parameters(), halved.parameters(), strict=True):
        assert torch.equal(one, other)


def test_training_learns_and_the_score_is_a_mean_over_samples():
    model, task = net(), made()
    first = bitplan.evaluate(model, task)
    with torch.no_grad():
        images, labels = TEST.tensors
        assert first == pytest.approx(float(percent_right(model(images), labels)))
    recipe = bitplan.Recipe(epochs=15, batch_size=8, lr=0.1)
    same = bitplan.task(
        train=TRAIN, test=[(TRAIN.tensors[0], TRAIN.tensors[1])], loss=F.cross_entropy, score=percent_right
    )
    bitplan.finetune_(model, same, recipe)
    assert bitplan.evaluate(model, same) > 90
    assert bitplan.evaluate(model, made(score=None)) == pytest.approx(
        float(F.cross_entropy(model(TEST.tensors[0]), TEST.tensors[1]).detach()), rel=1e-5
    )
    assert (made(score=None).metric, made(score=None).higher_is_better) == ("loss", False)


class Named(nn.Module):
    """A model in Hugging Face's style: keyword arguments, and a loss of its own where there are labels."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(48, 16), nn.Linear(16, 5)

    def forward(self, pixels, labels=None):
        scores = self.head(self.body(pixels.flatten(1)).relu())
        return {"logits": scores} | ({} if labels is None else {"loss": F.cross_entropy(scores, labels)})


class Columns(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, number):
        image, label = TRAIN[number]
        return {"pixels": image, "labels": label, "file": f"{number}.png"}


def test_a_models_own_loss_counts_and_columns_that_it_does_not_take_are_left_out():
    task, model = bitplan.task(train=Columns()), Named()
    batch = next(iter(task.batches("train", 6)))
    outputs = task.forward(model, batch)
    assert torch.equal(task.loss(outputs, batch), outputs["loss"])
    assert task.logits(outputs)[0].shape == (6, 5)
    assert set(task.example()) == {"pixels"}
    assert task.size("test") == 0
    with pytest.raises(InputError, match="the test split of task yours is empty"):
        bitplan.evaluate(model, task)


@pytest.mark.parametrize(
    ("outputs", "shapes"),
    [
        (torch.zeros(4, 7), [(4, 7)]),
        (torch.zeros(4, 7, 2, 2), [(4, 7, 2, 2)]),
        (torch.zeros(4, 9, 7), [(4, 7, 9)]),  # a language model's: the last dimension is the vocabulary
        (torch.zeros(4, 1), [(4, 2)]),
        (torch.zeros(4), [(4, 2)]),
        ((torch.zeros(4, 7), torch.zeros(4, 3)), [(4, 7)]),
        ({"loss": torch.zeros(()), "logits": torch.zeros(4, 7)}, [(4, 7)]),
        ({"start_logits": torch.zeros(4, 9), "end_logits": torch.zeros(4, 9)}, [(4, 9), (4, 9)]),
    ],
)
def test_class_scores_are_found_in_what_models_return(outputs, shapes):
    assert [tuple(scores.shape) for scores in answers_of(outputs)] == shapes


def test_batches_may_hold_several_inputs_or_be_read_by_the_user():
    a, b, labels = torch.randn(6, 2), torch.randn(6, 2), torch.arange(6) % 2
    two = bitplan.task(train=[(a, b, labels)])
    nested = bitplan.task(train=[((a, b), labels)])
    own = bitplan.task(
        train=[{"left": a, "right": b}], forward=lambda model, batch: model(batch["left"], batch["right"])
    )

    class Sum(nn.Module):
        def forward(self, one, other):
            return one + other

    for task in (two, nested, own):
        assert torch.equal(task.forward(Sum(), next(iter(task.batches("train", 6)))), a + b)
    assert len(two.example()) == 2


REFUSED = {
    "the same data twice": (lambda: {"train": TRAIN, "test": TRAIN}, "train and test share 40 samples"),
    "parts that overlap": (
        lambda: {"train": Subset(TRAIN, range(30)), "test": Subset(TRAIN, range(28, 40))},
        "train and test share 2 samples",
    ),
    "weighted draws": (
        lambda: {"train": DataLoader(TRAIN, 8, sampler=WeightedRandomSampler([1.0] * 40, 40))},
        "the loader draws by WeightedRandomSampler.*give its dataset, or list",
    ),
    "batches of other shapes": (
        lambda: {"train": [torch.zeros(2, 5), torch.zeros(2, 6)]},
        r"batches 0 and 1 are not alike.*pad them to one length, or give the DataLoader",
    ),
    "parts of other lengths": (lambda: {"train": [(torch.zeros(2, 5), torch.zeros(3))]}, r"parts of \[2, 3\] rows"),
    "texts": (lambda: {"train": [("a", "b")]}, "batch 0 holds str 'a', and batches are tensors"),
    "nothing": (lambda: {"train": []}, "the batches are empty"),
    "a word": (lambda: {"train": "train"}, "a DataLoader, a Dataset, a batch or any iterable of batches, not str"),
    "a number": (lambda: {"train": 3}, "not int"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_data_is_one_line(name):
    given, message = REFUSED[name]
    with pytest.raises(InputError, match=message) as caught:
        bitplan.task(**given())
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_said_when_it_is_needed():
    bare = bitplan.task(train=[torch.zeros(4, 48)])
    batch = next(iter(bare.batches("train", 4)))
    with pytest.raises(InputError, match="the loss of these batches is not known: give loss=…"):
        bare.loss(bare.forward(net(), batch), batch)
    labelless = bitplan.task(train=[torch.zeros(4, 48)], loss=F.cross_entropy)
    with pytest.raises(InputError, match="the batches have no labels"):
        labelless.loss(torch.zeros(4, 5), batch)
    unreduced = bitplan.task(train=TRAIN, loss=nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(InputError, match=r"one number for a batch, a mean over its samples, not \(4,\)"):
        unreduced.loss(torch.zeros(4, 5), next(iter(unreduced.batches("train", 4))))
    with pytest.raises(InputError, match="no class scores are found in what the model returns"):
        bare.logits({"text": "yes"})


def test_of_what_tells_no_length_so_much_is_read_as_is_asked_for():
    endless = (torch.full((5, 2), float(number)) for number in iter(int, 1))
    assert len(samples_of(endless, most=12)) == 12


def test_what_cannot_travel_to_workers_is_one_line():
    """What can is sent by the test of the contract."""
    work = made(loss=lambda outputs, labels: outputs.sum()).batches
    with pytest.raises(InputError, match="cannot be sent to another process.*lambda.*workers = 0"):
        list(Local(workers=1).run(work, ["train"]))
