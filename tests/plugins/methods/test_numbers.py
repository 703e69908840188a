"""The formulas, beside what is known of them without a network."""

import itertools
import math

import numpy as np
import pytest
import torch
from relaxing import by_hand

from bitplan.core.errors import InputError
from bitplan.plugins.methods.relaxations.base import LearnedShares, Mix, as_values, used_up
from bitplan.plugins.methods.relaxations.fracbits import FracBits
from bitplan.plugins.methods.relaxations.mixture import ChoiceMixture, barrier, gumbel, lean_, pressure, prob_one
from bitplan.selection.exact import exact
from bitplan.selection.problem import Problem

AIM = by_hand([[2, 3, 4], [20, 30, 40], [4, 6, 8]], 40)


def plans(aim):
    return [picks for picks in itertools.product(range(len(aim.choices)), repeat=len(aim.groups)) if aim.fits(picks)]


def worth(values, picks):
    return float(values[range(len(picks)), list(picks)].sum())


# FracBits


def test_the_table_of_lambda_has_the_nearest_plan_as_the_best():
    draw = np.random.default_rng(0)
    for _ in range(20):
        theta = torch.tensor(draw.uniform(0, 2, (3, 1)))
        values = as_values(FracBits().values(theta, AIM))
        away = {
            picks: sum((float(level) - pick) ** 2 for level, pick in zip(theta, picks, strict=True))
            for picks in plans(AIM)
        }
        assert (values[:, 0] == 0).all()
        assert max(away, key=lambda picks: worth(values, picks)) == min(away, key=away.get)


def test_it_begins_where_the_budget_is_met_and_bitpruning_at_the_top():
    theta = FracBits().start(AIM, 0)
    assert len(set(theta.flatten().tolist())) == 1
    assert AIM.expected(FracBits().shares(theta, AIM, 0.0)).tolist() == pytest.approx([1.0], abs=1e-5)
    assert FracBits(penalty="linear").start(AIM, 0).tolist() == [[2.0]] * 3
    roomy = by_hand([[2, 3, 4]], 100)
    assert FracBits().start(roomy, 0).tolist() == [[2.0]]


@pytest.mark.parametrize("unit", [1, 1000])
def test_the_penalty_has_no_unit(unit):
    aim = by_hand((np.array(AIM.costs[0]) * unit).tolist(), 40 * unit)
    theta = torch.tensor([[1.5], [1.5], [0.5]], requires_grad=True)
    shares = FracBits().shares(theta, aim, 0.0)
    total = FracBits(weight=3.0).objective(torch.tensor(0.0), Mix(shares, aim.expected(shares), 0.0), aim)
    spent = 3.5 + 35 + 5
    assert total.item() == pytest.approx(3 * (spent / 40 - 1), rel=1e-5)
    total.backward()
    assert theta.grad.flatten().tolist() == pytest.approx([3 * each / 40 for each in (1, 10, 2)], rel=1e-5)


def test_of_several_budgets_the_one_counts_that_is_met_worst():
    loss = FracBits().objective(torch.tensor(1.0), Mix(torch.ones(1, 1), torch.tensor([0.5, 1.25]), 0.0), AIM)
    assert float(loss) == pytest.approx(1.25)


# Mixtures


def one_hot(*picks):
    return torch.nn.functional.one_hot(torch.tensor(picks), 3).float()


def test_prob_one_is_0_exactly_where_every_group_has_a_choice():
    assert float(prob_one(one_hot(0, 2, 1))) == 0
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        shares = torch.softmax(torch.randn(4, 3, generator=draw), dim=1)
        assert float(prob_one(shares)) > 0
    assert float(prob_one(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))) == 0.25


def test_the_barrier_grows_without_bound():
    heights = [float(barrier(torch.tensor([1 - 10.0**-power], dtype=torch.float64))) for power in range(13)]
    assert heights == sorted(heights)
    assert heights[0] == pytest.approx(-math.log(math.log(2)))
    assert [round(height / math.log(10)) for height in heights[3:]] == list(range(3, 13))  # −log of what is left


def test_before_a_barrier_it_begins_within_the_budget_and_is_brought_back():
    method = ChoiceMixture(style="bpnas")
    theta = method.start(AIM, 0)
    assert float(AIM.expected(method.shares(theta, AIM, 0.0))) == pytest.approx((26 / 40 + 1) / 2, abs=1e-4)
    with torch.no_grad():
        theta[1, 2] += 5
    before = theta.clone()
    method.confine_(theta, AIM)
    assert float(AIM.expected(torch.softmax(theta, 1))) <= 1 - 0.0034
    assert torch.allclose(theta - before, (theta - before)[0, 1] * torch.arange(3.0), atol=1e-4)
    again = theta.clone()
    method.confine_(theta, AIM)
    assert torch.equal(theta, again)


def test_a_barrier_with_nothing_below_it_is_refused():
    with pytest.raises(
        InputError, match=r"only the lowest choices are within it: raise the budget, or take style=ssps"
    ):
        lean_(torch.zeros(3, 3), by_hand(AIM.costs[0].tolist(), 26), room=0.5)


