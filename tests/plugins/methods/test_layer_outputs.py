"""OMPQ, imprinting and adaptive quantization, each beside an answer that is known."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from toys import Refusing, Spans, Stripes, quantized

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.precision import parse_choices
from bitplan.core.records import Costs, Gains, Graph, Layer
from bitplan.gains.base import Context
from bitplan.gains.jobs import lowered_jobs
from bitplan.plugins.methods.adaptive import Perturb, noise_borne, row_of
from bitplan.plugins.methods.imprint import pooled
from bitplan.plugins.methods.layer_outputs import watch_activations
from bitplan.plugins.methods.ompq import importances, orthogonality

TASK = Stripes(samples=128)


@pytest.fixture(scope="module")
def start():
    torch.set_num_threads(1)
    return quantized(Stripes())


def estimate(method, start, *, choices="w2a2,w4a4", task=TASK, seed=0, store=None, engine=None, **options):
    context = Context(task=task, seed=seed, store=store, engine=engine)
    return bitplan.estimate(method, *start, choices=choices, context=context, **options)


def grams(*features):
    return np.array([x @ x.T for x in features])


# OMPQ


def test_a_rotated_and_scaled_layer_resembles_fully():
    """ORM(X, c·X·R) = 1 for orthogonal R, and for centred, orthogonal samples 0."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(20, 7)), draw.normal(size=(20, 5))
    rotation, _ = np.linalg.qr(draw.normal(size=(7, 7)))
    found = orthogonality(grams(x, -3 * x @ rotation + 1.5, y))
    assert found[0, 1] == pytest.approx(1)
    assert found.diagonal() == pytest.approx(1)
    assert 0 < found[0, 2] < 0.9
    a, b = np.array([[1.0], [-1], [1], [-1]]), np.array([[1.0], [1], [-1], [-1]])
    assert orthogonality(grams(a, b))[0, 1] == pytest.approx(0)
    assert orthogonality(grams(a, np.ones((4, 2))))[1].tolist() == [0, 0]  # the same for every sample


def test_importance_is_the_mean_over_a_layer_and_those_behind():
    resemblance = np.array([[1, 0.5, 0.1], [0.5, 1, 0.2], [0.1, 0.2, 1]])
    theta = np.exp(-2 * np.array([0.6, 0.7, 0.3]))
    expected = np.array([theta.mean(), theta[1:].mean(), theta[2]])
    assert importances(resemblance, 2.0) == pytest.approx(expected / theta.max())
    assert importances(1e4 * resemblance, 100.0)[-1] == 1  # no power of ten is lost


def test_ompq_sees_the_outputs_of_layers(start):
    model, graph = start
    gains = estimate("ompq", start, samples=16, beta=2.0, choices="w2a2,w3a3,w4a4")
    layers = [layer.name for group in graph.selectable for layer in group.layers]
    images, _ = next(iter(TASK.batches("train", 16, seed=0)))
    seen = {}
    for name in layers:
        model.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
    with torch.no_grad():
        model.eval()(images)
    for name in layers:
        model.get_submodule(name)._forward_hooks.clear()
    features = [seen[name].flatten(1).double().numpy() for name in layers]
    weights = dict(zip(layers, importances(orthogonality(grams(*features)), 2.0), strict=True))
    for group in graph.selectable:
        total = sum(weights[layer.name] for layer in group.layers)
        assert gains.rows[group.name] == pytest.approx((0, total, 2 * total), rel=1e-6)


def test_ompq_without_beta_is_uniform_and_the_order_of_samples_is_irrelevant(start):
    _, graph = start
    cost = bitplan.price("bmac", graph)
    flat, uniform = estimate("ompq", start, beta=0.0), bitplan.estimate("uniform", None, graph)
    for budget in ("60%", "75%", "90%"):
        plans = [bitplan.select(graph, one, cost, budget=budget).precisions for one in (flat, uniform)]
        assert plans[0] == plans[1]
    one, other = (estimate("ompq", start, samples=128, seed=seed).rows for seed in (1, 2))
    for name, row in one.items():
        assert row == pytest.approx(other[name], rel=1e-5)


def test_ompq_counts_bits_of_inputs_where_only_they_differ(start):
    rows = estimate("ompq", (start[0], start[1]), choices="w4a2,w4a4").rows
    assert all(row[1] > 0 for row in rows.values())


