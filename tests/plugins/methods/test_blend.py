"""Several precisions at once: where one has all, it is that precision's network, exactly; between them, a mixture."""

import copy

import pytest
import torch
from relaxing import CHOICES, Given, Rows, aimed, by_hand, members, mixed, started
from torch import nn

import bitplan
from bitplan.core.precision import parse_choices
from bitplan.gains.lowering import layers_of, lower
from bitplan.plugins.methods.relaxations.base import LearnedShares
from bitplan.plugins.methods.relaxations.fracbits import FracBits, between
from bitplan.quant.blend import SHARES, Blend, Shares, blended, shares_of
from bitplan.quant.parameters import parameter_groups
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer

INPUT = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def start():
    return started()


def at(start, picks, choices=CHOICES):
    model, graph = start
    names = [group.name for group in graph.selectable]
    return lower(model, layers_of(graph, {name: choices[pick] for name, pick in zip(names, picks, strict=True)}))


def one_hot(picks, choices=CHOICES):
    return torch.nn.functional.one_hot(torch.tensor(picks), len(choices)).float()


@pytest.mark.parametrize("picks", [(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (2, 0, 1, 0)])
@pytest.mark.parametrize("method", ["lsq", "pact", "q8bert", "n2uq"])
def test_where_one_choice_has_all_it_is_the_network_of_that_plan(start, picks, method):
    model, graph = start
    other = bitplan.quantize(model, bitplan.plan_of(model), method=method)
    bitplan.calibrate_(other, [INPUT])
    with torch.no_grad():
        made = mixed((other, graph), one_hot(picks)).eval()(INPUT)
        planned = at((other, graph), picks).eval()(INPUT)
    assert torch.equal(made, planned)


@pytest.mark.parametrize(
    ("choices", "top"), [("w2a8,w4a8,w8a8", "w8a8"), ("w2a16,w4a16", "w4a16"), ("w4a4,w4a16,w16a16", "w16a16")]
)
def test_choices_that_share_bits_share_a_grid_and_16_is_none(choices, top):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    graph = bitplan.trace(net, torch.zeros(1, 6), rules=bitplan.Rules(narrow=0))
    model, x = bitplan.quantize(net, bitplan.Plan.uniform(graph, top)), torch.randn(4, 6)
    bitplan.calibrate_(model, [x])
    precisions = parse_choices(choices)
    for pick in range(len(precisions)):
        rows = one_hot([pick] * len(graph.selectable), precisions)
        made, planned = mixed((model, graph), rows, precisions), at((model, graph), [pick] * len(rows), precisions)
        for blend in [module for module in made.modules() if isinstance(module, Blend)]:
            assert len(blend.grids) == len(set(blend.place)) > 1
        assert torch.equal(made.train()(x), planned.train()(x))  # in which inputs that were left alone get their steps


def test_between_choices_every_tensor_is_the_mixture(start):
    rows = torch.tensor([0.2, 0.5, 0.3]).expand(4, 3)
    made, seen = mixed(start, rows), []
    (blend,) = {module for name, module in made.named_modules() if name == "wide.weight_quantizer"}
    blend.register_forward_hook(lambda module, given, out: seen.append((given[0], out)))
    made(INPUT)
    ((weight, out),) = seen
    expected = sum(share * grid(weight) for share, grid in zip((0.2, 0.5, 0.3), blend.grids, strict=True))
    assert torch.allclose(out, expected)
    assert [grid.bits for grid in blend.grids] == [2, 3, 4]


def test_linked_layers_have_one_blend_of_inputs_and_weights_of_their_own(start):
    made = mixed(start, one_hot([0] * 4))
    assert made.left.input_quantizer is made.right.input_quantizer
    assert made.left.weight_quantizer is not made.right.weight_quantizer
    assert made.left.weight_quantizer.group == made.right.weight_quantizer.group
    assert isinstance(made.stem.weight_quantizer, WeightQuantizer)  # what is not chosen is as it was
    names = [name for name in made.state_dict() if "input_quantizer" in name and ("left" in name or "right" in name)]
    assert not any("right" in name for name in names)  # a file has them once
    made.load_state_dict(copy.deepcopy(made.state_dict()))


def test_one_choice_is_plain_training(start):
    """Bit for bit, over some steps."""
    model, graph = start
    recipe = bitplan.Recipe(steps=4, batch_size=16, lr=0.05)
    alone = blended(model, members(graph), CHOICES[-1:], Given(torch.ones(4, 1)))
    plain = copy.deepcopy(model)
    for one in (alone, plain):
        bitplan.finetune_(one, Rows(), recipe)
    state = plain.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in alone.state_dict().items())


