"""Two networks on the same windows."""

import numpy as np
import pytest

from bitplan.core.errors import InputError
from bitplan.stats.windows import paired


def windows(seed=0, count=60):
    return np.random.default_rng(seed).normal(3.5, 0.4, count)


def test_a_small_difference_on_every_window_is_found_where_windows_differ_far_more():
    theirs = windows()
    ours = theirs - 0.02 + np.random.default_rng(1).normal(0, 0.02, 60)
    found = paired(ours, theirs)
    assert found.low < found.difference < found.high < 0
    assert found.significant
    assert found.ratio == pytest.approx(np.exp(np.mean(ours) - np.mean(theirs)))
    assert "60 windows" in str(found)
    assert "chance" not in str(found)


def test_intervals_hold_the_truth_as_often_as_they_say():
    held = 0
    for seed in range(200):
        differences = np.random.default_rng(seed).normal(0.1, 1.0, 40)
        found = paired(differences, np.zeros(40), seed=seed)
        held += found.low <= 0.1 <= found.high
    assert 176 <= held <= 199


def test_no_difference_may_be_chance_and_swapping_turns_the_sign():
    one, other = windows(2), windows(3)
    assert not paired(one, other).significant
    assert "chance" in str(paired(one, other))
    assert paired(one, other).difference == pytest.approx(-paired(other, one).difference)
    assert paired(one, other) == paired(one, other)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([1.0, 2.0], [1.0], "2 windows cannot be paired with 1"),
        ([1.0], [1.0], "1 windows say nothing"),
        ([1.0, float("inf")], [1.0, 2.0], "not a finite number"),
    ],
)
def test_what_cannot_be_paired_is_said(ours, theirs, said):
    with pytest.raises(InputError, match=said):
        paired(ours, theirs)
