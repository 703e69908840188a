"""What is written by hand so that tables need not load scipy is what scipy has."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.fft import next_fast_len
from scipy.stats import rankdata

from bitplan.stats.ranks import doubled_ranks
from bitplan.stats.splits import _fast_length


@given(st.lists(st.integers(-3, 3) | st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_ranks_are_twice_scipys(values):
    found = doubled_ranks(values)
    assert found.tolist() == (2 * rankdata(values)).tolist()
    assert found.dtype == np.int64


def test_fast_lengths_are_scipys():
    asked = [*range(1, 2000), *(2**power + more for power in range(11, 31) for more in (-1, 0, 1))]
    assert [_fast_length(least) for least in asked] == [next_fast_len(least, real=True) for least in asked]
