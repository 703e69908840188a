"""Calibration: what it looks at, what it sets, what it leaves alone."""

import math

import pytest
import torch
from torch import nn

from bitplan.core.errors import InputError
from bitplan.quant import observe
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.convert import quantize
from bitplan.quant.observe import Observation
from nets import two_convolutions


def network():
    return two_convolutions(nn.Dropout(0.5))


PLAN = {"0": "w8a8", "3": "w4a4"}
BATCHES = [torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def test_steps_and_signs_come_from_all_batches(plan):
    model = network()
    quantized = quantize(model, plan(**PLAN))
    calibrate_(quantized, BATCHES)
    seen = torch.cat(BATCHES)
    assert quantized[0].input_quantizer.range == (-128, 127)
    expected = 2 * seen.abs().mean().item() / math.sqrt(127)
    assert quantized[0].input_quantizer.step.item() == pytest.approx(expected, rel=1e-5)
    assert quantized[3].input_quantizer.range == (0, 15)
    assert quantized.training
    quantized.eval()(BATCHES[0])


def test_the_sign_is_looked_at_not_guessed_from_the_layer_before(plan):
    quantized = quantize(nn.Sequential(nn.ReLU(), nn.Hardtanh(-1, 1), nn.Linear(4, 4)), plan(**{"2": "w4a4"}))
    calibrate_(quantized, [torch.rand(3, 4)])
    assert quantized[2].input_quantizer.range == (0, 15)
    quantized = quantize(nn.Sequential(nn.Linear(4, 4)), plan(**{"0": "w4a4"}))
    calibrate_(quantized, [torch.rand(3, 4), torch.rand(3, 4), -torch.rand(3, 4)])
    assert quantized[0].input_quantizer.range == (-8, 7)


def test_the_first_training_batch_does_it_too_and_evaluation_refuses(plan):
    quantized = quantize(network(), plan(**PLAN)).eval()
    with pytest.raises(InputError, match=r"layer '0' is not set: call calibrate_"):
        quantized(BATCHES[0])
    quantized.train()(BATCHES[0])
    step = quantized[0].input_quantizer.step.item()
    quantized.train()(BATCHES[1])
    assert quantized[0].input_quantizer.step.item() == step
    assert step == pytest.approx(2 * BATCHES[0].abs().mean().item() / math.sqrt(127), rel=1e-5)


@pytest.mark.parametrize("batch", [(BATCHES[0],), [BATCHES[0]], {"input": BATCHES[0]}])
def test_batches_of_arguments(batch, plan):
    quantized = quantize(network(), plan(**PLAN))
    calibrate_(quantized, [batch])
    assert quantized[0].input_quantizer.range is not None


def test_labels_that_a_loader_gives_are_left_out_and_what_fits_no_call_is_one_line(plan):
    alone, labelled = (quantize(network(), plan(**PLAN)) for _ in range(2))
    labelled.load_state_dict(alone.state_dict())
    calibrate_(alone, BATCHES)
    calibrate_(labelled, [[batch, torch.zeros(4, dtype=torch.long)] for batch in BATCHES])
    for name, value in alone.state_dict().items():
        assert torch.equal(value, labelled.state_dict()[name]), name
    with pytest.raises(
        InputError, match=r"takes \(input\): too many positional arguments. The last part of a tuple holds labels"
    ):
        calibrate_(labelled, [(BATCHES[0], 1, 2)])


def test_a_forward_of_ones_own(plan):
    quantized = quantize(network(), plan(**PLAN))
    calibrate_(quantized, [(BATCHES[0], "label")], forward=lambda model, batch: model(batch[0]))
    assert quantized[0].input_quantizer.range is not None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_name_the_layer(bad, plan):
    quantized = quantize(network(), plan(**PLAN))
    with pytest.raises(InputError, match="layer '0' has NaN or infinite"):
        calibrate_(quantized, [torch.full((1, 2, 8, 8), bad)])
    assert quantized[0].input_quantizer.observation is None


def test_no_batches(plan):
    with pytest.raises(InputError, match="no batches"):
        calibrate_(quantize(network(), plan(**PLAN)), [])


@pytest.mark.parametrize(
    ("batches", "said"),
    [([torch.zeros(2, 2, 8, 8)] * 2, "nothing but zeros"), ([torch.zeros(0, 2, 8, 8)] * 2, "got no samples")],
)
def test_zeros_alone_and_batches_without_samples_are_refused(batches, said, plan):
    quantized = quantize(network(), plan(**PLAN))
    with pytest.raises(InputError, match=said):
        calibrate_(quantized, batches)
    assert quantized[0].input_quantizer.range is None
    calibrate_(quantized, [*batches, BATCHES[0]])
    assert quantized[0].input_quantizer.range is not None


def test_a_layer_that_reads_zeros_gets_a_usable_step(plan):
    model = network()
    nn.init.zeros_(model[1].weight)  # of the batch norm before the second convolution, as networks begin residuals
    quantized = quantize(model, plan(**PLAN))
    calibrate_(quantized, BATCHES)
    assert quantized[3].input_quantizer.step > 0
    assert quantized(BATCHES[0]).isfinite().all()


def test_words_may_all_be_the_first_one(plan):
    quantized = quantize(nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2)), plan(**{"1": "w4a4"}))
    calibrate_(quantized, [torch.zeros(2, 5, dtype=torch.long)])
    assert quantized[1].input_quantizer.range is not None


