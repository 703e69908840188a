"""LSQ against its published formulas, element by element, and against its own properties."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.core.codes import code_range
from bitplan.quant.lsq import FLOOR, codes, first_scale, lsq, positive_scale

RANGES = [(bits, signed) for bits in (2, 4, 8) for signed in (True, False)]
WAYS = pytest.mark.parametrize("way", ["loop", "torch"])


def by(way, *arguments, **options):
    """Quantize by the loop on a CPU, or by torch's operations, which other devices use."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "torch":
            patch.setattr("bitplan.quant.lsq._fits_loop", lambda *_: False)
        return lsq(*arguments, **options)


def published(v, s, low, high):
    """Equations 1, 3 and 5 of the LSQ paper for one number, in plain Python floats."""
    ratio = v / s
    code = round(min(max(ratio, low), high))  # Python rounds half to even, as torch does
    if ratio <= low:
        return code * s, 0.0, float(low)
    if ratio >= high:
        return code * s, 0.0, float(high)
    return code * s, 1.0, code - ratio


def interesting_values(s, low, high):
    """Ends of the range exactly and one step of floating point beside them, ties, zeros, far outside."""
    points = [
        low,
        high,
        0.0,
        -0.0,
        0.5,
        1.5,
        -0.5,
        low + 0.5,
        high - 0.5,
        3 * low - 1,
        3 * high + 1,
        0.3,
        1.7,
    ]
    exact = torch.tensor(points, dtype=torch.float32) * s
    up = torch.nextafter(exact, torch.full_like(exact, math.inf))
    return torch.cat(
        [exact, up, torch.nextafter(exact, torch.full_like(exact, -math.inf)), torch.randn(200) * s * high]
    )


@pytest.mark.parametrize("path", ["torch", "loop", "twice differentiable", "one step per element"])
@pytest.mark.parametrize(("bits", "signed"), RANGES)
def test_value_and_both_gradients_are_the_published_ones(bits, signed, path):
    low, high = code_range(bits, signed)
    s = 0.25  # a power of two: ratios are exact, so the ends are hit exactly
    count = 65  # one row of the loop and one element of its rest
    for v in interesting_values(s, low, high).tolist():
        x = torch.full((count,), v, requires_grad=True)
        step = torch.full((count,) if path == "one step per element" else (), s, requires_grad=True)
        y = by(path, x, step, low, high)
        upstream = torch.full((count,), 3.0)
        of_x, of_step = torch.autograd.grad(y, (x, step), upstream, create_graph=path == "twice differentiable")
        value, slope, step_slope = published(v, s, low, high)
        assert y.tolist() == [value] * count, v
        assert of_x.tolist() == [3.0 * slope] * count, v
        total = 3.0 * step_slope * (1 if step.dim() else count)
        assert of_step.flatten().tolist() == pytest.approx([total] * step.numel(), rel=1e-5, abs=1e-7), v


