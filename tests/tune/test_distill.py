"""What a teacher adds to the loss."""

import copy
from dataclasses import dataclass

import pytest
import torch
from halves import Halves, network

from bitplan.core.errors import InputError
from bitplan.core.trials import Recipe
from bitplan.tune.distillation import divergence, objective
from bitplan.tune.loop import finetune_


@dataclass(frozen=True)
class Spans(Halves):
    """Two heads over 12 positions, as in question answering."""

    def logits(self, outputs):
        return outputs[:, :12], outputs[:, 12:]


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4, 4)])
def test_the_gradient_is_the_difference_of_softened_softmaxes(temperature, shape):
    student = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(shape, dtype=torch.float64)
    divergence((student,), (teacher,), temperature).backward()
    places = student.numel() / shape[1]
    by_hand = temperature * ((student / temperature).softmax(1) - (teacher / temperature).softmax(1)) / places
    torch.testing.assert_close(student.grad, by_hand.detach())


def test_it_is_zero_for_equal_scores_and_a_mean_over_heads():
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    assert divergence((a,), (a + 3.0,), 2.0).abs() < 1e-6
    one, other = divergence((a,), (b,), 2.0), divergence((b,), (a,), 2.0)
    torch.testing.assert_close(divergence((a, b), (b, a), 2.0), (one + other) / 2)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_scores_of_16_bits_diverge_as_what_they_stand_for(kind, side_by_side):
    draw = torch.Generator().manual_seed(0)
    shape = (2, 20, 1000) if side_by_side else (2, 1000, 20)
    taught = (3 * torch.randn(shape, generator=draw)).to(kind)
    own = (taught.float() + 0.05 * torch.randn(shape, generator=draw)).to(kind)
    if side_by_side:
        own, taught = own.transpose(1, 2), taught.transpose(1, 2)
    exact = float(divergence((own.double(),), (taught.double(),), 1.0))
    assert float(divergence((own,), (taught,), 1.0)) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_the_weight_mixes_both_losses(weight):
    task, student, teacher = Halves(), network(norm=False), network(norm=False, classes=2)
    with torch.no_grad():
        teacher[8].weight.mul_(3)
    batch = next(iter(task.batches("train", 8)))
    outputs = student(batch[0])
    recipe = Recipe(steps=1, distill=weight, temperature=2.0)
    soft = divergence((outputs,), (teacher(batch[0]),), 2.0)
    expected = (1 - weight) * task.loss(outputs, batch) + weight * soft
    torch.testing.assert_close(objective(task, outputs, batch, teacher, recipe), expected)


def test_distillation_moves_the_student_towards_its_teacher():
    task = Spans()
    teacher, student = network(norm=False, classes=24), network(norm=False, classes=24)
    with torch.no_grad():
        teacher[8].weight.mul_(-2)
    before = copy.deepcopy(teacher.state_dict())
    batch = next(iter(task.batches("test", 32)))

    def distance():
        with torch.no_grad():
            return divergence(task.logits(student(batch[0])), task.logits(teacher(batch[0])), 1.0).item()

    start = distance()
    finetune_(student, task, Recipe(steps=60, batch_size=16, lr=0.5, distill=1.0, weight_decay=0.0), teacher=teacher)
    assert distance() < start / 5
    assert teacher.training, "its mode is restored"
    assert all(torch.equal(teacher.state_dict()[name], value) for name, value in before.items())
    assert all(p.grad is None for p in teacher.parameters())


def test_a_teacher_with_other_classes_is_refused():
    recipe = Recipe(steps=1, batch_size=8, distill=0.5)
    message = r"other classes: its scores are \(8, 5\), the model's \(8, 2\)"
    with pytest.raises(InputError, match=message):
        finetune_(network(), Halves(), recipe, teacher=network(classes=5))


def test_a_teacher_and_its_weight_come_together():
    model = network()
    with pytest.raises(InputError, match="distill = 0.5. but there is no teacher: give one, --recipe teacher=NAME"):
        finetune_(model, Halves(), Recipe(steps=1, distill=0.5))
    with pytest.raises(InputError, match="there is a teacher but the recipe does not distill"):
        finetune_(model, Halves(), Recipe(steps=1), teacher=network())
    with pytest.raises(InputError, match="cannot be its own teacher"):
        finetune_(model, Halves(), Recipe(steps=1, distill=0.5), teacher=model)