def test_ompq_takes_networks_whose_layers_are_no_modules():
    """Of an attention's packed projection it is what the attention gives out."""

    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.attention = nn.Linear(6, 8), nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            x = self.first(x.squeeze(1))
            return self.head(self.attention(x, x, x)[0].mean(1))

    model = Attending()
    graph = bitplan.trace(model, TASK.example(), rules=bitplan.Rules(narrow=0))
    gains = estimate("ompq", (model, graph))
    assert "attention.in_proj" in {layer.name for group in graph.selectable for layer in group.layers}
    assert all(row[1] > 0 for row in gains.rows.values())


# Imprinting


def identity_net():
    """A stem, a 1×1 convolution that changes nothing, another one, a classifier."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1, bias=False), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3),
        )  # fmt: skip
    with torch.no_grad():
        net[2].weight.copy_(torch.eye(8)[:, :, None, None])
    return net


def test_an_identity_gains_nothing_and_gains_add_up_to_an_accuracy():
    net = identity_net()
    bitplan.finetune_(net, TASK, bitplan.Recipe(steps=60, batch_size=16, lr=0.05))
    with torch.no_grad():
        net[2].weight.copy_(torch.eye(8)[:, :, None, None])
    graph = bitplan.trace(net, TASK.example(), rules=bitplan.Rules(narrow=0, first=None, last=None))
    gains = estimate("imprint", (net, graph), choices="w2a2,w3a3,w4a4")
    rows = {name: row[2] for name, row in gains.rows.items()}
    assert rows["2"] == 0
    assert rows["0"] > 0.1  # above chance
    assert 0.6 < 1 / 3 + sum(rows.values()) <= 1  # A of the last layer
    assert all(row[1] == pytest.approx(row[2] / 2) for row in gains.rows.values())
    assert gains.selector == "greedy"


def test_labels_that_mean_nothing_leave_chance_everywhere(start):
    @dataclasses.dataclass(frozen=True)
    class Shuffled(Stripes):
        name = "shuffled"

        def data(self, split):
            images, labels = super().data(split)
            return images, labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))]

    rows = estimate("imprint", start, task=Shuffled(samples=1536), samples=1536).rows
    assert max(abs(row[1]) for row in rows.values()) < 0.08


def test_features_are_those_behind_norms_and_activations(start):
    seen = {}
    model = start[0].eval()
    images, _ = next(iter(TASK.batches("train", 8)))
    with watch_activations(model, ["stem", "wide"], lambda name, out: seen.update({name: out})), torch.no_grad():
        model(images)
    assert all((seen[name] >= 0).all() for name in ("stem", "wide"))
    with torch.no_grad():
        assert torch.equal(seen["stem"], model.norm(model.stem(images)).relu())
    assert pooled("wide", seen["wide"], 8).shape == (8, 12 * 36)  # a side of 7 at most, and there are 6
    assert pooled("x", torch.zeros(8, 128, 9, 9), 8).shape == (8, 128 * 4)
    assert pooled("x", torch.zeros(8, 5, 20), 8).shape == (8, 20)


# Adaptive quantization


def test_a_quarter_of_the_size_adds_a_bit():
    """p·4^(−b)/(t·s) is equal for all: halving s adds half a bit, and a quarter of it a whole one."""
    choices = parse_choices(",".join(f"w{bits}a8" for bits in range(2, 9)))
    sizes = {"whole": 64, "quarter": 16, "sixteenth": 4}
    layers = tuple(Layer(name=name, kind="conv2d", macs=1, weights=size, in_features=9) for name, size in sizes.items())
    graph = Graph(model="sizes", layers=layers)
    gains = Gains(method="adaptive", choices=choices, rows=dict.fromkeys(sizes, row_of(3.0, 0.5, choices)),
                  graph=graph.id)  # fmt: skip
    rows = {name: tuple(size * one.weight_bits for one in choices) for name, size in sizes.items()}
    cost = Costs(name="memory", unit="bits", choices=choices, rows=rows, graph=graph.id)
    exactly = str(64 * 4 + 16 * 5 + 4 * 6)
    plan = bitplan.select(graph, gains, cost, budget=exactly)
    assert [plan.precisions[name].weight_bits for name in sizes] == [4, 5, 6]


def test_a_group_that_bears_twice_the_noise_gains_half():
    choices = parse_choices("w2a2,w3a3,w4a4")
    assert row_of(8.0, 2.0, choices) == pytest.approx([0, 4 * (1 / 16 - 1 / 64), 4 * (1 / 16 - 1 / 256)])
    assert row_of(8.0, 4.0, choices)[2] == pytest.approx(row_of(8.0, 2.0, choices)[2] / 2)


def test_the_noise_that_is_borne_lies_between_two_levels():
    assert noise_borne([1, 2, 4], [0, 5, 20], 5) == 2
    assert noise_borne([1, 2, 4], [0, 3, 7], 5) == pytest.approx(3)
    assert noise_borne([1, 2, 4], [10, 20, 30], 5) == pytest.approx(0.5)
    assert noise_borne([1, 2, 4], [0, 0, 1], 5) == 4
    assert noise_borne([0, 0, 0], [0, 0, 0], 5) > 0


def test_adaptive_measures_what_quantizing_a_group_moves(start):
    """p by hand: the answers with one layer's weights as they are, beside those at 4 bits."""
    model, graph = start
    job = lowered_jobs(
        "adaptive", model, graph, Context(task=TASK),
        [{"middle": parse_choices("w2a2,w4a4")[1]}], 128, 128, options={"levels": 3, "fall": 5.0},
    )[0]  # fmt: skip
    found = Perturb(model, TASK)(job)
    (images, _) = Perturb(model, TASK).drawn(job)[0]
    plan = bitplan.plan_of(model)
    plain = bitplan.quantize(model, plan.model_copy(update={"precisions": plan.precisions | {
        "middle": bitplan.Precision(weight_bits=16, act_bits=4)}})).eval()  # fmt: skip
    with torch.no_grad():
        moved = (model.eval()(images) - plain(images)).double().square().sum(dim=1).mean()
    assert found["own"][0] == pytest.approx(float(moved), rel=1e-4)


