"""Curvature against the exact Hessian of a tiny network."""

import copy

import pytest
import torch
from curves import Net, Points, made
from torch.func import functional_call
from torch.nn.utils import parametrizations

from bitplan.core.errors import InputError
from bitplan.gains.curvature import Data, draw_signs, estimate_eigenvalues, estimate_traces, open_curvature

LAYERS = ("middle", "more")


def exact_blocks(model, task, data, layers=LAYERS):
    """Each layer's block of the Hessian of the mean loss, by torch.autograd.functional."""
    model = copy.deepcopy(model).eval()
    blocks = {}
    for layer in layers:
        weight = dict(model.named_parameters())[f"{layer}.weight"].detach()

        def loss(flat, layer=layer, weight=weight):
            def answer(x):
                return functional_call(model, {f"{layer}.weight": flat.view(weight.shape)}, (x,))

            losses = [size * task.loss(answer(b["x"]), b) for b, size in zip(data.batches, data.sizes, strict=True)]
            return sum(losses) / data.samples

        blocks[layer] = torch.autograd.functional.hessian(loss, weight.flatten())
    return blocks


@pytest.fixture(scope="module")
def network():
    return made()[0]


@pytest.mark.parametrize("batch_size", [24, 7])
@pytest.mark.parametrize("quantized", [False, True], ids=["float", "quantized"])
def test_traces_lie_within_their_errors_of_the_exact_ones(quantized, batch_size):
    model, task = made(quantized=quantized)[0], Points()
    data = Data.draw(task, 24, batch_size, 0)
    blocks = exact_blocks(model, task, data)
    with open_curvature(model, task, data, LAYERS) as curve:
        found = estimate_traces(curve, probes=200, least=200, tolerance=0, seed=1)
    for layer, block in blocks.items():
        exact = float(block.trace())
        assert abs(found.values[layer] - exact) < 2 * found.errors[layer], layer
        assert found.errors[layer] < 0.15 * abs(exact)


def test_errors_are_honest(network):
    """Of many independent estimates about 95 % lie within two standard errors."""
    task = Points()
    data = Data.draw(task, 24, 24, 0)
    exact = {layer: float(block.trace()) for layer, block in exact_blocks(network, task, data).items()}
    inside = []
    with open_curvature(network, task, data, LAYERS) as curve:
        for seed in range(30):
            found = estimate_traces(curve, probes=24, least=24, tolerance=0, seed=seed)
            inside += [abs(found.values[layer] - exact[layer]) < 2 * found.errors[layer] for layer in LAYERS]
    assert 0.85 <= sum(inside) / len(inside) <= 1.0


def test_the_sum_over_layers_is_the_hand_made_total_for_the_same_probes(network):
    task = Points()
    data = Data.draw(task, 24, 24, 0)
    with open_curvature(network, task, data, LAYERS) as curve:
        found = estimate_traces(curve, probes=6, least=6, tolerance=0, seed=3)
        weights = list(curve.weights.values())
        loss = task.loss(network(data.batches[0]["x"]), data.batches[0])
        grads = torch.autograd.grad(loss, weights, create_graph=True)
        total = 0.0
        for number in range(6):
            signs = draw_signs(weights, 3, number)
            products = torch.autograd.grad(grads, weights, signs, retain_graph=True)
            total += float(sum((v * hv).sum() for v, hv in zip(signs, products, strict=True))) / 6
    assert sum(found.values.values()) == pytest.approx(total, rel=1e-5)