def test_the_pressure_of_dnas_is_1_at_the_budget_and_grows_with_the_cost():
    factors = [float(pressure(torch.tensor([share]), AIM)) for share in (0.5, 1.0, 1.5)]
    assert factors[1] == 1
    assert factors[0] < 1 < factors[2]
    assert factors[2] == pytest.approx((math.log(60) / math.log(40)) ** 0.9)


def test_temperatures_fall():
    for style, first, last in (("ssps", 1, 0.1), ("dnas", 5, 5 * math.exp(-2.25)), ("bpnas", 1, 1)):
        method = ChoiceMixture(style=style)
        assert (method.temperature(0.0), method.temperature(1.0)) == (first, pytest.approx(last))


def test_the_table_of_a_mixture_has_the_likeliest_plan_as_the_best():
    theta = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    values = as_values(ChoiceMixture(style="bpnas").values(theta, AIM))
    chances = torch.softmax(theta.double(), 1)
    assert values == pytest.approx((chances.log() - chances.log()[:, :1]).numpy())
    likely = {picks: float(chances[range(3), list(picks)].prod()) for picks in plans(AIM)}
    assert max(likely, key=likely.get) == max(likely, key=lambda picks: worth(values, picks))


def test_chances_of_dnas_are_drawn_in_training_only():
    method, theta = ChoiceMixture(style="dnas"), torch.tensor([[1.0, 0.0, 0.0]])
    torch.manual_seed(0)
    drawn = [method.shares(theta, AIM, 0.9)[0, 0].item() for _ in range(200)]
    with torch.no_grad():
        still = {method.shares(theta, AIM, 0.9)[0, 0].item() for _ in range(3)}
    assert len(set(drawn)) == 200
    assert len(still) == 1
    # By Gumbel's noise the largest is the first as often as softmax(α) says, whatever T.
    first = torch.stack([(theta + gumbel(theta)).argmax() == 0 for _ in range(2000)]).float().mean()
    assert float(first) == pytest.approx(float(torch.softmax(theta, 1)[0, 0]), abs=0.04)


def test_what_is_certain_is_fixed_for_good():
    shares = LearnedShares(ChoiceMixture(certain=0.9), AIM, torch.tensor([[5.0, 0, 0], [0, 0, 0], [0, 1.0, 0]]))
    shares.spare_([])
    shares.end_()
    assert shares.fixed.tolist() == [0, -1, -1]
    assert shares.shares()[0].tolist() == [1, 0, 0]
    assert shares.of_group(0)[1] == [True, False, False]
    shares.spare_([])
    with torch.no_grad():
        shares.theta += torch.tensor([0.0, 50.0, 0.0])
    shares.end_()
    assert shares.fixed.tolist() == [0, 1, 1]
    assert shares.theta[0].tolist() == [5, 0, 0]
    shares.objective(torch.tensor(1.0))
    assert (
        not shares.shares().requires_grad
        or torch.autograd.grad(shares.shares().sum(), shares.theta)[0].abs().sum() == 0
    )


# From what was learned to a table


def selected(values, aim):
    codes = np.rint(values * 2**20).astype(np.int64)
    return exact(Problem(aim.groups, aim.choices, codes, aim.costs, aim.capacities)).picks


def test_a_table_uses_the_budget_up_and_keeps_the_order_of_groups():
    draw = np.random.default_rng(1)
    aim = by_hand([[2, 3, 4]] * 9, 27)
    for _ in range(10):
        theta = torch.tensor(draw.uniform(0.1, 0.4, (9, 1)))  # nearest to all: every group at the lowest
        values = as_values(FracBits().values(theta, aim))
        assert selected(values, aim) == (0,) * 9
        picks = selected(used_up(values, aim), aim)
        assert aim.cost(picks)[0] == 27
    few = by_hand([[2, 3]] * 9, 21)
    values = as_values(FracBits().values(theta, few))
    raised = {place for place, pick in enumerate(selected(used_up(values, few), few)) if pick}
    assert raised == set(theta.flatten().argsort()[-3:].tolist())  # three fit: those of the greatest λ


def test_a_table_that_uses_it_up_stays_as_it_is():
    values = np.array([[0.0, 1.0, 1.5], [0.0, 2.0, 2.5], [0.0, 0.5, 3.0]])
    assert used_up(values, AIM) is values
    assert selected(
        used_up(np.zeros((3, 3)), by_hand(AIM.costs[0].tolist(), 100)), by_hand(AIM.costs[0].tolist(), 100)
    ) == (2, 2, 2)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (FracBits, {"weight": 0.0}, "fracbits: weight must be above 0, not 0"),
        (FracBits, {"rate": math.inf}, "fracbits: rate must be above 0, not inf"),
        (FracBits, {"penalty": "square"}, "fracbits: penalty is target or linear, not 'square'"),
        (FracBits, {"spend": 0.0}, "fracbits: spend is a number of passes above 0, not 0"),
        (ChoiceMixture, {"style": "darts"}, "mixture: style is one of ssps, dnas, bpnas, not 'darts'"),
        (ChoiceMixture, {"certain": 0.2}, "mixture: certain is a chance above 0.5, at most 1, not 0.2"),
    ],
)
def test_options_that_cannot_be_are_refused(kind, options, said):
    with pytest.raises(InputError, match=said):
        kind(**options)
