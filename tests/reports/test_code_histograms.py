"""Codes at a lower precision, from the counts at the highest one."""

import numpy as np
import pytest

from bitplan.core.codes import entropy
from bitplan.reports.contents import lower_histogram


def counts_of(weights, step, bits):
    """How often each code occurs, as the network itself would have it."""
    half = 2 ** (bits - 1)
    codes = np.clip(np.rint(weights / step), -half, half - 1).astype(int)
    return np.bincount(codes + half, minlength=2 * half)


@pytest.mark.parametrize("spread", [1.4, 2.0, 4.0])
@pytest.mark.parametrize(("top", "bits"), [(4, 2), (4, 3), (8, 4), (8, 2)])
def test_counts_are_near_those_of_the_lowered_layer(spread, top, bits):
    step = 2.0 ** (4 - top)
    weights = np.random.default_rng(0).normal(0, spread, 200_000)
    found = np.array(lower_histogram(counts_of(weights, step, top), top - bits))
    wanted = counts_of(weights, step * 2 ** (top - bits), bits)
    assert found.sum() == wanted.sum()
    assert np.abs(found - wanted).max() < 0.01 * len(weights)
    assert entropy(found) == pytest.approx(entropy(wanted), abs=0.02)


def test_codes_that_are_multiples_of_the_new_step_move_exactly():
    counts = [0] * 16
    counts[0], counts[4], counts[8], counts[12] = 5, 7, 11, 13  # the codes −8, −4, 0 and 4
    assert lower_histogram(counts, 2) == [5, 7, 11, 13]
    assert lower_histogram(counts, 0) == counts


def test_what_lies_between_two_codes_is_divided():
    counts = [0] * 16
    counts[8 + 2] = 100  # of ±0.5 around 2, half is nearer to 0 and half to 4
    assert lower_histogram(counts, 2) == [0, 0, 50, 50]
    counts[8 + 1] = 160  # more on the left: the density falls
    assert lower_histogram(counts, 2) == [0, 0, 160 + 60, 40]
