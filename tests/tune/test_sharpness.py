"""SAQ's sharpness step: known answers on a quadratic, and plain training where the radius is 0."""

import copy

import pytest
import torch
from halves import Halves, network, quantized
from torch import nn

from bitplan.core.errors import InputError
from bitplan.core.trials import Recipe
from bitplan.quant.quantizers import WeightQuantizer
from bitplan.tune.loop import finetune_, loss_at_the_worst, record_quantized_weights

TASK = Halves()
RECIPE = {"steps": 8, "batch_size": 16, "lr": 0.05}


class Quadratic(nn.Module):
    """½‖ŵ − t‖² of two weights, quantized with steps of 0.25 and 0.5."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.tensor([0.3, -0.8])), nn.Parameter(torch.tensor([1.4]))
        self.quantizers = nn.ModuleList(WeightQuantizer(8, torch.tensor(step), learned=False) for step in (0.25, 0.5))
        self.target = torch.tensor([1.25, 2.25, -2.5])

    def forward(self):
        made = torch.cat(
            [quantizer(weight) for quantizer, weight in zip(self.quantizers, (self.one, self.two), strict=True)]
        )
        return 0.5 * (made - self.target).square().sum()


@pytest.mark.parametrize("radius", [0.5, 2.0])
def test_on_a_quadratic_the_gradient_is_longer_by_the_radius(radius):
    model = Quadratic()
    with record_quantized_weights(model, radius) as made:
        loss = model()
    slopes = torch.tensor([-1.0, -3.0, 4.0])  # ŵ − t with ŵ = 0.25, −0.75, 1.5
    assert loss.item() == 0.5 * slopes.square().sum()
    worst = loss_at_the_worst(model, radius, loss, made, model)
    norm = slopes.norm()
    assert worst.item() == pytest.approx(0.5 * (norm + radius).item() ** 2)
    worst.backward()
    moved = slopes * (1 + radius / norm)
    assert torch.cat([model.one.grad, model.two.grad]).tolist() == pytest.approx(moved.tolist())


def test_without_a_slope_nothing_moves():
    model = Quadratic()
    model.target = torch.tensor([0.25, -0.75, 1.5])
    with record_quantized_weights(model, 1.0) as made:
        loss = model()
    assert loss_at_the_worst(model, 1.0, loss, made, model).item() == 0.0


def trained(recipe, **options):
    model = quantized(**options)
    log = finetune_(model, TASK, recipe, seed=4)
    return model.state_dict(), [line.loss for line in log.lines]


def test_without_a_radius_training_is_plain_bit_for_bit_and_with_one_it_is_not():
    plain, losses = trained(Recipe(**RECIPE), dropout=0.2)
    same, same_losses = trained(Recipe(**RECIPE, sharpness=0.0), dropout=0.2)
    assert losses == same_losses
    assert all(torch.equal(same[name], value) for name, value in plain.items())
    other, other_losses = trained(Recipe(**RECIPE, sharpness=0.3), dropout=0.2)
    assert other_losses[0] == losses[0], "what is logged is the loss of the network as it is"
    assert not torch.equal(other["3.weight"], plain["3.weight"])
    assert Recipe(**RECIPE, sharpness=0.0).id == Recipe(**RECIPE).id


def test_a_vanishing_radius_is_nearly_plain_training_dropout_and_statistics_included():
    plain, _ = trained(Recipe(**RECIPE), dropout=0.2)
    near, _ = trained(Recipe(**RECIPE, sharpness=1e-7), dropout=0.2)
    assert all(torch.allclose(near[name], value, atol=1e-4) for name, value in plain.items())


def test_it_learns_in_pieces_and_goes_on_after_a_stop(tmp_path):
    recipe = Recipe(steps=30, batch_size=16, accumulate=2, lr=0.3, sharpness=0.05)
    start = quantized()
    whole, stopped, again = (copy.deepcopy(start) for _ in range(3))
    log = finetune_(whole, TASK, recipe, seed=1)
    assert log.lines[-1].loss < 0.8 * log.lines[0].loss
    calls = iter(range(99))
    finetune_(stopped, TASK, recipe, seed=1, folder=tmp_path / "run", stop=lambda: next(calls) > 9)
    finetune_(again, TASK, recipe, seed=1, folder=tmp_path / "run")
    assert all(torch.equal(again.state_dict()[name], value) for name, value in whole.state_dict().items())


def test_a_network_without_quantized_weights_is_one_line():
    with pytest.raises(
        InputError, match=r"^the recipe's sharpness \(0.3\) moves quantized weights[^\n]*set sharpness to 0$"
    ):
        finetune_(network(), TASK, Recipe(**RECIPE, sharpness=0.3))