@WAYS
def test_ends_of_the_range_count_as_outside(way):
    v = torch.tensor([-8.0, 7.0, -7.999, 6.999], requires_grad=True)
    step = torch.tensor(1.0, requires_grad=True)
    by(way, v, step, -8, 7).backward(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert v.grad.tolist() == [0, 0, 0, 0]
    assert step.grad.item() == -8 + 7


@WAYS
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        *((shape, torch.contiguous_format) for shape in [(7,), (3, 5, 4, 4), (64, 33), (2, 3, 300, 301)]),
        *((shape, torch.channels_last) for shape in [(3, 5, 4, 4), (2, 3, 300, 301)]),
    ],
)
def test_gradients_of_whole_tensors_are_sums_of_the_published_ones(shape, layout, way):
    v = torch.randn(shape).to(memory_format=layout).requires_grad_()
    grad = torch.randn(shape)
    step = torch.tensor(0.137, requires_grad=True)
    y = by(way, v, step, -8, 7, 0.5)
    y.backward(grad)
    ratio = (v / step).detach()
    inside = (ratio > -8) & (ratio < 7)
    slope = torch.where(inside, ratio.round() - ratio, ratio.clamp(-8, 7))
    assert torch.equal(y, ratio.clamp(-8, 7).round() * step)
    assert y.stride() == v.stride()
    assert torch.equal(v.grad, grad * inside)
    expected = 0.5 * (grad.double() * slope.double()).sum()
    spread = (grad.double() * slope.double()).abs().sum()
    assert abs(step.grad.double() - expected) < 1e-6 * spread


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 2, 3, 1), (3, 1, 2, 0)])
@pytest.mark.parametrize("shape", [(3, 40, 4, 32), (1, 40, 1, 8), (2, 300, 4, 64)])
def test_the_loop_and_torch_agree_on_transposed_tensors(shape, order, masked):
    """As queries, keys and values are; gradients come as they lie, otherwise, or as one number for all."""
    v = torch.randn(shape).permute(order)
    v = torch.where(v < -2, -6000.0, v) if masked else v
    for grad in (torch.randn(shape).permute(order), torch.randn(v.shape), torch.tensor(0.7).expand(v.shape)):
        found, before = [], grad.clone()
        for way in ("torch", "loop"):
            x, step = v.clone().requires_grad_(), torch.tensor(-0.3, requires_grad=True)
            assert x.stride() == v.stride()
            y = by(way, x, step, -8, 7, 0.5, masked=masked)
            found.append((y.detach(), *torch.autograd.grad(y, (x, step), grad)))
        (y, of_x, of_step), (loop_y, loop_of_x, loop_of_step) = found
        assert torch.equal(y, loop_y)
        assert loop_y.stride() == v.stride()
        assert torch.equal(of_x, loop_of_x)
        assert loop_of_step.item() == pytest.approx(of_step.item(), rel=1e-4, abs=1e-3)
        assert torch.equal(grad, before)


@WAYS
def test_codes_come_from_division_not_from_a_reciprocal(way):
    step = torch.tensor(0.1)
    v = (torch.arange(-127, 127).double() + 0.5).mul(0.1).float()  # near ties, where a reciprocal goes wrong
    exact = (v / step).round().clamp(-128, 127)
    assert torch.equal(codes(v, step, -128, 127), exact)
    assert torch.equal(by(way, v, step, -128, 127), exact * step)
    assert not torch.equal((v * (1 / step)).round().clamp(-128, 127), exact)  # the trap is real


