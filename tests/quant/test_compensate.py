"""Compensated rounding against a dense implementation of its own, and against plain rounding."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bitplan
from bitplan.adapters.transformers import transformers
from bitplan.core.errors import InputError
from bitplan.quant.block_sequence import find_block_sequences
from bitplan.quant.convert import quantizers_of, weights_of
from bitplan.quant.moments import watching
from bitplan.quant.ptq import FittedLevels, FixedLevels, output_errors, round_compensated
from bitplan.quant.weight_groups import Grouping, fit_levels
from texts import llama

RULES = bitplan.Rules(first=None, last=None, narrow=0)
METHODS = ("groups:size=16", "groups:size=16,zeros=true", "lsq", "faq")


def correlated(samples, inputs, seed=0, rank=6):
    torch.manual_seed(seed)
    return torch.randn(samples, rank) @ torch.randn(rank, inputs) + 0.2 * torch.randn(samples, inputs)


def dense(weight, moments, nearest, damping):
    """Optimal brain quantization of one row after the other, without factors: solve for all weights that are left.

    Rounding input j to q moves the weights that are left to the least squares solution given that; nothing of it is
    shared with what is tested.
    """
    damped = moments + damping * moments.diagonal().mean() * torch.eye(len(moments), dtype=moments.dtype)
    made = weight.clone()
    for row in made:
        for place in range(len(row)):
            level = nearest(place, row)
            moved = level - row[place]
            rest = damped[place + 1 :, place + 1 :]
            row[place + 1 :] -= torch.linalg.solve(rest, damped[place + 1 :, place]) * moved if len(rest) else 0.0
            row[place] = level
    return made


@pytest.mark.parametrize(("inputs", "block"), [(12, 128), (20, 8), (21, 5)])
def test_it_equals_the_dense_one_on_fixed_levels(inputs, block):
    x = correlated(80, inputs).double()
    weight, moments = torch.randn(7, inputs, dtype=torch.float64), x.T @ x
    step = torch.rand(7, 1, dtype=torch.float64).add(0.3).expand(7, inputs)
    rows = iter(range(7))
    current = {"row": -1}

    def nearest(place, row):
        current["row"] = next(rows) if place == 0 else current["row"]
        s = step[current["row"], place]
        return (row[place] / s).clamp(-4, 3).round() * s

    expected = dense(weight, moments, nearest, 0.01)
    made = round_compensated(weight[None], moments[None], FixedLevels(step[None], -4, 3, block), damping=0.01)[0]
    assert torch.allclose(made, expected, atol=1e-9)
    plain = (weight / step).clamp(-4, 3).round() * step
    assert not torch.equal(made, plain)


@pytest.mark.parametrize("zeros", [False, True])
def test_it_equals_the_dense_one_on_levels_of_groups(zeros):
    x = correlated(80, 24).double()
    weight, moments = torch.randn(5, 24, dtype=torch.float64), x.T @ x
    levels = {}

    def nearest(place, row):
        if place % 8 == 0:
            levels["now"] = fit_levels(row[None, None, place : place + 8], 3, zeros=zeros)
        return levels["now"].nearest(row[None, None, place : place + 1], 3)[0, 0, 0]

    expected = dense(weight, moments, nearest, 0.01)
    made = round_compensated(weight[None], moments[None], FittedLevels(8, 3, zeros=zeros), damping=0.01)[0]
    assert torch.allclose(made, expected, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 6, 40])
@pytest.mark.parametrize("dead", [0, 5])
def test_it_gives_finite_levels_whatever_the_moments(rank, dead):
    x = correlated(30, 40, rank=rank)
    x[:, :dead] = 0
    weight = torch.randn(1, 6, 40)
    grid = FittedLevels(16, 2, zeros=True)
    made = round_compensated(weight, (x.T @ x)[None], grid)
    assert made.isfinite().all()
    assert torch.allclose(made[0], grid.levels.nearest(Grouping(16).cut(made[0]), 2).flatten(1)[:, :40], atol=1e-6)


class Residual(nn.Module):
    """A convolution by groups, one beside it, and linear layers that read the same."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding="same", dilation=2)
        self.depthwise = nn.Conv2d(8, 8, 3, stride=2, groups=8, padding=1, padding_mode="reflect")
        self.pointwise = nn.Conv2d(8, 12, 1)
        self.left, self.right = nn.Linear(12, 20), nn.Linear(12, 20)
        self.last = nn.Linear(20, 4)

    def forward(self, x):
        x = self.pointwise(F.relu(self.depthwise(F.relu(self.stem(x))))).mean((2, 3))
        return self.last(F.relu(self.left(x)) + self.right(x).tanh())


def images():
    torch.manual_seed(3)
    return F.interpolate(torch.randn(24, 3, 3, 3), size=(12, 12), mode="bilinear")


def network():
    torch.manual_seed(0)
    return Residual().eval()


def plan(model, example, precision="w3a16"):
    return bitplan.Plan.uniform(bitplan.trace(model, example, rules=RULES), precision)


