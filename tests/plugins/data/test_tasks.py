"""What every task must do."""

import pickle

import pytest
import torch
from squads import small_bert
from torch import nn

from bitplan.adapters.torch import inference
from bitplan.core.errors import InputError, UnknownName
from bitplan.core.registry import TASKS
from bitplan.tasks.base import load_task
from bitplan.testing import check_task

SMALL = {"train_size": 24, "test_size": 32, "resize": 36, "classes": 3}
CLASSIFY = ["digits", "cifar10", "imagenet"]
SEGMENT = {"camvid": {"crop": 32, "height": 36, "width": 48}, "cityscapes": {"crop": 32, "height": 48, "width": 96}}
NAMES = [*CLASSIFY, *SEGMENT]
ALL_NAMES = [*NAMES, "squad"]
METRICS = {"squad": "F1", **dict.fromkeys(SEGMENT, "mean IoU"), **dict.fromkeys(CLASSIFY, "top-1")}


@pytest.fixture(params=NAMES)
def task(request):
    if request.param == "digits":
        return load_task("digits")
    if request.param == "cifar10":
        return load_task("cifar10", data=request.getfixturevalue("cifar_parquet"))
    if request.param == "squad":
        return load_task("squad", **request.getfixturevalue("squad_options"))
    if request.param in SEGMENT:
        folder = request.getfixturevalue("camvid_parquet" if request.param == "camvid" else "cityscapes_tree")
        return load_task(request.param, data=str(folder), **SEGMENT[request.param])
    return load_task("imagenet", data=str(request.getfixturevalue("imagenet_folders")), **SMALL)


@pytest.fixture
def model(task):
    if task.name == "squad":
        return small_bert()
    torch.manual_seed(0)
    channels = task.example().shape[1]
    layers = nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.5)
    if task.name in SEGMENT:
        return nn.Sequential(*layers, nn.Conv2d(8, len(task.class_names), 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


every_task = pytest.mark.parametrize("task", ALL_NAMES, indirect=True)  # others are about images


def passed(task, split, seed=None, batch_size=7):
    return list(task.batches(split, batch_size, seed))


@every_task
def test_it_is_registered_under_its_name(task):
    assert task.name in TASKS
    assert isinstance(task, TASKS.get(task.name))
    assert (task.metric, task.higher_is_better) == (METRICS[task.name], True)
    assert task.version >= 1


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("seed", [None, 1])
def test_a_pass_gives_every_sample_once(task, split, seed):
    batches = passed(task, split, seed)
    assert all(images.dtype == torch.float32 and labels.dtype == torch.int64 for images, labels in batches)
    assert all(len(images) == len(labels) <= 7 and bool(images.isfinite().all()) for images, labels in batches)
    in_order = torch.cat([labels for _, labels in passed(task, split)])
    labels = torch.cat([labels for _, labels in batches])
    assert len(labels) == task.size(split)
    if labels.dim() == 1 or split == "test" or seed is None:  # of a training scene a part is seen: test_scenes.py
        assert torch.equal(labels.flatten().bincount(), in_order.flatten().bincount())


@every_task
def test_it_keeps_the_contract_of_tasks(task, model):
    check_task(task, model=model)


@every_task
def test_no_test_sample_is_there_twice(task):
    samples = [image.numpy().tobytes() for images, *_ in passed(task, "test") for image in images]
    assert len(set(samples)) == len(samples) == task.size("test")


def test_only_training_images_are_augmented(task):
    def images(split, seed):
        return {image.numpy().tobytes() for images, _ in passed(task, split, seed) for image in images}

    assert images("test", 3) == images("test", None)
    assert images("train", 3) != images("train", None)


def test_the_example_has_the_shape_of_a_test_image(task):
    assert task.example().shape == passed(task, "test", batch_size=1)[0][0].shape


@pytest.mark.parametrize("task", CLASSIFY, indirect=True)
def test_the_score_is_the_percent_classified_right(task, model):
    labels = torch.cat([labels for _, labels in passed(task, "test")])
    with inference(model), torch.no_grad():
        guesses = torch.cat([model(images).argmax(1) for images, _ in passed(task, "test")])
    assert task.score(model) == pytest.approx(100 * float((guesses == labels).double().mean()))


@pytest.mark.parametrize("task", CLASSIFY, indirect=True)
def test_loss_logits_and_batch_score(task, model):
    batch = passed(task, "train", 0)[0]
    outputs = task.forward(model, batch)
    picked = outputs.log_softmax(1)[torch.arange(len(batch[1])), batch[1]]
    torch.testing.assert_close(task.loss(outputs, batch), -picked.mean())
    assert task.logits(outputs)[0] is outputs
    perfect = nn.functional.one_hot(batch[1], 10).float()
    assert task.batch_score(perfect, batch) == 100
    assert task.batch_score((-perfect, perfect), batch) < 100  # the first of several outputs counts
    assert task.loss((outputs, -outputs), batch) == task.loss(outputs, batch)


@every_task
def test_only_its_options_travel_to_another_process(task):
    passed(task, "train")
    assert len(pickle.dumps(task)) < 1000


def test_every_task_of_ours_is_tried():
    assert {name for name in TASKS if TASKS.get(name).__module__.startswith("bitplan.")} == {
        *ALL_NAMES,
        "text",
    }  # tests/plugins/llm/test_text.py


@pytest.mark.parametrize("name", ALL_NAMES)
def test_unknown_options_and_splits_are_refused(name):
    with pytest.raises(UnknownName, match=f"unknown option of {name} 'dta'"):
        load_task(name, dta="x")
    with pytest.raises(UnknownName, match="unknown split 'val'; there is test, train"):
        load_task(name).batches("val", 8)
    with pytest.raises(UnknownName, match="unknown split 'val'"):
        load_task(name).size("val")
    with pytest.raises(InputError, match="batch_size is 0: it must be at least 1"):
        load_task(name).batches("train", 0)
