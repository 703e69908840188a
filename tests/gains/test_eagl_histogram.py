"""Histograms equal the paper's snippet, bin for bin, for any weights."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.core.codes import code_range
from bitplan.core.errors import InputError
from bitplan.gains import histogram
from bitplan.gains.histogram import Scheme, Weights, count_weights
from bitplan.weights.tensors import Tensor
from bitplan.weights.torch_tensors import as_tensor


def count(values: np.ndarray, step: float, bits: int, name: str = "w") -> np.ndarray:
    """The histogram of fp32 weights that learned one step."""
    weights = Weights(Tensor(name, "F32", values.shape, values), learned=np.array([step], np.float32), bits=bits)
    [[counts]] = count_weights([weights], [bits], Scheme())
    return counts


def snippet(tensor: torch.Tensor, scale: torch.Tensor, precision: int) -> list[int]:
    """The paper's appendix; its undefined layer_min is −2^(precision−1)."""
    low = -(2 ** (precision - 1))
    qt = (tensor / scale).clamp(low, 2 ** (precision - 1) - 1).round()
    new = (qt.contiguous().view(-1) + (-low)).int()
    return torch.bincount(new, minlength=2**precision).tolist()


def adversarial(step: float, bits: int, seed: int, size: int = 3000) -> np.ndarray:
    """Ties k+0.5 and up to 2 ulp beside them, ±0, ±inf, denormals, huge and ordinary values."""
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        ties = ((rng.integers(-(2**bits), 2**bits, size) + 0.5) * np.float64(step)).astype(np.float32)
        for _ in range(2):
            move = rng.integers(-1, 2, size)
            ties = np.where(move == 0, ties, np.nextafter(ties, np.float32(np.inf) * move, dtype=np.float32))
        plain_values = (rng.standard_normal(size) * step * 3).astype(np.float32)
    special = np.array([0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 1e-39, -1e-39, 3e38, -3e38], np.float32)
    mixed = np.concatenate([ties[~np.isnan(ties)], special, plain_values])
    return rng.permutation(mixed).astype(np.float32)


STEPS = st.floats(min_value=2.0**-130, max_value=2.0**100, width=32)


@settings(max_examples=60, deadline=None)
@given(step=STEPS, bits=st.integers(2, 8), seed=st.integers(0, 999), cut=st.integers(0, 300))
def test_equal_to_the_snippet_on_adversarial_weights(step, bits, seed, cut):
    values = adversarial(step, bits, seed)[cut:]
    assert count(values, step, bits).tolist() == snippet(torch.from_numpy(values), torch.tensor(step), bits)


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_the_reciprocal_would_not_be_exact(bits):
    """The adversarial weights do their job: multiplying by 1/s moves codes."""
    step = np.float32(0.07)
    values = adversarial(float(step), bits, 1)
    low, high = code_range(bits)
    with np.errstate(over="ignore"):
        wrong = np.rint(np.clip(values * (np.float32(1) / step), low, high)).astype(int) - low
    right = count(values, step, bits)
    assert np.bincount(wrong, minlength=2**bits).tolist() != right.tolist()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8, 12, 16])
@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 2_047, 2_048, 2_177, 16_128, 200_001])
def test_every_size_and_precision(bits, size):
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    counts = count(values, 0.3, bits)
    low, high = code_range(bits)
    codes = np.rint(np.clip(values / np.float32(0.3), low, high)).astype(int) - low
    assert counts.tolist() == np.bincount(codes, minlength=2**bits).tolist()


def test_counters_do_not_overflow():
    """All weights in one code: the fullest counters there are."""
    counts = count(np.full(3_000_000, 7.0, np.float32), np.float32(1), 4)
    assert counts.tolist() == [0] * 15 + [3_000_000]


@pytest.mark.parametrize("at", [0, 63, 64, 200, 999])
@pytest.mark.parametrize("bits", [4, 8])
def test_nan_is_an_error_that_names_the_tensor(at, bits):
    values = np.ones(1000, np.float32)
    values[at] = np.nan
    with pytest.raises(InputError, match=r"'layer3\.conv'.*NaN"):
        count(values, np.float32(0.1), bits, "layer3.conv")