def test_the_loop_and_torch_agree_with_several_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    v, grad = torch.randn(1_000_003), torch.randn(1_000_003)
    found = []
    for way in ("torch", "loop"):
        x, step = v.clone().requires_grad_(), torch.tensor(0.3, requires_grad=True)
        y = by(way, x, step, 0, 15)
        y.backward(grad)
        found.append((y.detach(), x.grad, step.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2].item() == pytest.approx(found[1][2].item(), rel=1e-4)


@WAYS
@pytest.mark.parametrize("per_channel", [False, True])
def test_twice_differentiable(per_channel, way):
    v = torch.randn(4, 6, dtype=torch.float64).mul(3).requires_grad_()
    shape = (4, 1) if per_channel else ()
    step = torch.full(shape, 0.7, dtype=torch.float64, requires_grad=True)
    target = torch.randn(4, 6, dtype=torch.float64)
    loss = (by(way, v, step, -8, 7) - target).pow(3).sum()
    (of_v,) = torch.autograd.grad(loss, v, create_graph=True)
    probe = torch.randn_like(v)
    (second,) = torch.autograd.grad((of_v * probe).sum(), v)
    ratio = (v / step).detach()
    inside = (ratio > -8) & (ratio < 7)
    quantized = ratio.clamp(-8, 7).round() * step.detach()
    assert torch.allclose(second, probe * inside * 6 * (quantized - target))
    assert second.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@WAYS
def test_sixteen_bit_values_are_quantized_in_fp32(dtype, way):
    v = torch.randn(500).to(dtype).requires_grad_()
    step = torch.tensor(0.0173, requires_grad=True)
    y = by(way, v, step, -128, 127)
    y.sum().backward()
    assert y.dtype == v.grad.dtype == dtype
    assert step.grad.dtype == torch.float32
    wide = (v.float() / step).clamp(-128, 127).round()
    assert torch.equal(y, (wide * step).to(dtype))
    assert not torch.equal((v / step.to(dtype)).clamp(-128, 127).round().float(), wide)  # 16-bit division differs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@WAYS
def test_the_default_dtype_changes_no_gradient(dtype, way):
    """In a thread of its own, too."""
    v = torch.randn(300_000)

    def gradients():
        x, step = v.clone().requires_grad_(), torch.tensor(0.1, dtype=torch.float32, requires_grad=True)
        return torch.autograd.grad(by(way, x, step, -8, 7), (x, step), v)

    before = torch.get_default_dtype()
    with ThreadPoolExecutor(1) as thread:
        try:
            torch.set_default_dtype(dtype)
            found = thread.submit(gradients).result()
        finally:
            torch.set_default_dtype(before)
        later = thread.submit(gradients).result()
    for each in (found, later):
        assert all(torch.equal(*pair) for pair in zip(each, gradients(), strict=True))


@pytest.mark.parametrize("raw", [0.0, -0.0, -0.5, 1e-40, -1e-40])
def test_a_step_driven_to_zero_or_below_is_still_usable(raw):
    v, step = torch.randn(50, requires_grad=True), torch.tensor(raw, requires_grad=True)
    y = lsq(v, step, -8, 7)
    y.sum().backward()
    assert positive_scale(step) >= FLOOR
    assert y.isfinite().all()
    assert step.grad.isfinite()


def test_the_gradient_of_a_negative_step_is_mirrored():
    grads = []
    for sign in (1, -1):
        step = torch.tensor(sign * 0.3, requires_grad=True)
        lsq(torch.linspace(-2, 2, 41), step, -8, 7).square().sum().backward()
        grads.append(step.grad.item())
    assert grads[0] == -grads[1] != 0


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_steps_survive_any_optimizer_at_a_mad_rate(optimizer):
    step = torch.tensor(0.1, requires_grad=True)
    mad = optimizer([step], lr=10.0)
    for _ in range(20):
        mad.zero_grad()
        y = lsq(torch.randn(100), step, -8, 7)
        y.square().mean().backward()
        mad.step()
        assert y.isfinite().all()
    assert positive_scale(step).item() > 0


def test_infinities_clamp_and_do_not_poison_the_step():
    v = torch.tensor([math.inf, -math.inf, 1.0], requires_grad=True)
    step = torch.tensor(0.5, requires_grad=True)
    y = lsq(v, step, -8, 7)
    y.sum().backward()
    assert y.tolist() == [3.5, -4.0, 1.0]
    assert step.grad.item() == 7 - 8


@WAYS
def test_empty_tensors_pass(way):
    v, step = torch.zeros(0, 3, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    by(way, v, step, -8, 7).sum().backward()
    assert step.grad.item() == 0


def test_first_step_is_lsqs():
    assert first_scale(torch.tensor(0.3), 7).item() == pytest.approx(2 * 0.3 / math.sqrt(7))


def test_backward_keeps_only_what_the_layer_before_keeps_too():
    kept = []
    v, step = torch.randn(10, requires_grad=True), torch.tensor(0.1, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lsq(v, step, -8, 7)
    assert {t.data_ptr() for t in kept} == {v.data_ptr(), step.data_ptr()}


tensors = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50).map(torch.tensor)
steps = st.floats(2**-20, 2**10, width=32).map(torch.tensor)
ranges = st.tuples(st.integers(2, 8), st.booleans()).map(lambda pair: code_range(*pair))
modes = st.sampled_from(["loop", "torch"])


@settings(max_examples=150, deadline=None)
@given(tensors, steps, ranges, modes)
def test_idempotent(v, step, limits, way):
    once = by(way, v, step, *limits)
    assert torch.equal(by(way, once, step, *limits), once)


@settings(max_examples=150, deadline=None)
@given(tensors, steps, ranges, modes)
def test_monotone(v, step, limits, way):
    y = by(way, v.sort().values, step, *limits)
    assert (y.diff() >= 0).all()


@settings(max_examples=150, deadline=None)
@given(tensors, steps, ranges, modes)
def test_range_respected_and_near(v, step, limits, way):
    low, high = limits
    y = by(way, v, step, low, high)
    assert ((y >= low * step) & (y <= high * step)).all()
    whole = codes(v, step, low, high)
    assert torch.equal(whole, whole.round())
    assert torch.equal(whole * step, y)
    inside = (v / step > low) & (v / step < high)
    assert ((y - v).abs()[inside] <= step * 0.5001 + 1e-6 * v.abs()[inside]).all()
