"""Loss and mean IoU of segmentation, against torchmetrics; and the small PSPNet, trained and quantized."""

import copy
import math
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bitplan
from bitplan.adapters.torchvision import torchvision
from bitplan.core.errors import InputError
from bitplan.plugins.data.segmentation import Segmentation
from bitplan.tasks.base import load_task

torchvision()  # torchmetrics imports it, without helping it
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchmetrics.classification import MulticlassJaccardIndex

VOID = 255
SMALL = {"crop": 48, "height": 36, "width": 48}


@dataclass(frozen=True)
class Given(Segmentation):
    """Batches that are given; the images are what the model should answer."""

    given: tuple = ()

    name = "given"
    version = 1
    scored_at_once = 1
    class_names = tuple("abcdefg")

    def example(self):
        return self.given[0][0]

    def size(self, split):
        return len(self.given)

    def batches(self, split, batch_size, seed=None):
        return iter(self.given)


def batch(seed, classes=7, void=0.2):
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 7, 9, 13, generator=draw)
    labels = torch.randint(0, classes, (2, 9, 13), generator=draw)
    return scores, torch.where(torch.rand(2, 9, 13, generator=draw) < void, VOID, labels)


def theirs(batches, average="macro"):
    metric = MulticlassJaccardIndex(7, average=average, ignore_index=VOID)
    for scores, labels in batches:
        metric.update(scores, labels)
    return 100 * metric.compute().double()


