"""Fisher: expected rises of the loss from gradients of single samples, beside the same computed by hand."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import Pixels, Spans, Stripes, quantized

import bitplan
from bitplan.core.codes import code_range
from bitplan.core.errors import InputError
from bitplan.gains.base import Context
from bitplan.gains.curvature import Data, open_curvature
from bitplan.gains.fisher import draw_loss, watch_slopes
from bitplan.quant.convert import quantizers_of

TASK = Stripes(samples=48)
ALL = bitplan.Rules(first=None, last=None, narrow=0)


@pytest.fixture(scope="module")
def start():
    torch.set_num_threads(1)
    return quantized(Stripes())


def fisher(start, choices="w2a2,w4a4", seed=0, task=TASK, **options):
    return bitplan.estimate("fisher", *start, choices=choices, context=Context(task=task, seed=seed), **options)


def by_hand(model, graph, choices):
    """1/(2N)·Σ_n ⟨∇ℓ_n, change⟩² for each group, gradients by the tensors that quantizers give out, the task's loss."""
    network = bitplan.quantize(model, bitplan.plan_of(model)).eval()
    low = bitplan.Precision.parse(choices.split(",")[0])
    ((images, labels),) = TASK.batches("train", TASK.samples)
    expected = {}
    for group in graph.selectable:
        quantizers = {}
        for layer in group.layers:
            found = quantizers_of(network)[layer.name]
            quantizers |= {id(found.weight): (found.weight, low.weight_bits)}
            quantizers |= {id(one): (one, low.act_bits) for one in found.inputs}
        given, handles = [], []
        for quantizer, bits in quantizers.values():

            def keep(module, arguments, out, bits=bits, given=given):
                low, high = code_range(bits, signed=module.range[0] < 0)
                step = module.step.detach() * 2.0 ** (module.bits - bits)
                lowered = (arguments[0].detach() / step).round().clamp(low, high) * step
                leaf = out if out.requires_grad else out.detach().requires_grad_()
                given.append((leaf, lowered - out.detach()))
                return leaf

            handles.append(quantizer.register_forward_hook(keep))
        total = 0.0
        for image, label in zip(images, labels, strict=True):
            given.clear()
            loss = F.cross_entropy(network(image[None]), label[None])
            grads = torch.autograd.grad(loss, [leaf for leaf, _ in given])
            total += sum(float((grad * change).sum()) for grad, (_, change) in zip(grads, given, strict=True)) ** 2
        for handle in handles:
            handle.remove()
        expected[group.name] = total / (2 * len(labels))
    return expected


def test_it_is_the_mean_square_of_slopes_of_single_samples(start):
    gains = fisher(start, labels="task", samples=48, part=16)
    expected = by_hand(*start, "w2a2,w4a4")
    for group, row in gains.rows.items():
        assert row == pytest.approx((0, expected[group]), rel=1e-4)
    assert gains.counts == {"passes": 3, "samples": 48, "batches": 3}
    assert all(error[1] > 0 for error in gains.errors.values())


@dataclass(frozen=True)
class Points(Stripes):
    """The same images for a linear softmax regression."""

    def forward(self, model, batch):
        return model(batch[0].flatten(1))


def test_labels_from_the_model_give_the_hessian_of_a_softmax_regression():
    """Linear softmax regression: ½ΔᵀHΔ, the mean over labels being taken exactly."""
    torch.manual_seed(0)
    float_model, task = nn.Sequential(nn.Linear(36, 3)).double(), Points(samples=24)
    images, labels = next(iter(task.batches("train", 24)))
    graph = bitplan.trace(float_model, images[:1].flatten(1).double(), rules=ALL)
    model = bitplan.quantize(float_model, bitplan.Plan.uniform(graph, "w4a16")).eval()
    quantizer, weight = quantizers_of(model)["0"].weight, model[0].weight
    step = quantizer.step.detach()
    change = ((weight / (4 * step)).round().clamp(-2, 1) * 4 * step - quantizer(weight)).detach()
    data = Data(batches=((images.double(), labels),), sizes=(24,))
    with open_curvature(model, task, data, ["0"]) as curve:
        ((_, grads),) = curve.gradients()
        (product,) = curve.product(grads, [change])
        exact = 0.5 * float((product * change).sum())
    model.requires_grad_(False)
    total = 0.0
    lower = (bitplan.Precision.parse("w2a16"),)
    with watch_slopes(model, {"0": ("0",)}, lower) as towards:
        for image in images.double():
            for label in range(3):
                scores = model(image.flatten()[None])
                chance = scores.detach().softmax(1)[0, label]
                total += float(chance) * towards(F.cross_entropy(scores, torch.tensor([label]))).item() ** 2
    # The straight-through gradient is that of the weight itself where nothing is cut off.
    inside = (weight / step).abs().le(7).all()
    assert bool(inside)
    assert total / (2 * 24) == pytest.approx(exact, rel=1e-6)


