"""Steps found without training: `mse` against brute force, the others by formula, and degenerate cases."""

import numpy as np
import pytest
import torch

from bitplan.core.codes import code_range, entropy
from bitplan.core.errors import InputError
from bitplan.gains.eagl import bootstrap_error
from bitplan.gains.histogram import (
    KINDS,
    Scheme,
    Weights,
    count_weights,
    distribution_of,
    formula_steps,
    least_squares_step,
    run_steps,
)
from bitplan.weights.tensors import Tensor

RNG = np.random.default_rng(0)
SHAPES = {
    "normal": RNG.standard_normal(2000),
    "laplace": RNG.laplace(size=2000) * 1e-3,
    "heavy": RNG.standard_t(2, size=2000) * 1e4,
    "uniform": RNG.uniform(-1, 1, 2000),
    "sparse": RNG.standard_normal(2000) * (RNG.random(2000) < 0.05),
    "outlier": np.append(RNG.standard_normal(1999) * 1e-2, 10.0),
    "one-sided": RNG.exponential(size=2000),
}


def tensor(values: np.ndarray, dtype: str = "F32") -> Tensor:
    flat = values.astype(np.float32)
    if dtype == "F16":
        return Tensor("w", dtype, values.shape, flat.astype(np.float16).view(np.uint16))
    if dtype == "BF16":
        return Tensor("w", dtype, values.shape, (flat.view(np.uint32) >> 16).astype(np.uint16))
    return Tensor("w", dtype, values.shape, flat)


def squared_error(values: np.ndarray, step: float, bits: int) -> float:
    low, high = code_range(bits)
    values = values.astype(np.float64)
    return float(np.sum((values - step * np.rint(np.clip(values / step, low, high))) ** 2))


def brute_force(values: np.ndarray, bits: int) -> float:
    top = float(np.abs(values).max()) / code_range(bits)[1]
    return min(squared_error(values, step, bits) for step in np.geomspace(top / 300, top * 1.2, 4000))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_mse_is_as_good_as_brute_force(shape, bits):
    weights = tensor(SHAPES[shape])
    values, step = weights.floats(), least_squares_step(distribution_of(weights), bits)
    assert squared_error(values, float(step[0]), bits) <= 1.002 * brute_force(values, bits)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_mse_of_sixteen_bit_weights(dtype):
    weights = tensor(SHAPES["normal"], dtype)
    step = least_squares_step(distribution_of(weights), 4)
    assert squared_error(weights.floats(), float(step[0]), 4) <= 1.0005 * brute_force(weights.floats(), 4)


@pytest.mark.parametrize(("bits", "slack"), [(2, 1.02), (4, 1.02), (8, 1.15)])
@pytest.mark.parametrize("shape", ["normal", "laplace", "uniform", "heavy"])
def test_mse_of_runs(bits, slack, shape):
    rows = SHAPES[shape][:1920].reshape(4, 480).astype(np.float32)
    found = run_steps("mse", bits, rows, 480, "w")
    for row, step in zip(rows, found, strict=True):
        assert squared_error(row, float(step), bits) <= slack * brute_force(row, bits)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("kind", ["lsq", "absmax"])
def test_formulas(dtype, kind):
    weights = tensor(SHAPES["normal"], dtype)
    values = weights.floats().astype(np.float64)
    step = 2 * np.abs(values).mean() / np.sqrt(7) if kind == "lsq" else np.abs(values).max() / 7
    [[counts]] = count_weights([Weights(weights)], [4], Scheme(kind))
    learned = Weights(tensor(weights.floats()), learned=np.array([step], np.float32), bits=4)
    assert counts.tolist() == count_weights([learned], [4], Scheme())[0][0].tolist()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("per", ["tensor", "channel", "group"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, -0.0, 0.3, -0.3, 6e-8, 1e4])
def test_one_value_has_no_entropy(dtype, per, kind, value):
    weights = tensor(np.full((6, 50), value), dtype)
    weights = Tensor("w", dtype, (6, 50), weights.data.reshape(-1))
    [[low, high]] = count_weights([Weights(weights)], [2, 4], Scheme(kind, per))
    assert entropy(low) == entropy(high) == 0
    assert low.sum() == high.sum() == 300


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per", ["tensor", "channel", "group"])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_no_weights_at_all(dtype, kind, per, shape):
    weights = Tensor("w", dtype, shape, np.zeros(0, np.float32 if dtype == "F32" else np.uint16))
    [[counts]] = count_weights([Weights(weights)], [4], Scheme(kind, per))
    assert counts.tolist() == [0] * 16
    assert entropy(counts) == 0


def test_a_step_is_never_zero():
    least = np.array([1e-45], np.float32)
    assert formula_steps("absmax", 8, least.astype(float), least, 1) > 0
    assert formula_steps("lsq", 4, np.zeros(1), np.zeros(1, np.float32), 0) == 1


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bad", "word"), [(np.inf, "infinity"), (-np.inf, "infinity"), (np.nan, "NaN")])
def test_no_step_follows_from_what_is_not_finite(dtype, per, kind, bad, word):
    values = np.ones((4, 40))
    values[2, 3] = bad
    flat = tensor(values.ravel(), dtype)
    with pytest.raises(InputError, match=f"'w' contain {word}"):
        count_weights([Weights(Tensor("w", dtype, (4, 40), flat.data))], [4], Scheme(kind, per))


def paper_entropy(counts: np.ndarray) -> float:
    p = torch.from_numpy(counts).float() / int(counts.sum()) + 1e-10
    return float(-(p * p.log2()).sum())


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("bits", [2, 4])
def test_entropy_is_the_papers(shape, bits):
    weights = tensor(SHAPES[shape])
    [[counts]] = count_weights([Weights(weights)], [bits], Scheme("absmax"))
    assert entropy(counts) == pytest.approx(paper_entropy(counts), abs=1e-6)


@pytest.mark.parametrize(
    ("counts", "bits"), [([1, 1, 1, 1], 2), ([5, 0], 0), ([0, 0], 0), ([3, 1], 0.8112781244591328)]
)
def test_entropy_in_bits(counts, bits):
    assert entropy(counts) == pytest.approx(bits, abs=1e-12)


def test_bootstrap_is_repeatable_and_right():
    """The standard error of a fair coin's first deviation: against the delta method on a biased one."""
    counts = [700, 300]
    error = bootstrap_error(counts, 4000, seed=3)
    assert error == bootstrap_error(counts, 4000, seed=3)
    assert error != bootstrap_error(counts, 4000, seed=4)
    delta = np.sqrt(0.21 / 1000) * abs(np.log2(0.3 / 0.7))
    assert error == pytest.approx(delta, rel=0.05)
    assert bootstrap_error([0, 0], 10, seed=0) == 0