@pytest.mark.parametrize("method", METHODS)
def test_outputs_of_no_layer_are_worse_than_rounded_and_the_network_is_better(method):
    model, x = network(), images()
    rounded = bitplan.quantize(model, plan(model, x[:1]), method=method).eval()
    made = bitplan.quantize(model, plan(model, x[:1]), method=method).eval()
    left = bitplan.compensate_(made, x.split(8))
    assert list(left) == list(plan(model, x[:1]).precisions)
    assert all(0 < share <= 1 for share in left.values())
    assert min(left.values()) < 0.6
    lost, plain = (float((one(x) - model(x)).detach().square().mean()) for one in (made, rounded))
    assert lost < plain
    before = {name: weight.clone() for name, weight in weights_of(made).items()}
    for name, both in quantizers_of(made).items():  # weights lie on levels, and every quantizer is on again
        assert both.weight.enabled
        assert torch.equal(both.weight(before[name]), before[name])


def test_moments_are_those_of_what_is_multiplied():
    """Σ(Wx)² over all outputs is the trace of WHWᵀ."""
    model, x = network(), images()
    made = bitplan.quantize(model, plan(model, x[:1], "w8a16"), method="groups:size=16").eval()
    quantizers = {name: both.weight for name, both in quantizers_of(made).items()}
    for quantizer in quantizers.values():
        quantizer.enabled = False
    sums = {}
    hooks = [
        module.register_forward_hook(
            lambda module, _, out, name=name: sums.update(
                {name: float((out - module.bias.view(1, -1, *[1] * (out.dim() - 2))).double().square().sum())}
            )
        )
        for name, module in made.named_modules()
        if name in quantizers
    ]
    with torch.no_grad(), watching(quantizers) as seen:
        made(x)
    for hook in hooks:
        hook.remove()
    for name, weight in weights_of(made).items():
        parts = seen[name].total.shape[0]
        rows = Grouping(9, seen[name].layout).rows(weight).unflatten(0, (parts, -1)).detach()
        outputs = output_errors(rows, torch.zeros_like(rows), seen[name].total).sum()
        assert float(outputs) == pytest.approx(sums[name], rel=1e-4), name


def test_blocks_that_run_one_after_the_other_give_the_same_as_whole_runs(monkeypatch):
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(10, 24), nn.Sequential(*parts), nn.Linear(24, 5)).eval()
    x = correlated(64, 10)
    chained, whole = (bitplan.quantize(model, plan(model, x[:1]), method="groups:size=8").eval() for _ in range(2))
    assert len(find_block_sequences(chained)) == 1
    first = bitplan.compensate_(chained, x.split(16))
    monkeypatch.setattr("bitplan.quant.ptq.find_block_sequences", lambda model: [])
    second = bitplan.compensate_(whole, x.split(16))
    assert first == pytest.approx(second, rel=1e-6)
    assert torch.equal(chained(x), whole(x))


class Handing(nn.Module):
    """A block that hands a sum on beside what it makes, as Mamba's do; or one that writes on what it is given."""

    def __init__(self, in_place):
        super().__init__()
        self.norm, self.linear, self.in_place = nn.LayerNorm(16), nn.Linear(16, 16), in_place

    def forward(self, x, rest=None):
        if self.in_place:
            x += self.linear(self.norm(x))
            return x, None
        rest = x if rest is None else x + rest
        return self.linear(self.norm(rest)), rest


class Handed(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 5)
        self.blocks = nn.ModuleList(Handing(in_place) for _ in range(4))

    def forward(self, x):
        x, rest = self.first(x), None
        for block in self.blocks:
            x, rest = block(x, rest)
        return self.last(x if rest is None else x + rest)


@pytest.mark.parametrize("in_place", [False, True])
def test_blocks_that_share_more_than_one_tensor_are_not_run_alone(monkeypatch, in_place):
    torch.manual_seed(0)
    model, x = Handed(in_place).eval(), correlated(64, 8)
    chosen = plan(model, x[:1], "w2a16")
    made, whole = (bitplan.quantize(model, chosen, method="groups:size=8").eval() for _ in range(2))
    assert len(find_block_sequences(made)) == 1
    first = bitplan.compensate_(made, x.split(16))
    monkeypatch.setattr("bitplan.quant.ptq.find_block_sequences", lambda model: [])
    assert first == bitplan.compensate_(whole, x.split(16))
    assert torch.equal(made(x), whole(x))


def test_quantize_does_it_at_once_and_calibrates_inputs():
    model, x = network(), images()
    made = bitplan.quantize(
        model, plan(model, x[:1], "w3a8"), method="groups:size=16", finish="compensate", batches=x.split(8)
    ).eval()
    rounded = bitplan.quantize(
        model, plan(model, x[:1], "w3a8"), method="groups:size=16", finish="round", batches=x.split(8)
    ).eval()
    lost, plain = (float((one(x) - model(x)).detach().square().mean()) for one in (made, rounded))
    assert lost < plain


