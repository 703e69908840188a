"""Schedules, LAMB and weight decay groups against their definitions."""

import math

import pytest
import torch
from halves import network, quantized
from torch import nn

from bitplan.adapters import timm
from bitplan.core.errors import InputError, MissingExtra
from bitplan.core.trials import Recipe
from bitplan.tune.optim import SMALLEST, build_optimizer, limit_moves, rate, set_rate_


@pytest.mark.parametrize("schedule", ["cosine", "poly", "linear"])
def test_a_schedule_follows_torchs_own(schedule):
    total, recipe = 37, Recipe(steps=37, lr=0.3, schedule=schedule)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = {
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total),
        "poly": lambda: torch.optim.lr_scheduler.PolynomialLR(optimizer, total, power=0.9),
        "linear": lambda: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-12, total),
    }[schedule]()
    for step in range(total):
        assert rate(recipe, step, total) == pytest.approx(theirs.get_last_lr()[0], rel=1e-6)
        optimizer.step()
        theirs.step()


def test_constant_stays_and_warm_up_rises_in_a_straight_line():
    recipe = Recipe(steps=40, lr=0.5, schedule="constant", warmup=0.1)
    rates = [rate(recipe, step, 40) for step in range(40)]
    assert rates[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert set(rates[4:]) == {0.5}


@pytest.mark.parametrize("schedule", ["cosine", "poly", "linear", "constant"])
def test_after_warm_up_the_schedule_is_the_shorter_one(schedule):
    warm = Recipe(steps=50, lr=0.1, schedule=schedule, warmup=0.2)
    plain = Recipe(steps=40, lr=0.1, schedule=schedule)
    assert [rate(warm, 10 + step, 50) for step in range(40)] == [rate(plain, step, 40) for step in range(40)]
    assert all(0 < rate(warm, step, 50) <= warm.lr for step in range(50))


def lamb_by_definition(start, gradients, lr, decay, adapt):
    """You et al. 2020, algorithm 2, with φ the identity, β = (0.9, 0.999), ε = 1e-6."""
    x, m, v = start.double(), torch.zeros(start.shape).double(), torch.zeros(start.shape).double()
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        r = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + decay * x
        x = x - lr * (x.norm() / r.norm() if adapt else 1.0) * r
    return x


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_lamb_follows_its_definition(decay):
    model = nn.Linear(5, 3)
    start = [p.detach().clone() for p in model.parameters()]
    recipe = Recipe(steps=4, optimizer="lamb", lr=0.02, weight_decay=decay, decay_vectors=False)
    optimizer = build_optimizer(model, recipe)
    gradients = [[10 * torch.randn(p.shape) for p in model.parameters()] for _ in range(4)]
    for step in gradients:
        for parameter, gradient in zip(model.parameters(), step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    weight, bias = zip(*gradients, strict=True)
    expected = lamb_by_definition(start[0], weight, 0.02, decay, adapt=True)
    torch.testing.assert_close(model.weight.detach().double(), expected, rtol=1e-5, atol=1e-6)
    spared = lamb_by_definition(start[1], bias, 0.02, 0.0, adapt=False)
    torch.testing.assert_close(model.bias.detach().double(), spared, rtol=1e-5, atol=1e-6)


def test_lamb_without_timm_says_what_to_install(monkeypatch):
    monkeypatch.setattr(timm, "is_installed", lambda: False)
    with pytest.raises(MissingExtra, match=r"the optimizer lamb needs timm, .*: pip install 'bitplan\[vision\]'"):
        build_optimizer(network(), Recipe(steps=1, optimizer="lamb"))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb"])
@pytest.mark.parametrize("decay_vectors", [True, False])
def test_steps_never_decay_and_vectors_only_where_the_recipe_says_so(optimizer, decay_vectors):
    model = quantized()
    recipe = Recipe(steps=9, optimizer=optimizer, lr=0.1, step_lr=0.01, weight_decay=0.5, decay_vectors=decay_vectors)
    built = build_optimizer(model, recipe)
    decay = {id(p): group["weight_decay"] for group in built.param_groups for p in group["params"]}
    set_rate_(built, recipe, 0.04)
    rates = {id(p): group["lr"] for group in built.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        is_step = name.endswith("step")
        spared = is_step or (parameter.dim() < 2 and not decay_vectors)
        assert decay[id(parameter)] == (0.0 if spared else 0.5), name
        assert math.isclose(rates[id(parameter)], 0.0004 if is_step else 0.04), name


def test_a_frozen_model_is_refused():
    with pytest.raises(InputError, match="nothing to train: every parameter is frozen"):
        build_optimizer(network().requires_grad_(False), Recipe(steps=1))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb"])
def test_nothing_moves_further_than_its_limit(optimizer):
    model = quantized()
    nn.init.zeros_(next(parameter for parameter in model.parameters() if parameter.dim() > 1))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    stepping = build_optimizer(model, Recipe(steps=1, lr=10.0, optimizer=optimizer))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with limit_moves(stepping, 0.01):
        stepping.step()
    after = {name: value.detach() for name, value in model.named_parameters()}
    moves = {name: (value - before[name]).norm() / before[name].norm() for name, value in after.items()}
    for name, value in after.items():
        if name.endswith("step") or (value.dim() > 1 and before[name].any()):
            assert moves[name] == pytest.approx(0.01, rel=1e-3), name
        elif value.dim() > 1:
            assert value.pow(2).mean().sqrt() == pytest.approx(0.01 * SMALLEST, rel=1e-3)
        elif "bias" in name:
            assert moves[name] > 0.1, name


def test_small_moves_and_no_limit_leave_the_optimizer_alone():
    for share in (0.0, 1e9):
        one, other = quantized(), quantized()
        for model, given in ((one, share), (other, 0.0)):
            stepping = build_optimizer(model, Recipe(steps=1, lr=0.01))
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            with limit_moves(stepping, given):
                stepping.step()
        torch.testing.assert_close(one.state_dict(), other.state_dict())