@pytest.mark.parametrize("classes", [7, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_score_is_that_of_torchmetrics(seed, classes):
    batches = tuple(batch(10 * seed + row, classes) for row in range(3))
    task = Given(batches)
    assert task.score(nn.Identity()) == pytest.approx(float(theirs(batches)), abs=1e-4)
    assert task.batch_score(*batches[0][:1], batches[0]) == pytest.approx(float(theirs(batches[:1])), abs=1e-4)
    scores = task.scores(nn.Identity())
    assert list(scores) == ["mean IoU", *"abcdefg"]
    assert list(scores.values())[1:] == pytest.approx(theirs(batches, None).tolist(), abs=1e-4)


def test_a_class_that_is_neither_there_nor_guessed_does_not_count():
    scores, labels = batch(0, classes=3)
    scores[:, 3:] = -100
    task = Given(((scores, labels),))
    assert task.score(nn.Identity()) == pytest.approx(float(theirs([(scores, labels)])), abs=1e-4)
    assert list(task.scores(nn.Identity())) == ["mean IoU", "a", "b", "c"]
    perfect = F.one_hot(labels.clamp(max=6), 7).permute(0, 3, 1, 2).float()
    assert task.batch_score(perfect, (perfect, labels)) == 100


def test_pixels_are_counted_over_the_whole_split():
    batches = tuple(batch(seed) for seed in range(3))
    joined = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    assert Given(batches).score(nn.Identity()) == pytest.approx(Given((joined,)).score(nn.Identity()))


def test_void_has_no_part_in_score_and_loss():
    scores, labels = batch(1, void=0.5)
    other = torch.where((labels == VOID)[:, None], torch.randn(scores.shape), scores)
    task = Given()
    assert not torch.equal(scores, other)
    assert task.batch_score(scores, (scores, labels)) == task.batch_score(other, (scores, labels))
    torch.testing.assert_close(task.loss(scores, (scores, labels)), task.loss(other, (scores, labels)))
    picked = scores.log_softmax(1).permute(0, 2, 3, 1)[labels != VOID]
    expected = -picked.gather(1, labels[labels != VOID][:, None]).mean()
    torch.testing.assert_close(task.loss(scores, (scores, labels)), expected)


def test_the_auxiliary_head_adds_two_fifths_of_its_loss():
    (main, labels), (auxiliary, _) = batch(0), batch(1)
    task = Given()
    both = [task.loss(scores, (main, labels)) for scores in (main, auxiliary)]
    torch.testing.assert_close(task.loss((main, auxiliary), (main, labels)), both[0] + 0.4 * both[1])
    assert task.logits((main, auxiliary))[0] is main
    assert task.batch_score((main, auxiliary), (main, labels)) == task.batch_score(main, (main, labels))


def test_a_batch_that_is_all_void_teaches_nothing():
    scores, labels = batch(0, void=1.1)
    scores.requires_grad_()
    task = Given(((scores, labels),))
    loss = task.loss((scores, scores), (scores, labels))
    loss.backward()
    assert float(loss.detach()) == 0
    assert not scores.grad.any()
    assert math.isnan(task.batch_score(scores, (scores, labels)))
    with pytest.raises(InputError, match="every pixel of the test split is void"):
        task.score(nn.Identity())


def test_a_model_with_other_classes_or_another_size_is_refused():
    scores, labels = batch(0)
    for use in (Given().loss, Given().batch_score):
        with pytest.raises(InputError, match="the model gives scores for 5 classes, task given has 7: take a model"):
            use(scores[:, :5], (scores, labels))
        with pytest.raises(InputError, match=r"scores are \(2, 7, 9, 12\), task given needs \(2, 7, 9, 13\)"):
            use(scores[..., :12], (scores, labels))
    with pytest.raises(InputError, match="the model gives scores for 11 classes, task cityscapes has 19"):
        load_task("cityscapes").loss(torch.zeros(1, 11, 4, 4), (None, torch.zeros(1, 4, 4)))
    with pytest.raises(InputError, match="for 7 classes, task camvid has 11"):
        load_task("camvid").loss((torch.zeros(1, 7, 4, 4),) * 2, (None, torch.zeros(1, 4, 4)))


@pytest.fixture
def camvid(camvid_parquet):
    return load_task("camvid", data=camvid_parquet, **SMALL)


@pytest.fixture
def psp():
    torch.manual_seed(0)
    return bitplan.load_model("pspnet_small")


def test_the_small_pspnet_has_linked_layers_and_layers_to_choose(psp):
    model, example = psp
    graph = bitplan.trace(model, example, name="pspnet_small")
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(1.33e6, rel=0.01)
    assert {link.layers for link in graph.links} == {
        (f"backbone.{block}.conv1", f"backbone.{block}.shortcut.0") for block in ("layer1.0", "layer2.0", "layer4.0")
    }
    assert len(graph.selectable) == 18
    assert graph.unreached == ("auxiliary.0", "auxiliary.4")


def test_the_small_pspnet_learns_and_is_quantized(psp, camvid):
    model, example = psp
    recipe = bitplan.Recipe(steps=24, batch_size=5, optimizer="adamw", lr=3e-3)
    log = bitplan.finetune_(model, camvid, recipe)
    assert sum(line.loss for line in log.lines[-3:]) < 0.7 * sum(line.loss for line in log.lines[:3])
    graph = bitplan.trace(model, example, name="pspnet_small")
    small = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(small, camvid.batches("train", 5, seed=0), forward=camvid.forward)
    teach = bitplan.Recipe(steps=3, batch_size=5, lr=1e-3, distill=0.5)
    log = bitplan.finetune_(small, camvid, teach, teacher=copy.deepcopy(model))
    assert all(math.isfinite(line.loss) for line in log.lines)
    assert {str(precision) for precision in bitplan.plan_of(small).precisions.values()} == {"w4a4", "w8a8"}
    assert 0 < bitplan.evaluate(small, camvid) <= 100


def test_a_teacher_with_other_classes_is_refused(psp, camvid):
    class Teacher(nn.Module):
        def forward(self, x):
            return x.new_zeros(len(x), 19, *x.shape[2:])

    recipe = bitplan.Recipe(steps=1, batch_size=2, distill=0.5)
    with pytest.raises(InputError, match="the teacher has other classes"):
        bitplan.finetune_(psp[0], camvid, recipe, teacher=Teacher())