def test_a_killed_call_goes_on_where_it_was(tmp_path):
    model, x = network(), images()
    whole, made = (bitplan.quantize(model, plan(model, x[:1]), method=METHODS[1]).eval() for _ in range(2))
    expected = bitplan.compensate_(whole, x.split(8))

    def stop(done, total, name):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bitplan.compensate_(made, x.split(8), store=tmp_path, progress=stop)
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(kept) == 3
    again = bitplan.quantize(model, plan(model, x[:1]), method=METHODS[1]).eval()
    assert bitplan.compensate_(again, x.split(8), store=tmp_path) == pytest.approx(expected)
    assert torch.equal(again(x), whole(x))
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.name in kept} == kept
    other = bitplan.quantize(model, plan(model, x[:1], "w4a16"), method=METHODS[1]).eval()
    bitplan.compensate_(other, x.split(8), store=tmp_path)  # of another plan nothing is taken
    assert float((other(x) - model(x)).detach().square().mean()) < float((whole(x) - model(x)).detach().square().mean())


def with_another_stem(model):
    with torch.no_grad():
        model.stem.weight.mul_(1.5).add_(0.1)
    return model


@pytest.mark.parametrize(
    ("change", "scale", "damping"),
    [(lambda model: model, 1.0, 1.0), (with_another_stem, 1.0, 0.01), (lambda model: model, -1.0, 0.01)],
)
def test_what_was_kept_for_other_settings_weights_or_batches_is_not_taken(tmp_path, change, scale, damping):
    model, x = network(), images()
    chosen = plan(model, x[:1])
    kept = bitplan.quantize(model, chosen, method=METHODS[0]).eval()
    bitplan.compensate_(kept, x.split(8), store=tmp_path, damping=0.01)
    model, batches = change(model), (x * scale).split(8)
    made, fresh = (bitplan.quantize(model, chosen, method=METHODS[0]).eval() for _ in range(2))
    bitplan.compensate_(made, batches, store=tmp_path, damping=damping)
    bitplan.compensate_(fresh, batches, damping=damping)
    weights = weights_of(fresh)
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(made).items())
    assert not torch.equal(made.last.weight, kept.last.weight)


def test_what_cannot_be_done_is_said():
    model, x = network(), images()
    with pytest.raises(InputError, match="looks at what layers read: give batches"):
        bitplan.quantize(model, plan(model, x[:1]), finish="compensate")
    with pytest.raises(InputError, match="unknown finish 'compensat'"):
        bitplan.quantize(model, plan(model, x[:1]), finish="compensat", batches=[x])
    with pytest.raises(InputError, match="its levels follow from its weights"):
        bitplan.compensate_(bitplan.quantize(model, plan(model, x[:1]), method="sawb"), [x])
    with pytest.raises(InputError, match="got no batches"):
        bitplan.compensate_(bitplan.quantize(model, plan(model, x[:1])), [])
    with pytest.raises(InputError, match="NaN or infinite"):
        bitplan.compensate_(bitplan.quantize(model, plan(model, x[:1])), [x * float("nan")])


def test_a_layer_whose_input_is_not_seen_stays_rounded_and_is_named(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(3, 8, 2), nn.Flatten(), nn.Linear(8 * 25, 6)).eval()
    x = torch.randn(8, 3, 4, 4)
    made = bitplan.quantize(model, plan(model, x[:1]), method="groups").eval()
    before = made[0].weight.clone()
    assert list(bitplan.compensate_(made, [x])) == ["2"]
    assert torch.equal(made[0].weight, before)
    assert "1 layers are only rounded, since nothing tells what they read: 0" in caplog.text


def encoder():
    """torch's own attention, which hands its weights to functions."""
    layer = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), correlated(40, 24).view(8, 5, 24)


def bert():
    library = transformers("a test")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    model = library.BertModel(library.BertConfig(vocab_size=30, max_position_embeddings=8, **sizes), False)
    return model, torch.randint(30, (8, 5))


@pytest.mark.parametrize("build", [encoder, bert])
def test_it_works_for_attention_and_linked_layers(build):
    torch.manual_seed(0)
    model, x = build()
    rules = bitplan.Rules(first=None, last=None, narrow=0).for_choices("w2a16")
    chosen = bitplan.Plan.uniform(bitplan.trace(model.eval(), x[:1], rules=rules), "w2a16")
    rounded, made = (bitplan.quantize(model, chosen, method="groups:size=8").eval() for _ in range(2))
    left = bitplan.compensate_(made, x.split(4))
    multiplied = [name for name, one in chosen.precisions.items() if one.quantizes_weights and "embedding" not in name]
    assert sorted(left) == sorted(multiplied)
    with torch.no_grad():
        outputs = [one(x) if build is encoder else one(x).last_hidden_state for one in (model, made, rounded)]
    assert (outputs[1] - outputs[0]).square().mean() < 0.8 * (outputs[2] - outputs[0]).square().mean()


def test_blocks_that_keep_keys_of_a_run_are_not_run_alone():
    """A cache that blocks are given is added to by every run: what it has from one would spoil the next."""
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        model = llama(use_cache=use_cache)
        batches = [torch.randint(32, (2, 16)) for _ in range(2)]
        plan = bitplan.Plan.uniform(bitplan.trace(model, batches[0], rules=RULES), "w3a16")
        made = bitplan.quantize(model, plan, method="groups:size=16", finish="compensate", batches=batches)
        found.append(made.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