def test_a_whole_lambda_is_the_plain_quantizer_and_learns_there_too(start):
    """Bit for bit; and the slope of λ at a whole number is what is one choice above less what is there."""
    model, graph = start
    aim = aimed(graph)
    for level in (0.0, 1.0, 2.0):
        shares = LearnedShares(FracBits(), aim, torch.full((4, 1), level))
        made = blended(model, members(graph), CHOICES, shares).eval()
        planned = at(start, [int(level)] * 4).eval()
        assert torch.equal(made(INPUT), planned(INPUT))
        made(INPUT).square().sum().backward()
        assert bool((shares.theta.grad != 0).all())


@pytest.mark.parametrize("where", ["middle.weight_quantizer", "middle.input_quantizer"])
@pytest.mark.parametrize("level", [0.3, 1.0, 1.6])
def test_the_gradient_of_lambda_is_that_of_finite_differences(start, where, level):
    """Of what one blend makes, in double precision: behind it others round, where no difference is a gradient."""
    model, graph = start
    shares = LearnedShares(FracBits(), aimed(graph), torch.full((4, 1), level))
    made = blended(model, members(graph), CHOICES, shares).double().eval()
    blend, v = made.get_submodule(where), made.wide.weight.detach().abs() + 0.1

    def loss():
        return blend(v).square().sum()

    loss().backward()
    slopes, small, ends = shares.theta.grad.clone(), 1e-6, []
    for move in (2 * small, 0.0):  # to one side, as at a whole number the other one has another slope
        with torch.no_grad():
            shares.theta[blend.group] = level + move
            ends.append(float(loss()))
    assert float(slopes[blend.group]) == pytest.approx((ends[0] - ends[1]) / (2 * small), rel=1e-4)
    assert bool((slopes[torch.arange(4) != blend.group] == 0).all())


def test_an_embedding_and_attention_are_mixed():
    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.words = nn.Embedding(7, 8), nn.Embedding(9, 8)
            self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

        def forward(self, x):
            x = self.first(x) + self.words(x)
            mask = torch.triu(torch.full((4, 4), -torch.inf), 1)
            return self.head(self.attention(x, x, x, attn_mask=mask)[0])

    torch.manual_seed(0)
    net, x = Reading(), torch.tensor([[1, 2, 0, 5], [3, 3, 6, 4]])
    graph = bitplan.trace(net, x, rules=bitplan.Rules(narrow=0))
    model = bitplan.quantize(net, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(model, [x])
    groups = len(graph.selectable)
    assert groups > 1
    with torch.no_grad():
        low = mixed((model, graph), one_hot([0] * groups)).eval()(x)
        half = mixed((model, graph), torch.full((groups, 3), 1 / 3)).eval()(x)
        assert torch.equal(low, at((model, graph), [0] * groups).eval()(x))
    assert bool(half.isfinite().all())
    assert not torch.equal(half, low)


def test_shares_have_an_optimizer_group_to_themselves(start):
    model, graph = start
    shares = LearnedShares(FracBits(rate=0.7), aimed(graph), torch.ones(4, 1))
    made = blended(model, members(graph), CHOICES, shares)
    groups = {group["name"]: group for group in parameter_groups(made, lr=0.1, weight_decay=0.01)}
    own = groups[SHARES]
    assert own["params"] == [shares.theta]
    assert (own["lr"], own["weight_decay"], own["momentum"]) == (0.7, 0.0, 0.0)
    others = [parameter for name, group in groups.items() if name != SHARES for parameter in group["params"]]
    assert not any(parameter is shares.theta for parameter in others)
    assert {id(parameter) for parameter in made.parameters()} == {id(one) for one in [*others, shares.theta]}
    steps = {id(parameter) for parameter in groups["steps"]["params"]}
    grids = [module for module in made.modules() if isinstance(module, WeightQuantizer | InputQuantizer)]
    assert steps == {id(grid.step) for grid in grids}


def test_a_network_without_shares_learns_none(start):
    assert type(shares_of(start[0])) is Shares
    assert not shares_of(start[0]).learns


def test_neighbours_are_between():
    aim = by_hand([[2, 3, 4]] * 4, 12)
    shares = between(torch.tensor([[0.0], [0.25], [1.0], [2.0]]), aim)
    assert shares.tolist() == [[1, 0, 0], [0.75, 0.25, 0], [0, 1, 0], [0, 0, 1]]