def test_batches_give_the_same_as_one_large_batch(network):
    task, found = Points(), []
    for batch_size in (24, 24 // 4, 5):
        with open_curvature(network, task, Data.draw(task, 24, batch_size, 0), LAYERS) as curve:
            found.append(estimate_traces(curve, probes=4, least=4, tolerance=0, seed=0).values)
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[2] == pytest.approx(found[0], rel=1e-4)


def test_a_tolerance_stops_early_and_zero_does_not(network):
    task = Points()
    with open_curvature(network, task, Data.draw(task, 24, 24, 0), LAYERS) as curve:
        loose = estimate_traces(curve, probes=400, least=20, tolerance=0.1, seed=0)
        assert 20 <= loose.probes < 400
        assert all(loose.errors[layer] <= 0.1 * abs(loose.values[layer]) for layer in LAYERS)
        assert estimate_traces(curve, probes=30, least=20, tolerance=0, seed=0).probes == 30
        assert estimate_traces(curve, probes=400, least=20, tolerance=1e9, seed=0).probes == 20


def test_power_iteration_finds_the_largest_eigenvalues(network):
    task = Points()
    data = Data.draw(task, 24, 10, 0)
    with open_curvature(network, task, data, LAYERS) as curve:
        found, _ = estimate_eigenvalues(curve, iterations=200, tolerance=1e-6, seed=0)
    for layer, block in exact_blocks(network, task, data).items():
        eigenvalues = torch.linalg.eigvalsh(block)
        largest = float(eigenvalues[eigenvalues.abs().argmax()])
        assert found[layer] == pytest.approx(largest, rel=1e-3)


def test_everything_is_as_it_was_afterwards_even_after_an_error(network):
    model = copy.deepcopy(network).train()
    model.middle.weight.requires_grad_(False)
    model.norm.eval()
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    before = copy.deepcopy(model.state_dict())

    def interrupt(*_):
        raise KeyError

    with pytest.raises(KeyError), open_curvature(model, Points(), Data.draw(Points(), 8, 8, 0), LAYERS) as curve:
        estimate_traces(curve, probes=2, least=2, tolerance=0, seed=0, progress=interrupt)
    assert flags == {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_parametrized_weight_has_the_curvature_of_the_plain_one(network):
    task = Points()
    data = Data.draw(task, 24, 24, 0)
    wrapped = copy.deepcopy(network)
    parametrizations.weight_norm(wrapped.middle)
    found = []
    for model in (network, wrapped):
        with torch.no_grad(), open_curvature(model, task, data, LAYERS) as curve:
            found.append(estimate_traces(curve, probes=3, least=3, tolerance=0, seed=0).values)
    assert found[1] == pytest.approx(found[0], rel=1e-4)


class Attending(Net):
    def forward(self, x):
        x = torch.tanh(self.stem(x))
        heads = self.middle(x)[:, None, None]
        x = torch.nn.functional.scaled_dot_product_attention(heads, heads.flip(0), heads)
        return self.head(self.more(x[:, 0, 0]))


def test_attention_is_differentiated_twice():
    model, task = made(Attending)[0], Points()
    data = Data.draw(task, 24, 24, 0)
    exact = exact_blocks_of_attention(model, task, data)
    with open_curvature(model, task, data, LAYERS) as curve:
        found = estimate_traces(curve, probes=100, least=100, tolerance=0, seed=1)
    for layer in LAYERS:
        assert abs(found.values[layer] - float(exact[layer].trace())) < 3 * found.errors[layer] + 1e-6


def exact_blocks_of_attention(model, task, data):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return exact_blocks(model, task, data)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * 2


class Rough(Net):
    def forward(self, x):
        return super().forward(Once.apply(self.more(torch.tanh(self.middle(torch.tanh(self.stem(x)))))))


def test_what_cannot_be_differentiated_twice_is_said():
    with (
        pytest.raises(InputError, match="not twice differentiable.*once_differentiable"),
        open_curvature(Rough(), Points(), Data.draw(Points(), 8, 8, 0), LAYERS) as curve,
    ):
        estimate_traces(curve, probes=2, least=2, tolerance=0, seed=0)


class Distant(Net):
    def forward(self, x):
        x = self.more(torch.tanh(self.middle(torch.tanh(self.stem(x)))))
        return self.head(torch.cdist(x, x.flip(1), p=1.0)[:, :4])


def test_what_torch_itself_cannot_differentiate_twice_is_said():
    with (
        pytest.raises(InputError, match="cannot be differentiated twice.*_cdist_backward"),
        open_curvature(Distant(), Points(), Data.draw(Points(), 8, 8, 0), LAYERS) as curve,
    ):
        estimate_traces(curve, probes=2, least=2, tolerance=0, seed=0)


def test_a_layer_that_the_loss_does_not_reach_has_no_curvature(network):
    model = copy.deepcopy(network)
    model.apart = torch.nn.Linear(3, 3)
    with open_curvature(model, Points(), Data.draw(Points(), 8, 8, 0), ("more", "apart")) as curve:
        found = estimate_traces(curve, probes=2, least=2, tolerance=0, seed=0)
    assert found.values["apart"] == found.errors["apart"] == 0
    assert found.values["more"] != 0


def test_fewer_samples_than_asked_for_and_none():
    assert Data.draw(Points(), 1000, 7, 0).sizes == (7, 7, 7, 3)
    assert Data.draw(Points(), 10, 7, 0).sizes == (7, 7)
    assert Data.draw(Points(), 5, 7, 0).sizes == (5,)
    for samples, batch_size in ((1000, 7), (10, 7), (5, 7)):
        data = Data.draw(Points(), samples, batch_size, 0)
        assert tuple(len(batch["x"]) for batch in data.batches) == data.sizes
    with pytest.raises(InputError, match="training split of task points is empty"):
        Data.draw(Points(samples=0), 10, 7, 0)