def patterns(dtype: torch.dtype, *, nan: bool = False) -> torch.Tensor:
    """Every 16-bit pattern there is, in a shuffled order."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every if nan else every[~every.isnan()]
    return every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("step", [1e-39, 6e-8, 0.0123, 1.0, 700.0])
def test_sixteen_bit_weights_are_widened_first(dtype, bits, step):
    every = patterns(dtype)
    weights = Weights(as_tensor("w", every), learned=np.array([step], np.float32), bits=bits)
    [[counts]] = count_weights([weights], [bits], Scheme())
    assert counts.tolist() == snippet(every.float(), torch.tensor(step), bits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_nan_is_found(dtype):
    weights = Weights(as_tensor("gone", patterns(dtype, nan=True)), learned=np.ones(1, np.float32), bits=4)
    with pytest.raises(InputError, match=r"'gone'.*NaN"):
        count_weights([weights], [4], Scheme())


@pytest.mark.parametrize("shift", range(9))
def test_sixteen_bit_weights_at_any_address(shift):
    """An odd or unaligned place in a file changes nothing."""
    values = np.random.default_rng(0).standard_normal(1003).astype(np.float16)
    room = np.zeros(4096, np.uint8)
    room[shift : shift + values.nbytes] = values.view(np.uint8)
    data = room[shift : shift + values.nbytes].view(np.uint16)
    weights = Weights(Tensor("w", "F16", values.shape, data), learned=np.array([0.5], np.float32), bits=4)
    [[counts]] = count_weights([weights], [4], Scheme())
    assert counts.tolist() == snippet(torch.from_numpy(values).float(), torch.tensor(0.5), 4)


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_fp32_weights_at_any_address(shift):
    values = np.random.default_rng(0).standard_normal(1003).astype(np.float32)
    room = np.zeros(8192, np.uint8)
    room[shift : shift + values.nbytes] = values.view(np.uint8)
    data = room[shift : shift + values.nbytes].view(np.float32)
    data.flags.writeable = False
    weights = Weights(Tensor("w", "F32", values.shape, data), learned=np.array([0.5], np.float32), bits=4)
    [[counts]] = count_weights([weights], [4], Scheme())
    assert counts.tolist() == snippet(torch.from_numpy(values), torch.tensor(0.5), 4)


@pytest.mark.parametrize(
    ("shape", "layout"), [((7, 200), "out_in"), ((200, 7), "in_out"), ((3, 40, 5), "stacked_in_out")]
)
def test_learned_steps_per_output_channel(shape, layout):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows = weight if layout == "out_in" else weight.transpose(-1, -2).reshape(-1, shape[-2])
    learned = torch.rand(len(rows), 1, generator=torch.Generator().manual_seed(1)) + 0.1
    weights = Weights(as_tensor("w", weight), layout, learned.numpy().ravel(), 4)
    [[counts, finer]] = count_weights([weights], [4, 6], Scheme())
    assert counts.tolist() == snippet(rows, learned, 4)
    assert finer.tolist() == snippet(rows, learned / 4, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 128), (5, 300), (4, 200, 3, 3), (1, 1), (3, 127)])
@pytest.mark.parametrize("kind", ["lsq", "absmax"])
def test_steps_per_group_of_inputs(dtype, shape, kind):
    """A group is 128 inputs with all their kernel positions; the last one of a row may be smaller."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = np.zeros(16, int)
    for row in weight.float():
        for group in row.split(128):
            step = 2 * group.abs().double().mean() / 7**0.5 if kind == "lsq" else group.abs().max() / 7
            expected += np.array(snippet(group, step.float(), 4))
    [[counts]] = count_weights([Weights(as_tensor("w", weight))], [4], Scheme(kind, "group"))
    assert counts.tolist() == expected.tolist()


def test_many_tensors_in_pieces(monkeypatch):
    """Tensors longer than a piece, shorter ones, empty ones; progress ends at the total."""
    monkeypatch.setattr(histogram, "PIECE", 1 << 20)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n).astype(np.float32) for n in (0, 5, 2_500_000, 1, 0, 400_000, 1_048_576)]
    step = np.array([0.4], np.float32)
    weights = [Weights(Tensor("w", "F32", a.shape, a), learned=step, bits=4) for a in arrays]
    told = []
    counted = count_weights(weights, [2, 4], Scheme(), lambda done, total, what: told.append((done, total)))
    for array, (low, high) in zip(arrays, counted, strict=True):
        assert high.tolist() == snippet(torch.from_numpy(array), torch.tensor(0.4), 4)
        assert low.tolist() == snippet(torch.from_numpy(array), torch.tensor(1.6), 2)
    total = sum(array.size for array in arrays)
    assert told[-1] == (total, total)
    assert told == sorted(told)


@pytest.mark.parametrize("bad", [0.0, -0.1, float("nan"), float("inf")])
def test_impossible_learned_steps(bad):
    with pytest.raises(InputError, match="finite and above 0"):
        Weights(as_tensor("w", torch.ones(3, 3)), learned=np.array([bad], np.float32), bits=4)
    with pytest.raises(InputError, match="2 learned steps"):
        Weights(as_tensor("w", torch.ones(3, 3)), learned=np.ones(2, np.float32), bits=4)