def test_batch_norm_keeps_its_statistics_unless_asked(plan):
    quantized = quantize(network(), plan(**PLAN))
    mean = quantized[1].running_mean.clone()
    calibrate_(quantized, BATCHES)
    assert torch.equal(quantized[1].running_mean, mean)
    calibrate_(quantized, iter(BATCHES), refresh_norms=True)
    quantized.eval()
    averages = [quantized[0](batch).mean(dim=(0, 2, 3)) for batch in BATCHES]
    assert torch.allclose(quantized[1].running_mean, torch.stack(averages).mean(0), atol=1e-6)
    assert quantized[1].momentum == 0.1


def test_layers_never_reached_stay_unset_and_are_named(plan, caplog):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.used(x)

    for precision in ("w4a4", "w4a16"):
        quantized = quantize(Half(), plan(used="w4a4", unused=precision))
        with pytest.raises(InputError, match=r"never ran layer unused of its plan.*--unreached warn"):
            calibrate_(quantized, [torch.randn(2, 4)])
        caplog.clear()
        calibrate_(quantized, [torch.randn(2, 4)], unreached="warn")
        assert "never ran layer unused" in caplog.text
        assert not hasattr(quantized.unused.input_quantizer, "range") or quantized.unused.input_quantizer.range is None


@pytest.mark.parametrize("kind", ["signed", "half zeros", "zeros", "denormal", "channels last"])
@pytest.mark.parametrize("percentile", [0.001, 50, 99.9, 100])
def test_percentiles_without_sorting_are_exact(kind, percentile):
    v = torch.randn(8, 16, 16, 16)
    v = {"half zeros": v.relu(), "zeros": v * 0, "denormal": v * 1e-40}.get(kind, v)
    v = v.to(memory_format=torch.channels_last) if kind == "channels last" else v
    seen = Observation(percentile)
    assert seen.add(v)
    assert v.numel() >= observe._LOOP
    rank = max(1, math.ceil(v.numel() * percentile / 100))
    assert seen.percentiles == [v.abs().flatten().kthvalue(rank).values.item()]
    assert seen.total == pytest.approx(v.abs().sum(dtype=torch.float64).item(), rel=1e-12)
    assert seen.lowest == v.min().item()


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_large_inputs_that_are_not_finite_are_noticed(odd):
    v = torch.randn(observe._LOOP + 3)
    v[-1] = odd
    assert not Observation(99.9).add(v)
    assert not Observation(None).add(v.roll(7))