def test_weights_that_the_lower_choice_has_too_gain_nothing():
    torch.manual_seed(0)
    model, task = nn.Sequential(nn.Linear(36, 3)), Points(samples=8)
    graph = bitplan.trace(model, torch.zeros(1, 36), rules=ALL)
    start = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a16"))
    with torch.no_grad():
        step = quantizers_of(start)["0"].weight.step
        start[0].weight.copy_(4 * step * torch.randint(-2, 2, (3, 36)))
    assert fisher((start, graph), "w2a16,w4a16", task=task, samples=8).rows == {"0": (0, 0)}
    with torch.no_grad():
        start[0].weight[0, 0] = 3 * step
    assert fisher((start, graph), "w2a16,w4a16", task=task, samples=8).rows["0"][1] > 0


def test_constants_on_all_answers_do_not_matter(start):
    class Shifted(Stripes):
        def forward(self, model, batch):
            return super().forward(model, batch) + 100.0

        def logits(self, outputs):
            return (outputs,)

    plain, shifted = (
        fisher(start, task=kind(samples=32), samples=32, part=16, labels="task").rows for kind in (Stripes, Shifted)
    )
    for group, row in plain.items():
        assert shifted[group] == pytest.approx(row, rel=1e-3)


def test_labels_from_the_model_look_at_none_and_follow_the_seed(start):
    class Unlabelled(Stripes):
        def loss(self, outputs, batch):
            raise AssertionError("looked at a label")

        batch_score = loss

    model, _ = start
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, again, other = (fisher(start, task=Unlabelled(samples=48), samples=24, seed=seed) for seed in (0, 0, 1))
    assert first.id == again.id != other.id
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(row[1] > 0 for row in first.rows.values())


def test_several_answers_of_a_sample_are_a_mean():
    """Squared gradients by drawn labels have the mean of a loss that is a mean over pixels."""
    scores = torch.randn(1, 3, 4, requires_grad=True)
    p = scores.detach().softmax(1)
    found = torch.zeros(4)
    for seed in range(2000):
        (grad,) = torch.autograd.grad(draw_loss((scores,), seed), scores)
        found += grad[0, 0] ** 2 / 2000
    assert found.numpy() == pytest.approx((p * (1 - p))[0, 0].numpy() / 4, rel=0.2)


@pytest.mark.parametrize("task", [Pixels, Spans])
def test_it_works_for_pixels_and_spans(task):
    torch.set_num_threads(1)
    made = quantized(task())
    gains = fisher(made, task=task(samples=32), samples=16, part=8, choices="w2a2,w3a3,w4a4")
    for row in gains.rows.values():
        assert row[0] == 0
        assert np.isfinite(row[1])
        assert row[2] > 0


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"labels": "people"}, "labels from the model or from the task, not from 'people'"),
        ({"samples": 0}, "at least one sample"),
        ({"choices": "w2a2,w4a16"}, "w2a2 changes about inputs, which w4a16 leaves alone"),
        ({"task": None}, "give a task"),
    ],
)
def test_what_cannot_be_is_said(start, options, line):
    if options.get("choices"):
        model, graph = start
        model = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a16"))
        start = model, graph
    with pytest.raises(InputError, match=line):
        fisher(start, **options)


def test_a_killed_estimate_goes_on(start, tmp_path):
    context = Context(task=TASK, store=tmp_path)
    whole = bitplan.estimate("fisher", *start, context=context, samples=24, part=8)
    kept, *lost = sorted(tmp_path.rglob("*.json"))
    assert len(lost) == 2
    for path in lost:
        path.unlink()
    before = kept.stat().st_mtime_ns
    assert bitplan.estimate("fisher", *start, context=context, samples=24, part=8).rows == whole.rows
    assert kept.stat().st_mtime_ns == before
    assert sorted(tmp_path.rglob("*.json")) == [kept, *lost]
