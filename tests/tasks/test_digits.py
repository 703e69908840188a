from dataclasses import dataclass

import pytest
import torch
from torch import nn

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.registry import TASKS
from bitplan.tasks.base import Task, load_task
from bitplan.tasks.digits import Digits
from bitplan.tasks.images import Shifts
from bitplan.testing import check_task


@pytest.fixture(scope="module")
def task():
    return load_task("digits")


def test_the_split_is_fixed_and_stratified(task):
    assert (task.size("train"), task.size("test")) == (1437, 360)
    for split, low, high in (("train", 139, 147), ("test", 34, 37)):
        counts = torch.cat([labels for _, labels in task.batches(split, 500)]).bincount()
        assert len(counts) == 10
        assert low <= counts.min() <= counts.max() <= high
    first = next(iter(task.batches("test", 12)))[1].tolist()
    assert first == [0, 2, 7, 7, 0, 0, 9, 8, 1, 7, 0, 2], "a new split needs a new version of the task"


def test_it_keeps_the_contract_of_tasks(task):
    check_task(task)


def test_images_are_standardized(task):
    images = torch.cat([images for images, _ in task.batches("train", 500)])
    assert images.shape == (1437, 1, 8, 8)
    assert float(images.mean()) == pytest.approx(0, abs=1e-5)
    assert float(images.std()) == pytest.approx(1, abs=1e-4)


def test_shifted_test_images_are_the_same_ones_in_nine_places(task):
    more = load_task("digits", shifted=True)
    assert (more.size("train"), more.size("test")) == (1437, 9 * 360)
    images, labels = next(iter(more.batches("test", 9 * 360)))
    originals, classes = next(iter(task.batches("test", 360)))
    assert torch.equal(labels.view(360, 9), classes[:, None].expand(360, 9))
    places = images.view(360, 3, 3, 8, 8)
    assert torch.equal(places[:, 1, 1], originals[:, 0]), "the one in the middle is not shifted"
    assert torch.equal(places[:, 0, 2, 1:, :-1], originals[:, 0, :-1, 1:]), "one down and one to the left"


@pytest.mark.parametrize("mirror", [False, True])
def test_each_image_is_shifted_on_its_own(mirror):
    pixels = torch.zeros(200, 1, 8, 8, dtype=torch.uint8)
    pixels[:, :, 3, 2] = 9
    shifted = Shifts(1, mirror)(pixels, torch.Generator().manual_seed(0))
    assert bool((shifted.sum((1, 2, 3)) == 9).all())
    places = {tuple(place) for place in shifted.nonzero()[:, 2:].tolist()}
    columns = {1, 2, 3} | ({6, 5, 4} if mirror else set())
    assert places == {(row, column) for row in (2, 3, 4) for column in columns}


@pytest.mark.parametrize(
    ("name", "selectable", "links", "weights"),
    [("digits_resnet", 9, 3, 0.32e6), ("digits_transformer", 8, 2, 0.27e6)],
)
def test_models_have_narrow_wide_and_linked_layers(name, selectable, links, weights):
    model, example = bitplan.load_model(name)
    graph = bitplan.trace(model, example, name=name)
    assert (len(graph.selectable), len(graph.links)) == (selectable, links)
    assert any(len(group.layers) > 1 for group in graph.selectable)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(weights, rel=0.02)


@pytest.mark.parametrize(("name", "least"), [("digits_resnet", 90), ("digits_transformer", 70), ("digits_necks", 60)])
def test_models_learn(task, name, least):
    torch.manual_seed(0)
    model, _ = bitplan.load_model(name)
    assert isinstance(model, nn.Module)
    before = task.score(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for epoch in range(3):
        for batch in task.batches("train", 64, seed=epoch):
            optimizer.zero_grad()
            task.loss(task.forward(model, batch), batch).backward()
            optimizer.step()
    assert before < 40 < least < task.score(model)


def test_a_task_of_one_figure_inherits_how_it_is_told(task):
    class Even(Task):
        name, metric, higher_is_better, version = "even", "evenness", True, 1
        example, size, batches, forward = Digits.example, Digits.size, Digits.batches, Digits.forward
        loss, logits, batch_score = Digits.loss, Digits.logits, Digits.batch_score

        def score(self, model):
            return 50.0

    assert Even().scores(nn.Identity()) == {"evenness": 50.0}
    with TASKS.registered("bare", dataclass(frozen=True)(type("Bare", (), {"name": "bare"}))):  # noqa: SIM117
        with pytest.raises(InputError, match=r"Bare is no task, for it has no batches .*derive it from .*base\.Task"):
            load_task("bare")