def test_adaptive_goes_on_from_its_store(start, tmp_path):
    options = {"samples": 64, "levels": 4}
    first = estimate("adaptive", start, store=tmp_path, **options)
    assert estimate("adaptive", start, store=tmp_path, engine=Refusing(), **options).id == first.id
    assert all(row[1] > 0 for row in first.rows.values())
    assert first.counts == {"passes": 6 * 4, "samples": 6 * 4 * 64}


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("ompq", {"samples": 2}, "ompq compares how samples lie to each other: give at least 3, not 2"),
        ("ompq", {"beta": -1.0}, "ompq: beta must be 0 or more, not -1"),
        ("ompq", {"task": None}, "ompq runs the network on data: give a task"),
        ("imprint", {"samples": 0}, "imprint needs at least one sample"),
        ("imprint", {"task": None}, "imprint imprints classes from labelled data: give a task"),
        ("adaptive", {"levels": 1}, "adaptive needs at least 2 levels of noise, not 1"),
        ("adaptive", {"fall": 0.0}, "adaptive: fall is a loss of score above 0, not 0"),
    ],
)
def test_what_cannot_work_is_one_line(start, method, options, said):
    with pytest.raises(InputError, match=said) as caught:
        estimate(method, start, **options)
    assert "\n" not in str(caught.value)


def test_other_models_and_tasks_are_refused(start):
    with pytest.raises(InputError, match="imprint runs the network, so it needs the model itself, not only its graph"):
        estimate("imprint", (None, start[1]))
    task = bitplan.task(train=[(torch.zeros(4, 1, 6, 6), torch.zeros(4, 2))], loss=lambda *_: 0.0)
    with pytest.raises(InputError, match="imprint imprints classes: it needs batches of inputs and labels"):
        estimate("imprint", start, task=task)
    spans = quantized(Spans(), train=False)
    with pytest.raises(InputError, match="has no score for a batch"):
        estimate("adaptive", spans, task=Spans())


@pytest.mark.parametrize("method", ["ompq", "imprint", "adaptive", "drift", "drop", "fisher"])
def test_a_checkpoint_that_was_only_loaded_says_the_same(start, tmp_path, method):
    """Its first run proves the plan, by a copy without data, which nobody must take for the network."""
    model, graph = start
    bitplan.save_checkpoint(model, tmp_path / "saved")
    loaded = bitplan.load_checkpoint(tmp_path / "saved", type(model)())
    options = {"samples": 64} | ({"levels": 2} if method == "adaptive" else {})
    assert estimate(method, (loaded, graph), **options).rows == estimate(method, start, **options).rows
